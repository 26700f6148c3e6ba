"""Examples in docstrings run as tests; they may use torch and Regard's public names without an import."""

from __future__ import annotations

import pytest
import torch

import regard


@pytest.fixture(autouse=True)
def public_names(doctest_namespace: dict[str, object]) -> None:
    names = getattr(regard, "__all__", ())
    doctest_namespace.update({"torch": torch} | {name: getattr(regard, name) for name in names})
