"""Every page of the book runs: its blocks raise nothing, its assertions hold, its values can be computed."""

from __future__ import annotations

import os

import pytest

from regard.book import list_page_ids, load_page, run_page
from regard.book.execution import Output

PAGES = [pytest.param(name, marks=[pytest.mark.slow] if load_page(name).slow else []) for name in list_page_ids()]


@pytest.mark.parametrize("name", PAGES)
def test_every_page_runs_and_its_checks_hold(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    executed = run_page(load_page(name))
    assert any(isinstance(part, Output) for part in executed.parts), "a page without code computes nothing"
    assert os.listdir(tmp_path) == [], "a page leaves no files"
