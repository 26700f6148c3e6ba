"""A fixture for folders whose small sizes should use the general planner instead of the dense one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from regard import clear_cache


@pytest.fixture(scope="module", autouse=True)
def general_plans() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("regard.planner.dense"), "MOST_PAIRS", 0)
        clear_cache()
        yield
    clear_cache()
