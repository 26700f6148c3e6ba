"""Importing other people's libraries: without their warnings, and with a torchvision that does not fit this torch.

A wheel of torchvision does not know a CPU build of torch; then it cannot be imported, and with it neither timm nor any
model of transformers. Declaring the two operators it asks for is enough: nothing here detects boxes.
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

BOXES = ("nms", "qnms")


def quietly(name: str) -> ModuleType:
    """This module of another project. Raises what its import raises."""
    # Nothing is looked up on the network, unless somebody says otherwise.
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
    except Exception as failure:  # its own reasons are told by whoever needs it
        if "torchvision::" not in str(failure):
            return None
    for module in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[module]  # half imported
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in BOXES:
        try:
            torch._C._dispatch_find_schema_or_throw(f"torchvision::{name}", "")
        except RuntimeError:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # kept by the cache: operators live as long as their library
