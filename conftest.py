"""Run the Python blocks of README.md and docs/*.md as tests; the blocks of one document share one namespace.

A block that must not run is preceded by a line with the reason: `<!-- skip: next "needs a GPU" -->`.
"""

from __future__ import annotations

import gc
import os
import tempfile
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE

import pytest
from hypothesis import settings
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# The time of one example says more about the machine's other work than about the code. Examples are the same in every
# run, so that a test fails for whoever broke it and for nobody else; REGARD_SEARCH=1 draws new ones.
searching = bool(os.environ.get("REGARD_SEARCH"))
settings.register_profile("regard", deadline=None, print_blob=True, derandomize=not searching)
settings.load_profile("regard")


# Files that take longest. They come first, so that no process is left alone with one of them at the end.
LONGEST = (
    "docs/laws.md",
    "tests/zoo/",
    "tests/laws/",
    "tests/test_documents.py",
    "tests/cost_model/",
    "tests/visualize/",
    "tests/adapters/",
)


def pytest_collection_finish() -> None:
    """Ten thousand tests and their modules live as long as the run: the garbage collector need not look at them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def enter_empty_folder(namespace: dict) -> None:
    """A document may save files; they land in a folder of its own, not in the repository."""
    namespace["_home"] = os.getcwd()
    namespace["_folder"] = tempfile.TemporaryDirectory()
    os.chdir(namespace["_folder"].name)


def leave_folder(namespace: dict) -> None:
    os.chdir(namespace["_home"])
    namespace["_folder"].cleanup()


pytest_collect_file = Sybil(
    parsers=[
        PythonCodeBlockParser(doctest_optionflags=ELLIPSIS | NORMALIZE_WHITESPACE),
        SkipParser(),
    ],
    patterns=["README.md", "docs/*.md"],
    setup=enter_empty_folder,
    teardown=leave_folder,
).pytest()
