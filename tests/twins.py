"""Other people's libraries, imported once and quietly, for tests that hold our models against them.

    from twins import transformers, timm
    hugging = transformers()      # the module, or the test is skipped with the reason

A wheel of torchvision does not know a CPU build of torch, and then neither timm nor any model of transformers can be
imported. Declaring the two operators it asks for is enough: nothing here detects boxes.
"""

from __future__ import annotations

import importlib
import os
import warnings
from functools import cache
from types import ModuleType

import pytest
import torch

# Nothing is looked up on the network; asking takes minutes to fail where there is none.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@cache
def _declare_box_operators() -> torch.library.Library:
    """The two operators torchvision asks for, unless a torchvision that works has brought them."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        try:
            torch._C._dispatch_find_schema_or_throw(f"torchvision::{name}", "")
        except RuntimeError:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


@cache
def _quietly(name: str) -> ModuleType | str:
    """The module, or why it cannot be imported."""
    _declare_box_operators()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
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
