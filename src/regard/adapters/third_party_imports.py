"""Imports of third-party libraries: without their warnings, and with a torchvision that does not fit this torch.

`tools/mend_torchvision.py` describes how the two can be incompatible, and repairs an environment. Here the
same two operators are declared in memory, for environments that were not repaired.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
from functools import cache
from types import ModuleType

import torch

# Operators for boxes that torchvision declares in its compiled library and needs at import.
SCHEMAS = tuple(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms"))
# What the error of the failing import contains.
SYMPTOM = "torchvision::"


def import_quietly(name: str) -> ModuleType:
    """This module of another project. Raises what its import raises."""
    # No network access, unless the environment allows it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mend_torchvision()
        return importlib.import_module(name)


@cache
def mend_torchvision() -> object:
    """Declare what a torchvision that cannot be imported is missing; nothing where it is absent or works."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
        return None
    except Exception as failure:  # the module that needs it reports why
        if SYMPTOM not in str(failure):
            return None
    for module in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[module]  # half imported
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        try:
            torch._C._dispatch_find_schema_or_throw(f"torchvision::{schema.partition('(')[0]}", "")
        except RuntimeError:
            library.define(schema)
    return library  # kept by the cache: operators live as long as their library
