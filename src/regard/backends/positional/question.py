"""Which requests look by position alone, and what their table of relative scores is."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.base import Request, accumulation_dtype
from regard.backends.positional.layout import Layout
from regard.biases import Shift
from regard.biases.base import Bias
from regard.kernels.positions import entries_of
from regard.patterns import Grid, Pattern


def refusal(request: Request) -> str | None:
    """Why a request does not look by relative position, or `None` if it does."""
    bias = request.bias
    if request.feature_map is not None:
        return "features read content, and it looks by position"
    if request.hard:
        return "hard attention looks for the best content, and it looks by position"
    if bias is None:
        return "it looks by position, and no bias says where"
    if isinstance(bias, Tensor):
        return "a tensor has a score for each pair; it needs one for each relative position, as biases have"
    if not bias.relative and not isinstance(bias, Shift):
        return f"the scores of {type(bias).__name__} depend on more than relative position"
    return _misplaced(bias, request) or _by_pattern(request.pattern, bias)


def _misplaced(bias: Bias, request: Request) -> str | None:
    grid, start = getattr(bias, "grid", None), getattr(bias, "start", 0)
    if grid is None:
        return None
    if start or not request.lengths.queries == request.lengths.keys == grid[0] * grid[1]:
        return f"queries and keys must be the {grid[0]} x {grid[1]} tokens of the grid and nothing else"
    return None


def _by_pattern(pattern: Pattern, bias: Bias) -> str | None:
    """Why whether a pair is visible does not follow from its relative position."""
    if pattern.is_full:
        return None
    if isinstance(bias, Shift) and not bias.relative:
        return "a shift that finds something at the edges is a gather; it takes no pattern beside Full()"
    sides = getattr(bias, "grid", None)
    if pattern.is_shift_invariant(None if sides is None else Grid(*sides)):
        return None
    where = "a line" if sides is None else f"a grid of {sides[0]} x {sides[1]}"
    return f"which pairs {pattern!r} shows does not follow from their relative position on {where}"


def layout_of(request: Request) -> Layout:
    grid = getattr(request.bias, "grid", None)
    queries, keys = request.lengths
    return Layout((1, queries), (1, keys)) if grid is None else Layout(grid, grid)


def table_of(request: Request) -> Tensor:
    """The score of every relative position, `(head, entry)`, minus infinity where the pattern hides it."""
    assert isinstance(request.bias, Bias)
    device, heads = request.query.device, request.heads
    query_position, key_position = (at.to(device) for at in entries_of(request.bias, request.lengths))
    table = request.bias.scores(query_position, key_position).to(accumulation_dtype(request))
    if not request.dense:
        seen = request.pattern.allows(query_position, key_position, keys=request.lengths.keys)
        table = torch.where(seen, table, -torch.inf)
    return table.expand(heads, -1)
