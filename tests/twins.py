"""Third-party libraries, imported once and quietly, for comparisons with our models.

from twins import transformers, timm
hugging = transformers()      # the module, or the test is skipped with the reason
"""

from __future__ import annotations

import warnings
from functools import cache
from types import ModuleType

import pytest

from regard.adapters.third_party_imports import import_quietly


@cache
def _quietly(name: str) -> ModuleType | str:
    """The module, or why it cannot be imported."""
    try:
        return import_quietly(name)
    except Exception as failure:  # an import may fail with anything, and every reason is a reason to skip
        return f"{name} cannot be imported: {type(failure).__name__}: {failure}"


def library(name: str) -> ModuleType:
    """This module of another project; skips the test, with the reason, where it cannot be imported."""
    found = _quietly(name)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def transformers() -> ModuleType:
    """Hugging Face transformers, whose models are imported on first use of their names."""
    module = library("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The names are lazy: touching one of each family here keeps their warnings out of the tests.
        for name in ("BertModel", "GPT2LMHeadModel", "LlamaForCausalLM", "ViTModel"):
            getattr(module, name)
    return module


def timm() -> ModuleType:
    """timm, with the torchvision it needs."""
    return library("timm")
