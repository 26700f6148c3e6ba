"""Which pairs a backend computes, and what it saves for backward: read off its plan, before it runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor

from regard.backends.limits import _plan_means
from regard.backends.tiles import group_tiles, tile_height
from regard.cost_model.attention.pairs import AllowedPairs
from regard.cost_model.attention.shape import Shape
from regard.cost_model.run_mode import RunMode
from regard.cost_model.symbols import size_symbol
from regard.errors import CostError
from regard.kernels import library
from regard.kernels.decode import MAX_QUERIES
from regard.kernels.key_intervals import find_key_intervals
from regard.kernels.program import best_plan
from regard.patterns import Lengths, Pattern


class ExecutedPairs(NamedTuple):
    """Pairs that are computed, of one head over all rows of the batch; numbers of their symbols; remarks."""

    area: sympy.Expr
    values: dict[sympy.Symbol, int]
    notes: tuple[str, ...] = ()


def check_backend(backend: str | None, bias: Any, hard: bool) -> None:
    """Refuse what the backend refuses: it has no work to count."""
    because = None
    if backend == "native" and hard:
        because = "its softmax is soft: hard attention is a search, which 'blocked' does"
    elif backend == "native" and bias is not None and not isinstance(bias, Tensor) and not bias.relative:
        because = f"its kernels tabulate a bias by relative position, and {type(bias).__name__} needs more"
    elif backend == "blocked" and not isinstance(bias, Tensor) and getattr(bias, "needs_content", False):
        because = f"{type(bias).__name__} multiplies anew in every tile, which has no formula"
    if because is not None:
        raise CostError(
            f"The work of {backend!r} cannot be counted for this attention.",
            asked=f"backend={backend!r}",
            because=because,
            instead='backend=None for what the mathematics needs, or backend="reference"',
        )


def find_executed_pairs(pattern: Pattern, shape: Shape, mode: RunMode, allowed: AllowedPairs) -> ExecutedPairs:
    """The pairs inside the tiles of `mode.backend`."""
    square = shape.batch * shape.queries * shape.keys
    if mode.backend is None:
        return ExecutedPairs(allowed.formula, {})
    if mode.backend == "reference" or pattern.is_full:
        return ExecutedPairs(square, {})
    if shape.lengths is None:
        remark = f"{mode.backend}: how many pairs its tiles hold depends on the number of tokens; Z stays open"
        return ExecutedPairs(shape.batch * size_symbol("Z"), {}, (remark,))
    lengths, pattern, heads = Lengths(*shape.lengths), pattern._with_folded_heads, pattern.heads
    if mode.backend == "native":
        if (
            mode.step == "decode"
            and lengths.queries <= MAX_QUERIES
            and find_key_intervals(pattern, lengths) is not None
        ):
            return ExecutedPairs(allowed.formula, {})  # a cache is read key by key
        _check_library()
        wide = torch.float64 if mode.dtype == torch.float64 else torch.float32
        area = best_plan(pattern, lengths, library.lanes(wide)).area
    else:
        height = tile_height(pattern, lengths, shape.group if heads is None else 1)
        areas = (
            tiles * queries * keys for tiles, queries, keys in (g.shape for g in group_tiles(pattern, lengths, height))
        )
        area = sum(areas)
    if heads is not None:  # each head is a row of the plan
        each = sympy.Rational(area, heads) * (shape.batch if pattern.rows == heads else 1)
        return ExecutedPairs(each, {}, ("tiles of different heads are added up to one number",))
    return _name_area(area, pattern, shape)


def _name_area(area: int, pattern: Pattern, shape: Shape) -> ExecutedPairs:
    if pattern.rows is not None:
        return ExecutedPairs(sympy.Integer(area), {}, ("tiles of different rows are added up to one number",))
    if shape.lengths is not None and area == shape.lengths[0] * shape.lengths[1]:
        return ExecutedPairs(shape.batch * shape.queries * shape.keys, {})
    return ExecutedPairs(shape.batch * size_symbol("Z"), {size_symbol("Z"): area})


def _check_library() -> None:
    if (missing := library.missing()) is not None:
        raise CostError(
            "The kernels whose work is to be counted are not installed.",
            asked='backend="native"',
            because=missing,
            instead='backend="blocked", or backend=None',
        )


# The limits of temperature, as `blocked` runs them


def count_mean_products(pattern: Pattern, shape: Shape) -> tuple[sympy.Expr, tuple[str, ...]]:
    """Products of the tree of sums with the tiles that read it."""
    if shape.lengths is None:
        remark = "blocked: how many sums its tiles read depends on the number of tokens; Z stays open"
        return shape.batch * shape.kv_heads * size_symbol("Z") * shape.value_dim, (remark,)
    read = sum(step.weight.numel() for step in _plan_means(pattern._with_folded_heads, Lengths(*shape.lengths)))
    rows = shape.batch if pattern.rows is None else 1
    heads = shape.kv_heads if pattern.heads is None else 1  # heads that differ are rows of the plan
    return rows * heads * read * shape.value_dim, ("blocked: the sums its tiles read stay a number",)


def count_saved_by_limit(
    kind: str, pattern: Pattern, shape: Shape, mode: RunMode
) -> tuple[sympy.Expr, tuple[str, ...]]:
    """What the two limits save: which key won, or the matrices of ones that sums were taken with."""
    if not shape.keeps:
        return sympy.Integer(0), ()
    if kind == "hard":
        # The winner's number, two marks, and values whose heads are repeated for the queries that share them.
        repeated = shape.batch * shape.heads * shape.keys * shape.value_dim
        if shape.kv_heads == shape.heads and mode.item == mode.wide:
            repeated = shape.given(repeated)
        return mode.wide * repeated + (8 + 1 + 1) * shape.rows, ()
    sums = shape.batch * shape.kv_heads * shape.queries * shape.value_dim
    count = shape.queries * (pattern.rows or 1)
    if shape.lengths is None:
        return mode.wide * (sums + count), (
            "saved activations: without the tiles of ones, which need the number of tokens",
        )
    read = sum(step.weight.numel() for step in _plan_means(pattern._with_folded_heads, Lengths(*shape.lengths)))
    return mode.wide * (sums + count + read), ()


__all__ = ["ExecutedPairs", "check_backend", "count_mean_products", "count_saved_by_limit", "find_executed_pairs"]
