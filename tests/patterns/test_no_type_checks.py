"""No code outside of `regard.patterns` tests the type of a pattern."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import regard
from regard import patterns
from regard.patterns import EVERY, Pattern

PACKAGE = Path(next(iter(regard.__path__)))
KINDS = {kind.__name__ for kind in (*EVERY, patterns.And, patterns.Or, patterns.Not)} | {"GridPattern", "FoldedHeads"}


def imported_patterns(tree: ast.AST) -> set[str]:
    """The names under which a module imports kinds of patterns; `Pattern` itself may be tested."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("regard.patterns"):
            found |= {alias.asname or alias.name for alias in node.names if alias.name in KINDS}
    return found


def names_in(node: ast.AST) -> set[str]:
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names | {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}


def find_type_checks(source: str) -> list[int]:
    """Lines that compare the type of something with a kind of pattern, or pass a kind on."""
    tree = ast.parse(source)
    known = imported_patterns(tree)
    lines = []
    for node in ast.walk(tree):
        compared: list[ast.AST] = []
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            compared = list(node.args[1:])
        elif isinstance(node, ast.Compare):  # type(x) is Causal, kind == Causal, type(x) in (Causal, Window)
            compared = [part for part in (node.left, *node.comparators) if not isinstance(part, ast.Call)]
        elif isinstance(node, ast.MatchClass):
            compared = [node.cls]
        elif isinstance(node, ast.Dict):  # a table by type
            compared = [key for key in node.keys if key is not None]
            compared = [key for key in compared if isinstance(key, ast.Name)]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):  # a list of types
            compared = [part for part in node.elts if isinstance(part, ast.Name)]
        elif isinstance(node, ast.Call):  # holds(pattern, Causal)
            compared = [part for part in node.args if isinstance(part, ast.Name)]
        lines += [node.lineno for part in compared if names_in(part) & known]
    return sorted(set(lines))


OUTSIDE = [file for file in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "patterns" not in file.parents]


@pytest.mark.parametrize("file", OUTSIDE, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_code_outside_tests_the_type_of_a_pattern(file):
    wrong = find_type_checks(file.read_text(encoding="utf-8"))
    assert not wrong, f"lines {wrong}: ask the pattern a question, and give Pattern a default answer"


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(x, Causal)",
        "isinstance(x, Full | Causal)",
        "isinstance(x, (int, Causal))",
        "issubclass(type(x), Causal)",
        "type(x) is Causal",
        "type(x) in (Causal,)",
        "KINDS = (Causal, Full)",
        "TABLE = {Causal: 3}",
        "holds(x, Causal)",
        "match x:\n    case Causal():\n        pass",
    ],
)
def test_every_form_of_type_test_is_caught(line):
    assert find_type_checks(f"from regard.patterns import Causal, Full\n{line}\n")


@pytest.mark.parametrize(
    "line", ["x = Causal()", "isinstance(x, Pattern)", "x == Causal()", "f(Causal())", "x.is_causal", "[Causal(), 3]"]
)
def test_making_and_comparing_patterns_is_fine(line):
    assert not find_type_checks(f"from regard.patterns import Causal, Pattern\n{line}\n")


def test_patterns_load_sympy_only_for_formulas():
    for file in sorted((PACKAGE / "patterns").glob("*.py")):
        if file.name == "pair_counts.py":
            continue
        body = ast.parse(file.read_text(encoding="utf-8")).body
        eager = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name for node in eager for name in (ast.unparse(node).replace(",", " ").split())}
        assert not names & {"sympy", "pair_counts", "regard.patterns.pair_counts"}, file.name


def test_every_question_has_a_default():
    assert Pattern.__abstractmethods__ == {"_allows"}
