"""Regard: describe an attention once; it runs fast, is proved right, says what it costs and shows what it sees."""

from __future__ import annotations

from regard.attention import Attention, Explanation, attend, explain, weights
from regard.backends.linear import LinearState, step
from regard.biases import Alibi, Bias, Gaussian, Quadratic, RelativeTable, RowColumn, Shift, TransformerXL
from regard.convert import attention_to_conv, conv_to_attention
from regard.cost import Cost, cost
from regard.errors import (
    BackendError,
    BiasError,
    CalculusError,
    CostError,
    LawViolation,
    PatternError,
    RegardError,
    ShapeError,
)
from regard.laws import assert_laws, check, probe
from regard.patterns import (
    Axial,
    Blocks,
    Causal,
    First,
    Full,
    GridStride,
    GridWindow,
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
from regard.plan import Plan, plan
from regard.show import show

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
    "assert_laws",
    "attend",
    "attention_to_conv",
    "check",
    "conv_to_attention",
    "cost",
    "explain",
    "gallery",
    "layers_to_connect",
    "plan",
    "probe",
    "read_pattern",
    "show",
    "step",
    "weights",
]
