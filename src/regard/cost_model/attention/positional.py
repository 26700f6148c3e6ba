"""The cost of attention by position alone (`scale=0`), as the backend `positional` runs it.

On a grid of R by W tokens weights that are a product over rows and columns need two sums instead of one,

    B H R W (R + W) e  instead of  B H (R W)^2 e

multiply-adds, and `H (R^2 + W^2)` exponentials. A head that attends to one place copies. The other two methods, a ratio
of convolutions and features of positions, have no single formula; `explain` gives their work.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch

from regard.attention import Attention
from regard.backends import find
from regard.backends.base import Request
from regard.backends.positional.costs import choose_method
from regard.biases import axis_scores
from regard.biases.base import Bias
from regard.calculus import axis_weights
from regard.cost_model import depth
from regard.cost_model.attention.bias import count_parameters, is_learned, measure_saved_bytes
from regard.cost_model.attention.shape import Shape
from regard.cost_model.cost_part import CostPart, PassCost
from regard.cost_model.run_mode import RunMode
from regard.cost_model.sizes import Breakdown
from regard.cost_model.symbols import size_symbols
from regard.errors import CostError
from regard.features import feature_map
from regard.patterns import Pattern

R, W = size_symbols("R W")


def count_positional(attention: Attention, pattern: Pattern, shape: Shape, mode: RunMode) -> Breakdown:
    """The parts of an attention by position; what the backend refuses, and what is no product, is refused."""
    bias, request = attention.bias, _make_request(attention, pattern, shape)
    because = "the number of tokens decides which method runs, and it is not given"
    if request is not None:
        because = find("positional").refuse(request)
        if because is None and choose_method(request) in ("ratio", "features"):
            because = (
                "it takes a ratio of convolutions or features of positions here: which method runs depends on the heads"
            )
    if because is not None or request is None:
        raise CostError(
            "The work of 'positional' cannot be counted for this attention.",
            asked='backend="positional"',
            because=str(because),
            instead='backend=None for what the mathematics needs, or backend="reference"',
        )
    if choose_method(request) == "gather":
        moved = PassCost(bytes=2 * mode.item * shape.output)
        return Breakdown(
            [CostPart("values", forward=moved, backward=moved)], {}, ("a copy: no products, and nothing is saved",)
        )
    assert isinstance(bias, Bias)
    grid: Any = bias.grid
    rows, columns = shape.sides or (R, W)
    item, heads = mode.item, sympy.Integer(bias.heads)
    squares: Any = heads * (rows**2 + columns**2)
    products = shape.batch * shape.heads * rows * columns * (rows + columns) * shape.value_dim
    half = shape.batch * shape.heads * rows * columns * shape.value_dim  # between the two sums
    longest = sympy.Max(rows, columns)
    weights = CostPart(
        "weights",
        parameters=count_parameters(bias),
        forward=PassCost(
            exponentials=squares,
            bytes=2 * item * squares,
            depth=1 + depth.softmax(longest, stable=mode.stable, serial=mode.serial),
        ),
        backward=PassCost(bytes=3 * item * squares, depth=depth.inner(longest, mode.serial) + 2),
    )
    both = depth.inner(rows, mode.serial) + depth.inner(columns, mode.serial)
    moved = item * (shape.value + 2 * half + shape.output + squares)
    values = CostPart(
        "values",
        forward=PassCost(macs=products, bytes=moved, depth=both),
        backward=PassCost(macs=(2 if is_learned(bias) else 1) * products, bytes=2 * moved, depth=both),
        saved=_count_saved(bias, shape, mode) if shape.keeps else sympy.Integer(0),
    )
    return Breakdown([weights, values], {} if shape.sides else {R: grid[0], W: grid[1]})


def count_saved_by_positional(attention: Attention, pattern: Pattern, shape: Shape, mode: RunMode) -> sympy.Expr | None:
    """Bytes that are saved where `auto` chooses this backend, by rows and columns; `None` elsewhere."""
    request = _make_request(attention, pattern, shape) if shape.keeps else None
    if attention.scale != 0 or request is None or find("positional").refuse(request) is not None:
        return None
    if choose_method(request) != "separable" or not isinstance(attention.bias, Bias):
        return None
    grid: Any = attention.bias.grid
    saved_bytes: Any = _count_saved(attention.bias, shape, mode)
    return saved_bytes.xreplace({R: sympy.Integer(grid[0]), W: sympy.Integer(grid[1])})


def _count_saved(bias: Bias, shape: Shape, mode: RunMode) -> sympy.Expr:
    """The weights of both axes; where they are learned, what their formulas save, the values, and the sums between."""
    wide = torch.float64 if mode.dtype == torch.float64 else torch.float32
    heads = shape.number(shape.heads) or bias.heads

    def made() -> tuple[torch.Tensor, ...]:
        axes = axis_scores(bias)
        assert axes is not None
        return axis_weights(*(scores.to(wide).expand(heads, -1, -1) for scores in axes))

    saved_bytes: Any = sympy.Integer(measure_saved_bytes(made))
    if shape.group > 1:  # each row of the batch has its own copy of the weights along rows
        saved_bytes += mode.wide * (shape.batch - 1) * shape.heads * R**2
    if is_learned(bias):
        saved_bytes += mode.wide * shape.batch * R * W * shape.value_dim * (shape.kv_heads + shape.heads)
    return saved_bytes


def _make_request(attention: Attention, pattern: Pattern, shape: Shape) -> Request | None:
    """The request as the backend would get it, with meta tensors; `None` without a number of tokens."""
    if shape.lengths is None:
        return None
    queries, keys = shape.lengths
    sizes = (shape.batch, shape.heads, shape.kv_heads, shape.dim, shape.value_dim)
    batch, heads, kv_heads, dim, value_dim = (shape.number(size) or 1 for size in sizes)
    query, key, value = (
        torch.empty(each, device="meta")
        for each in ((batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim))
    )
    scale = dim**-0.5 if attention.scale is None else attention.scale
    features = None if attention.feature_map is None else feature_map(attention.feature_map)
    return Request(query, key, value, pattern, scale, attention.bias, features)


__all__ = ["count_positional", "count_saved_by_positional"]
