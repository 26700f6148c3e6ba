"""The demo's page, made from a few epochs, once for all tests that use it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


@pytest.fixture(scope="session")
def quick_page(tmp_path_factory) -> Path:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import demo

        with demo.one_thread():
            return demo.run(tmp_path_factory.mktemp("demo"), quick=True)
    finally:
        sys.path.remove(str(EXAMPLES))
