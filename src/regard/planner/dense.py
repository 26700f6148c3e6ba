"""Plans of small attentions, from the whole mask.

A search over boxes takes the same milliseconds for sixteen tokens as for a thousand. Below `MOST_PAIRS` pairs it is
cheaper to evaluate the pattern at every pair; the tiles and runs found that way are exact.
"""

from __future__ import annotations

import numpy as np
import torch

from regard.patterns.base import Pattern
from regard.patterns.box import Array, Lengths
from regard.patterns.token_order import NATURAL_ORDER, BlockOrder
from regard.planner.build import LEAF, join_runs
from regard.planner.part import PlanPart

MOST_PAIRS = 1 << 14


def is_small(pattern: Pattern, lengths: Lengths) -> bool:
    """Whether the mask is small, and sorting the tokens would not make it denser."""
    if (pattern.rows or 1) * lengths.queries * lengths.keys > MOST_PAIRS:
        return False
    orders = [alternative._find_dense_order() for alternative in pattern._split_union()]
    return all(isinstance(order, BlockOrder) or order == NATURAL_ORDER for order in orders)


def evaluate(pattern: Pattern, lengths: Lengths) -> Array:
    """The pattern at every pair, `(row, query, key)`."""
    i = torch.arange(lengths.offset, lengths.keys)[:, None]
    j = torch.arange(lengths.keys)
    rows = pattern.rows or 1
    row = torch.arange(rows)[:, None, None] if pattern.rows else torch.zeros((), dtype=torch.long)
    return pattern._allows(i, j, row, lengths).expand(rows, *lengths).numpy()


def build_from_square(pattern: Pattern, lengths: Lengths, square: Array, block: int) -> PlanPart:
    """Tiles of at most `block` neighbouring queries, and for each the runs of keys that any of them sees."""
    rows, queries, keys = square.shape
    first = np.arange(0, queries, block)
    some = np.logical_or.reduceat(square, first, axis=1)
    every = np.logical_and.reduceat(square, first, axis=1)
    kind = np.zeros((rows * first.size, keys + 2), dtype=np.int8)  # 0 none, 1 some, 2 all; a margin on both sides
    kind[:, 1:-1] = (some.astype(np.int8) + every).reshape(-1, keys)
    changes = kind[:, 1:] != kind[:, :-1]
    owner, start = np.nonzero(changes[:, :-1] & (kind[:, 1:-1] > 0))
    stop = np.nonzero(changes[:, 1:] & (kind[:, 1:-1] > 0))[1] + 1
    whole = kind[owner, start + 1] == 2
    # A short whole run beside a ragged one joins it, as in large plans: kernels take whole runs first, and a last tile
    # that is not full, with more whole keys than the same tile of a longer sequence, would add up in another order.
    follows = (owner[1:] == owner[:-1]) & (start[1:] == stop[:-1])
    whole &= (stop - start >= LEAF) | ~(np.append(follows, False) | np.append(False, follows))
    owner, start, stop, whole = join_runs(owner, start, stop, whole)
    return PlanPart(
        pattern=pattern,
        order=NATURAL_ORDER,
        lengths=lengths,
        query_index=np.arange(queries),
        key_index=np.arange(keys),
        row=np.repeat(np.arange(rows), first.size),
        query_start=np.tile(first, rows),
        query_stop=np.tile(np.minimum(first + block, queries), rows),
        run_pointer=np.searchsorted(owner, np.arange(rows * first.size + 1)),
        run_start=start,
        run_stop=stop,
        run_whole=whole,
        square=square,
    )
