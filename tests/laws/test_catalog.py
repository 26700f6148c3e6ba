"""The catalog of laws: one file for each, and none that needs another."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import regard.laws.catalog
from regard.laws import LAWS

FILES = [path for path in Path(regard.laws.catalog.__file__).parent.glob("*.py") if path.name != "__init__.py"]


def test_every_law_has_a_file_of_its_own():
    assert len(FILES) == len(LAWS)
    assert len({type(law).__module__ for law in LAWS}) == len(LAWS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_law_imports_another_one(path: Path):
    imported = [node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    assert not [module for module in imported if module and module.startswith("regard.laws.catalog")]
