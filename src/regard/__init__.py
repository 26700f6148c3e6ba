"""Regard: describe an attention once; it runs fast, is proved right, says what it costs and shows what it sees."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from regard.attention import Attention, Explanation, attend, explain, weights
from regard.backends.linear_attention import LinearState, step
from regard.biases import Alibi, Bias, Gaussian, Quadratic, RelativeTable, RowColumn, Shift, TransformerXL
from regard.caching import clear_cache, set_cache_limit
from regard.errors import (
    BackendError,
    BiasError,
    CalculusError,
    CostError,
    LawViolation,
    MaskWarning,
    PatternError,
    RegardError,
    ShapeError,
)
from regard.patterns import (
    Axial,
    Blocks,
    Causal,
    First,
    Full,
    GridStride,
    GridWindow,
    Mask,
    Neighborhood,
    Padding,
    Pattern,
    Random,
    Segments,
    Selected,
    Strided,
    Where,
    Window,
    gallery,
    layers_to_connect,
    read_pattern,
)
from regard.planner import Plan, plan

if TYPE_CHECKING:
    from regard.convert import attention_to_conv, conv_to_attention
    from regard.cost_model import Cost, cost
    from regard.integrations import accelerate, restore, sdpa, use
    from regard.laws import assert_laws, check, probe
    from regard.visualize import show, widget

__version__ = "0.1.0"

__all__ = [
    "Alibi",
    "Attention",
    "Axial",
    "BackendError",
    "Bias",
    "BiasError",
    "Blocks",
    "CalculusError",
    "Causal",
    "Cost",
    "CostError",
    "Explanation",
    "First",
    "Full",
    "Gaussian",
    "GridStride",
    "GridWindow",
    "LawViolation",
    "LinearState",
    "Mask",
    "MaskWarning",
    "Neighborhood",
    "Padding",
    "Pattern",
    "PatternError",
    "Plan",
    "Quadratic",
    "Random",
    "RegardError",
    "RelativeTable",
    "RowColumn",
    "Segments",
    "Selected",
    "ShapeError",
    "Shift",
    "Strided",
    "TransformerXL",
    "Where",
    "Window",
    "accelerate",
    "assert_laws",
    "attend",
    "attention_to_conv",
    "check",
    "clear_cache",
    "conv_to_attention",
    "cost",
    "explain",
    "gallery",
    "layers_to_connect",
    "plan",
    "probe",
    "read_pattern",
    "restore",
    "sdpa",
    "set_cache_limit",
    "show",
    "step",
    "use",
    "weights",
    "widget",
]

# `import regard` loads what `attend` needs; these are imported when they are first used.
_LAZY = {
    "Cost": "regard.cost_model",
    "accelerate": "regard.integrations",
    "assert_laws": "regard.laws",
    "attention_to_conv": "regard.convert",
    "check": "regard.laws",
    "conv_to_attention": "regard.convert",
    "cost": "regard.cost_model",
    "probe": "regard.laws",
    "restore": "regard.integrations",
    "sdpa": "regard.integrations",
    "show": "regard.visualize",
    "use": "regard.integrations",
    "widget": "regard.visualize",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
