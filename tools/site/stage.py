"""The sources of the site: guides of docs/, README.md, the pages of the book after their run, and lists for autodoc."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import book
import command_line

ROOT = Path(__file__).resolve().parents[2]
# In the order of the sidebar: the file and the part it belongs to.
GUIDES = (
    "Overview <overview>",
    "patterns",
    "biases",
    "models",
    "pretrained",
    "training",
    "training_data",
    "convolution",
    "show",
)
GUIDES += ("cost", "scaling", "distributed", "integrations")
TRUTH = ("laws", "findings")
PROJECT = ("design", "contributing", "changes")
# Pages that come from a file outside of docs/.
OUTSIDE = {"overview": "README.md", "contributing": "CONTRIBUTING.md", "changes": "CHANGELOG.md"}
PACKAGES = {
    "regard": "what `import regard` gives",
    "regard.attention": "descriptions, and `attend`",
    "regard.patterns": "which queries attend to which keys",
    "regard.biases": "scores by position",
    "regard.features": "feature maps of linear attention",
    "regard.layers": "multi-head attention, blocks, positions, caches",
    "regard.models": "whole models, checkpoints, generation",
    "regard.calculus": "mathematics of the softmax",
    "regard.convert": "convolutions as attention, and back",
    "regard.laws": "`check`, laws, counterexamples",
    "regard.cost_model": "formulas and numbers of cost",
    "regard.train": "recipes, runs, heads during training",
    "regard.visualize": "pictures",
    "regard.integrations": "Regard inside of models of other libraries",
    "regard.distributed": "sequences that are cut over processes",
    "regard.book": "pages that run",
    "regard.errors": "errors with four parts",
}
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\[]+)\]\((?P<target>[^()\s]+)\)")
PAGE_OF_BOOK = re.compile(r"(?:\.\./)?src/regard/book/pages/(?P<page>[\w.-]+\.md)")


def write_sources(folder: Path, pages: Iterable[str] | None = None, jobs: int = 2) -> None:
    """Write all sources into an empty folder; `pages` restricts which pages of the book are run, for a quick look."""
    shutil.copytree(ROOT / "docs" / "pictures", folder / "pictures")
    known = {file.stem for file in (ROOT / "docs").glob("*.md")}
    listed = {"overview", *GUIDES[1:], *TRUTH, *PROJECT, "index", "book"}
    for name in sorted(known | listed):
        text = (ROOT / OUTSIDE[name] if name in OUTSIDE else ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        (folder / f"{name}.md").write_text(adapt_links(text), encoding="utf-8")
    with (folder / "index.md").open("a", encoding="utf-8") as file:
        file.write(make_sidebar(sorted(known - listed)))
    book.write_pages(folder / "book", pages, jobs)
    write_reference(folder / "reference")


def adapt_links(text: str) -> str:
    """Links as they are among the sources of the site; a link to a file that is no page becomes plain text."""

    def replace(match: re.Match[str]) -> str:
        target, hash_, anchor = match["target"].partition("#")
        if not target or "://" in target:
            return match[0]
        page = PAGE_OF_BOOK.fullmatch(target)
        if page is not None:
            return f"[{match['text']}](book/{page['page']}{hash_}{anchor})"
        target = target.removeprefix("../").removeprefix("docs/")
        outside = {file: f"{name}.md" for name, file in OUTSIDE.items()}
        target = outside.get(target, target)
        if not target.endswith(".md"):
            return match["text"]
        return f"[{match['text']}]({target}{hash_}{anchor})"

    return map_prose(lambda prose: LINK.sub(replace, prose).replace("](docs/pictures/", "](pictures/"), text)


def map_prose(change: Callable[[str], str], text: str) -> str:
    """The text with everything but its blocks of code changed."""
    parts = re.split(r"(^```.*?^```[^\n]*$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def make_sidebar(others: Iterable[str] = ()) -> str:
    """The parts of the sidebar; guides that are not listed above come after those that are."""
    parts = [
        ("Guides", (*GUIDES, *others)),
        ("The book", ("book", "book/errata", *(f"book/{name}" for name in book.SOURCE_PAGES))),
        ("Laws and findings", TRUTH),
        ("Reference", ("reference/index", "reference/command-line")),
        ("The project", PROJECT),
    ]
    return "".join(
        "\n```{toctree}\n:hidden:\n:caption: " + caption + "\n\n" + "\n".join(names) + "\n```\n"
        for caption, names in parts
    )


def write_reference(folder: Path) -> None:
    """A page for each package, filled by autodoc from docstrings, and one with the help of every command."""
    folder.mkdir()
    rows = "\n".join(f"| [{name}]({name}.md) | {what} |" for name, what in PACKAGES.items())
    toctree = "\n".join(PACKAGES)
    (folder / "index.md").write_text(
        "# Python reference\n\nEvery public name, from its docstring.\n\n| package | has |\n|---|---|\n"
        f"{rows}\n\n```{{toctree}}\n:hidden:\n\n{toctree}\n```\n",
        encoding="utf-8",
    )
    for name in PACKAGES:
        text = make_top_level(name) if name == "regard" else make_package(name)
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    (folder / "command-line.md").write_text(command_line.make_page(), encoding="utf-8")


def make_package(name: str) -> str:
    """The docstrings of the names in `__all__`, or of all public classes and functions of a module."""
    return f"# {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```\n"


def make_top_level(name: str) -> str:
    """The names of the package itself, each with a link to its docstring where it is defined."""
    module = importlib.import_module(name)
    rows = []
    for public in sorted(module.__all__, key=str.lower):
        home = find_home(public, getattr(module, public))
        link = f"{{py:obj}}`{public} <{home}.{public}>`" if home else f"`{public}`"
        doc = (getattr(module, public).__doc__ or "").strip().split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        rows.append(f"| {link} | {' '.join(doc.split())} |")
    return f"# {name}\n\n| name | |\n|---|---|\n" + "\n".join(rows) + "\n"


def find_home(public: str, value: object) -> str | None:
    """The package whose page has this name."""
    for name in PACKAGES:
        if name == "regard":
            continue
        module = importlib.import_module(name)
        names = getattr(module, "__all__", None) or [
            key for key, member in vars(module).items() if getattr(member, "__module__", "") == name
        ]
        if public in names and getattr(module, public) is value:
            return name
    return None
