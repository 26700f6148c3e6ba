"""Every page of the book runs: its blocks raise nothing, its assertions hold, its values can be computed.

And a number that is typed in a page is checked: changed a little, it fails the page.
"""

from __future__ import annotations

import ast
import dataclasses
import os

import pytest

from regard.book import list_page_ids, load_page, run_page
from regard.book.execution import Output
from regard.book.page import Code, Page
from regard.errors import PageError

PAGES = [pytest.param(name, marks=[pytest.mark.slow] if load_page(name).slow else []) for name in list_page_ids()]


@pytest.mark.parametrize("name", PAGES)
def test_every_page_runs_and_its_checks_hold(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    executed = run_page(load_page(name))
    assert any(isinstance(part, Output) for part in executed.parts), "a page without code computes nothing"
    assert os.listdir(tmp_path) == [], "a page leaves no files"


def find_typed_numbers(source: str) -> list[ast.Constant]:
    """Numbers that a block compares what it computed with: `x == 48`, `x == (3, 4)`, `abs(x - 1.5) < 1e-9`."""
    found: list[ast.Constant] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assert):
            continue
        for part in ast.walk(node.test):
            if isinstance(part, ast.Compare) and isinstance(part.ops[-1], ast.Eq) and is_typed(part.comparators[-1]):
                found += [each for each in ast.walk(part.comparators[-1]) if isinstance(each, ast.Constant)]
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "abs":
                difference = part.args[0]
                if isinstance(difference, ast.BinOp) and isinstance(difference.right, ast.Constant):
                    found.append(difference.right)
    return [each for each in found if isinstance(each.value, int | float) and each.value not in (True, False)]


def is_typed(node: ast.expr) -> bool:
    """Whether an expression is made of numbers alone."""
    kinds = ast.Constant | ast.Tuple | ast.List | ast.BinOp | ast.operator | ast.expr_context
    return all(isinstance(part, kinds) for part in ast.walk(node))


def plant_wrong_number(page: Page) -> Page | None:
    """The page with its last typed number changed by 1, or by a thousandth; None if it has none."""
    for index, part in reversed(list(enumerate(page.parts))):
        numbers = find_typed_numbers(part.source) if isinstance(part, Code) else []
        if numbers:
            last = max(numbers, key=lambda node: (node.lineno, node.col_offset))
            assert isinstance(last.value, int | float)
            assert last.end_col_offset is not None
            wrong = last.value + 1 if isinstance(last.value, int) else last.value * 1.001
            lines = [line.encode() for line in part.source.split("\n")]
            line = lines[last.lineno - 1]
            lines[last.lineno - 1] = line[: last.col_offset] + repr(wrong).encode() + line[last.end_col_offset :]
            changed = part._replace(source=b"\n".join(lines).decode())
            return dataclasses.replace(page, parts=(*page.parts[:index], changed, *page.parts[index + 1 :]))
    return None


QUICK = [load_page(name) for name in list_page_ids() if not load_page(name).slow]
PLANTED = {page.id: planted for page in QUICK if (planted := plant_wrong_number(page)) is not None}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_number_fails_its_page(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PageError, match="A check of the page"):
        run_page(PLANTED[name])


def test_most_pages_have_typed_numbers():
    assert len(PLANTED) > len(QUICK) / 2
