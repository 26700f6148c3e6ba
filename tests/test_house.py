"""The picture of the packages in docs/design.md, from the real imports; `python tests/test_house.py` prints it.

A package imports only from the levels below its own. Two packages on one level do not import each other, except the
descriptions. Backends never import one another. No file outgrows 500 lines. Imports inside functions and under
TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "regard"

# From the top down. A package is a module or a folder directly under src/regard.
LEVELS: dict[str, set[str]] = {
    "command": {"__main__"},
    "entry points": {"cli"},
    "lab": {"lab"},
    "book": {"book"},
    "integrations": {"integrations"},
    "tools": {"laws", "cost_model", "visualize", "convert", "train"},
    "adapters": {"adapters"},
    "downloads": {"downloads"},
    "models": {"models"},
    "layers": {"layers"},
    "distributed": {"distributed"},
    "operator": {"attention"},
    "backends": {"backends"},
    "kernels": {"kernels"},
    "descriptions": {"patterns", "biases", "planner", "calculus", "features"},
    "foundation": {"autocast", "batching", "caching", "dropout", "nonfinite", "render"},
    "errors": {"errors"},
}
# Levels whose packages may import each other.
OPEN_LEVELS = {"descriptions"}
# What backends share: modules of regard.backends that are not themselves backends.
SHARED_BY_BACKENDS = {"base", "limits", "scores", "tiles"}
MOST_LINES = 500


class Arrow(NamedTuple):
    """Module `importer` imports module `imported`; both are full names such as regard.patterns.base."""

    importer: str
    imported: str


# Reading the imports


def modules_of(package: Path) -> dict[str, Path]:
    """The full name of every module below a package folder, and its file."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@functools.cache
def arrows_of(package: Path) -> list[Arrow]:
    """Every import of one module of the package by another."""
    modules = modules_of(package)
    arrows = set()
    for importer, file in modules.items():
        for name in imported_names(file, importer):
            imported = longest_module(name, modules)
            if imported == package.name and name.count(".") > 1:
                imported = ".".join(name.split(".")[:2])  # a package that is not built yet, not the public face
            if imported is not None and imported != importer:
                arrows.add(Arrow(importer, imported))
    return sorted(arrows)


