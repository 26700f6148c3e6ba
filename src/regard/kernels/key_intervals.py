"""The keys of a few queries as intervals: a decode step nearly always sees one contiguous run of the cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from regard.caching import lru_cache_small, outside_modes
from regard.patterns import Lengths, Pattern
from regard.patterns.box import Array
from regard.planner.dense import evaluate

MOST_QUERIES = 8


# All layers of a model share the lengths of a step; lengths that grow by one never recur.
@lru_cache_small(maxsize=16)
def find_key_intervals(pattern: Pattern, lengths: Lengths) -> tuple[Tensor, Tensor] | None:
    """Start and stop of the keys that each query sees, `(row or 1, query)`, cached.

    `None` where there are more than eight queries, or where one of them sees anything else than neighbours. A query
    that sees nothing has start = stop.

        >>> find_key_intervals(Causal() & Window(2, 0), Lengths(2, 7))
        (tensor([[3, 4]]), tensor([[6, 7]]))
        >>> find_key_intervals(Window(2, 0, step=2), Lengths(1, 7)) is None
        True
    """
    if lengths.queries > MOST_QUERIES:
        return None
    with outside_modes():
        return _compute_key_intervals(pattern, lengths)


def _compute_key_intervals(pattern: Pattern, lengths: Lengths) -> tuple[Tensor, Tensor] | None:
    pattern.lengths(*lengths)  # refuses lengths that do not fit
    # By a formula for the usual patterns of decoders; otherwise the rows of the few queries are evaluated.
    found = pattern._find_key_intervals(lengths)
    if found is None and not pattern._is_scattered:
        found = _read_mask_intervals(evaluate(pattern, lengths))
    if found is None:
        return None
    shape = (pattern.rows or 1, lengths.queries)
    start, stop = (np.broadcast_to(np.clip(edge, 0, lengths.keys), shape) for edge in found)
    empty = start >= stop
    return torch.from_numpy(np.where(empty, 0, start)), torch.from_numpy(np.where(empty, 0, stop))


def _read_mask_intervals(mask: Array) -> tuple[Array, Array] | None:
    """Start and stop of the keys of each query in `(row, query, key)`, or `None` if one of them has a gap."""
    count = mask.sum(-1)
    if not mask.size:
        return count, count
    start, stop = mask.argmax(-1), mask.shape[-1] - mask[..., ::-1].argmax(-1)
    if ((count > 0) & (stop - start != count)).any():
        return None
    return start, np.where(count > 0, stop, start)
