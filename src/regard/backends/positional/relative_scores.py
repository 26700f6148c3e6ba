"""Which requests depend on relative position alone, and their table of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.backends.base import Request, accumulation_dtype
from regard.backends.positional.relative_layout import RelativeLayout
from regard.biases import Shift
from regard.biases.base import Bias
from regard.kernels.bias_table import list_table_entries
from regard.patterns import Grid, Pattern


def find_refusal(request: Request) -> str | None:
    """Why the scores of a request are not a function of relative position, or `None` if they are."""
    bias = request.bias
    if request.feature_map is not None:
        return "features read content, and this backend reads positions only"
    if request.hard:
        return "hard attention needs content scores, and this backend reads positions only"
    if bias is None:
        return "it needs a positional bias, and there is none"
    if isinstance(bias, Tensor):
        return "a tensor has a score for each pair; it needs one for each relative position, as biases have"
    if not bias.relative and not isinstance(bias, Shift):
        return f"the scores of {type(bias).__name__} depend on more than relative position"
    return _check_grid(bias, request) or _check_pattern(request.pattern, bias)


def _check_grid(bias: Bias, request: Request) -> str | None:
    grid, start = getattr(bias, "grid", None), getattr(bias, "start", 0)
    if grid is None:
        return None
    if start or not request.lengths.queries == request.lengths.keys == grid[0] * grid[1]:
        return f"queries and keys must be the {grid[0]} x {grid[1]} tokens of the grid and nothing else"
    return None


def _check_pattern(pattern: Pattern, bias: Bias) -> str | None:
    """Why visibility is not a function of relative position, or `None` if it is."""
    if pattern.is_full:
        return None
    if isinstance(bias, Shift) and not bias.relative:
        return "a Shift with edges other than zeros runs as a gather, which takes no pattern but Full()"
    sides = getattr(bias, "grid", None)
    if pattern.is_shift_invariant(None if sides is None else Grid(*sides)):
        return None
    where = "a line" if sides is None else f"a grid of {sides[0]} x {sides[1]}"
    return f"visibility under {pattern!r} is not a function of relative position on {where}"


def make_layout(request: Request) -> RelativeLayout:
    grid = getattr(request.bias, "grid", None)
    queries, keys = request.lengths
    return RelativeLayout((1, queries), (1, keys)) if grid is None else RelativeLayout(grid, grid)


def make_table(request: Request) -> Tensor:
    """The score of every relative position, `(head, entry)`, minus infinity where the pattern hides it."""
    assert isinstance(request.bias, Bias)
    device, heads = request.query.device, request.heads
    query_position, key_position = (at.to(device) for at in list_table_entries(request.bias, request.lengths))
    table = request.bias.scores(query_position, key_position).to(accumulation_dtype(request))
    if not request.dense:
        visible = request.pattern.allows(query_position, key_position, keys=request.lengths.keys)
        table = torch.where(visible, table, -torch.inf)
    return table.expand(heads, -1)