def imported_names(file: Path, module: str) -> Iterable[str]:
    """Full names that a file imports; for `from a import b` the name a.b, whether b is a module or not."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # one dot is the module's own package, every further dot its parent
            drop = node.level - (file.name == "__init__.py")
            parents = module.split(".")[: len(module.split(".")) - drop] if node.level else []
            start = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def longest_module(name: str, modules: Container[str]) -> str | None:
    """The module that a full name lives in: regard.patterns.Window lives in regard.patterns."""
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in modules), None)


# Judging them


def package_of(module: str) -> str:
    """The package of a module; the empty name is the public face, regard itself."""
    return ".".join(module.split(".")[1:2])


def level_of(package: str) -> str | None:
    return next((level for level, packages in LEVELS.items() if package in packages), None)


def find_unknown_packages(modules: Iterable[str]) -> list[str]:
    unknown = sorted({package_of(module) for module in modules} - {""} - set().union(*LEVELS.values()))
    return [f"regard.{package} is on no level: add it to LEVELS in tests/test_house.py" for package in unknown]


def wrong_arrows(arrows: Iterable[Arrow]) -> list[str]:
    """Arrows that point up, or across a level. The public face imports anything, and nothing imports it."""
    order = list(LEVELS)
    wrong = []
    for importer, imported in arrows:
        here, there = package_of(importer), package_of(imported)
        above, below = level_of(here), level_of(there)
        if here == there or here == "" or above is None:
            continue
        if there == "":
            wrong.append(f"{importer} imports the public face; import the package itself")
        elif below is None:
            continue  # find_unknown_packages reports it
        elif order.index(below) < order.index(above):
            wrong.append(f"{importer} ({above}) imports {imported} ({below}): the arrow points up")
        elif above == below and above not in OPEN_LEVELS:
            wrong.append(f"{importer} imports {imported}: both packages are on the level {above}")
    return wrong


def entangled_backends(arrows: Iterable[Arrow]) -> list[str]:
    """Arrows by which one backend reaches another; only the registry, regard.backends, knows them all."""
    wrong = []
    for importer, imported in arrows:
        if package_of(importer) != "backends" or package_of(imported) != "backends":
            continue
        here, there = (".".join(name.split(".")[2:3]) for name in (importer, imported))
        if here == "" or here == there or there in SHARED_BY_BACKENDS:
            continue
        reason = "which imports every backend" if there == "" else "which is another backend"
        wrong.append(f"{importer} imports {imported}, {reason}; share through {sorted(SHARED_BY_BACKENDS)}")
    return wrong


def too_long(lines: Mapping[str, int]) -> list[str]:
    return [f"{file} has {count} lines, more than {MOST_LINES}" for file, count in lines.items() if count > MOST_LINES]


def count_lines(root: Path) -> dict[str, int]:
    """Lines of each Python file in src and tests, and of each file in csrc."""
    files = [*(root / "src").rglob("*.py"), *(root / "tests").rglob("*.py"), *(root / "csrc").rglob("*")]
    files = sorted(file for file in files if file.is_file())
    return {str(file.relative_to(root)): len(file.read_text(encoding="utf-8").splitlines()) for file in files}


# Drawing them


def picture(modules: Iterable[str], arrows: Iterable[Arrow]) -> str:
    """One line for each package that exists, under its level: the package, and the packages that it imports."""
    packages = {package_of(module) for module in modules}
    uses: dict[str, set[str]] = {package: set() for package in packages}
    for importer, imported in arrows:
        uses[package_of(importer)].add(package_of(imported))
    order = [package for level in LEVELS.values() for package in sorted(level)]
    lines = []
    for level, members in LEVELS.items():
        label = level
        for package in sorted(members & packages):
            targets = [other for other in order if other in uses[package] - {package}]
            lines.append(f"{label:<12} {package:<10} {'-> ' + ' '.join(targets) if targets else ''}".rstrip())
            label = ""
    return "\n".join(lines)


# The real packages


def test_every_package_is_on_a_level():
    assert find_unknown_packages(modules_of(PACKAGE)) == []


def test_the_page_of_the_design_lists_the_same_levels_and_packages():
    page = (ROOT / "docs" / "design.md").read_text().partition("## Packages")[2].partition("\n## ")[0]
    existing = {package_of(module) for module in modules_of(PACKAGE)}
    for level, packages in LEVELS.items():
        line = next((line for line in page.splitlines() if line.startswith(f"    {level} ")), "")
        assert level == "command" or packages & existing <= set(line.split()), f"docs/design.md: {level}"


def test_no_arrow_points_up_or_across():
    assert wrong_arrows(arrows_of(PACKAGE)) == []


def test_backends_do_not_import_one_another():
    assert entangled_backends(arrows_of(PACKAGE)) == []


def test_no_file_outgrows_its_reader():
    assert too_long(count_lines(ROOT)) == []


def test_there_are_modules_and_imports_to_check():
    assert {"regard.errors", "regard.patterns.base"} <= set(modules_of(PACKAGE))
    assert any(arrow.imported == "regard.errors" for arrow in arrows_of(PACKAGE))


# Twins: each check can fail, and fails only for its own reason


def test_an_unknown_package_is_caught_with_the_table_to_extend():
    (message,) = find_unknown_packages(["regard", "regard.attention", "regard.misc.things"])
    assert "regard.misc" in message
    assert "LEVELS in tests/test_house.py" in message


def test_an_arrow_up_is_caught():
    (message,) = wrong_arrows([Arrow("regard.patterns.base", "regard.attention")])
    assert "points up" in message
    assert len(wrong_arrows([Arrow("regard.errors", "regard.planner.blocks")])) == 1


def test_an_arrow_across_is_caught_except_between_descriptions():
    (message,) = wrong_arrows([Arrow("regard.cost_model.count", "regard.visualize")])
    assert "on the level tools" in message
    assert wrong_arrows([Arrow("regard.planner.blocks", "regard.patterns.base")]) == []


def test_an_arrow_to_the_public_face_is_caught():
    (message,) = wrong_arrows([Arrow("regard.layers.blocks", "regard")])
    assert "public face" in message


def test_arrows_down_and_arrows_of_the_public_face_are_allowed():
    down = [("regard.cli", "regard.laws"), ("regard.attention", "regard.backends"), ("regard", "regard.cli")]
    assert wrong_arrows(Arrow(*pair) for pair in down) == []


def test_entangled_backends_are_caught():
    tangle = ["regard.backends.reference", "regard.backends"]
    for imported in tangle:
        assert len(entangled_backends([Arrow("regard.backends.native", imported)])) == 1
    (message,) = entangled_backends([Arrow("regard.backends.base", "regard.backends.native.loader")])
    assert "another backend" in message


def test_backends_may_share_what_is_listed_and_the_registry_imports_them_all():
    fine = [
        Arrow("regard.backends.native", "regard.backends.base"),
        Arrow("regard.backends.native.loader", "regard.backends.native"),
        Arrow("regard.backends", "regard.backends.native"),
    ]
    assert entangled_backends(fine) == []


def test_a_long_file_is_caught(tmp_path):
    for folder, name, lines in [("src", "a.py", 501), ("tests", "b.py", 500), ("csrc", "c.cpp", 503)]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("\n" * lines)
    messages = too_long(count_lines(tmp_path))
    assert [message.split(" has ")[0] for message in messages] == ["csrc/c.cpp", "src/a.py"]


def test_every_form_of_import_is_found(tmp_path):
    house = tmp_path / "regard"
    files = {
        "__init__.py": "from .attention import attend",
        "attention.py": "from regard.biases import Alibi\ndef attend():\n    import regard.planner.blocks",
        "errors.py": "",
        "planner/__init__.py": "from . import blocks\nfrom ..errors import RegardError",
        "planner/blocks.py": "from regard import errors, attend\nfrom .. import planner",
    }
    for name, source in files.items():
        (house / name).parent.mkdir(exist_ok=True)
        (house / name).write_text(source)
    assert {tuple(arrow) for arrow in arrows_of(house)} == {
        ("regard", "regard.attention"),
        ("regard.attention", "regard.planner.blocks"),
        ("regard.attention", "regard.biases"),
        ("regard.planner", "regard.planner.blocks"),
        ("regard.planner", "regard.errors"),
        ("regard.planner.blocks", "regard.errors"),
        ("regard.planner.blocks", "regard"),
        ("regard.planner.blocks", "regard.planner"),
    }
    assert picture(modules_of(house), arrows_of(house)).splitlines() == [
        "operator     attention  -> biases planner",
        "descriptions planner    -> errors",
        "errors       errors",
    ]


if __name__ == "__main__":
    print(picture(modules_of(PACKAGE), arrows_of(PACKAGE)))
