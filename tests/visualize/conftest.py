"""The demo's page, made from a few epochs, once for all tests that use it, in whichever process."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


@pytest.fixture(scope="session")
def quick_page(tmp_path_factory) -> Path:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "of the demo"
    folder.mkdir(exist_ok=True)
    sys.path.insert(0, str(EXAMPLES))
    try:
        import demo

        with (folder / "lock").open("w") as lock, demo.one_thread():
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making it
            page = folder / "demo" / "report.html"
            return page if page.exists() else demo.run(page.parent, quick=True)
    finally:
        sys.path.remove(str(EXAMPLES))
