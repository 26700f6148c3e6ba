"""The keys of few queries as intervals: what one step of decoding sees is nearly always one run of the cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from regard.patterns import And, Causal, First, Full, Lengths, Or, Padding, Pattern, Random, Selected, Strided, Window
from regard.patterns.box import Array
from regard.plan import Part, plan
from regard.plan.cache import keep

MOST_QUERIES = 8
_LIMIT = 1 << 13  # bytes of intervals to remember: lengths that grow by one at each step never come back


@keep(_LIMIT, lambda made: 512 if made is None else 512 + 16 * made[0].numel())
def intervals(pattern: Pattern, lengths: Lengths) -> tuple[Tensor, Tensor] | None:
    """Start and stop of the keys that each query sees, `(row or 1, query)`, cached.

    `None` where there are more than eight queries, or where one of them sees anything else than neighbours. A query
    that sees nothing has start = stop.

        >>> intervals(Causal() & Window(2, 0), Lengths(2, 7))
        (tensor([[3, 4]]), tensor([[6, 7]]))
        >>> intervals(Window(2, 0, step=2), Lengths(1, 7)) is None
        True
    """
    if lengths.queries > MOST_QUERIES:
        return None
    pattern.lengths(*lengths)  # refuses lengths that do not fit
    found = _by_formula(pattern, lengths)
    if found is None and not _scattered(pattern):
        found = _by_plan(pattern, lengths)
    if found is None:
        return None
    shape = (pattern.rows or 1, lengths.queries)
    start, stop = (np.broadcast_to(np.clip(edge, 0, lengths.keys), shape) for edge in found)
    empty = start >= stop
    return torch.from_numpy(np.where(empty, 0, start)), torch.from_numpy(np.where(empty, 0, stop))


def _by_formula(pattern: Pattern, lengths: Lengths) -> tuple[Array, Array] | None:
    """For the patterns of decoders, whose lengths change at every step: planning would take longer than the step."""
    keys = np.asarray(lengths.keys)
    position = np.arange(lengths.offset, lengths.keys)
    if isinstance(pattern, Full):
        return 0 * keys, keys
    if isinstance(pattern, Causal):
        return 0 * keys, position + 1
    if isinstance(pattern, Window) and pattern.step == 1:
        return position - pattern.left, position + pattern.right + 1
    if isinstance(pattern, Padding):
        start, stop = pattern._ends(lengths.keys)
        return start[:, None], stop[:, None]
    if isinstance(pattern, First):
        return 0 * keys, np.where(position < pattern.count, keys, pattern.count)
    if isinstance(pattern, And | Or):
        left, right = _by_formula(pattern.left, lengths), _by_formula(pattern.right, lengths)
        if left is None or right is None:
            return None
        overlap = np.maximum(left[0], right[0]), np.minimum(left[1], right[1])
        if isinstance(pattern, And):
            return overlap
        # Two runs are one if they overlap or touch; whether an empty one matters is not asked.
        if (overlap[0] <= overlap[1]).all():
            return np.minimum(left[0], right[0]), np.maximum(left[1], right[1])
    return None


def _scattered(pattern: Pattern) -> bool:
    """Whether a pattern is made of pieces: planning at each step only to find that out would cost too much."""
    if isinstance(pattern, And):
        return _scattered(pattern.left) or _scattered(pattern.right)
    return isinstance(pattern, Or | Strided | Random | Selected) or (isinstance(pattern, Window) and pattern.step > 1)


def _by_plan(pattern: Pattern, lengths: Lengths) -> tuple[Array, Array] | None:
    """From the tiles of single queries."""
    parts = plan(pattern, *lengths, block=1, sort=False).parts  # one, with the keys in their own order
    start = np.zeros((pattern.rows or 1, lengths.queries), dtype=np.int64)
    stop = np.zeros_like(start)
    for part in parts:
        for tile in range(part.tiles):
            run = _one_run(part, tile)
            if run is None:
                return None
            place = part.row[tile], part.queries(tile)[0]
            start[place], stop[place] = run
    return start, stop


def _one_run(part: Part, tile: int) -> tuple[int, int] | None:
    """The run of keys that a tile of one query sees, or `None` if it has a gap."""
    runs = slice(part.run_pointer[tile], part.run_pointer[tile + 1])
    start, stop = part.run_start[runs], part.run_stop[runs]
    if not start.size:
        return 0, 0
    ragged = part.keys(tile, whole=False)
    if (start[1:] != stop[:-1]).any() or not part.mask(part.queries(tile), ragged, int(part.row[tile])).all():
        return None
    return int(start[0]), int(stop[-1])
