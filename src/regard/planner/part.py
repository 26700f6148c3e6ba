"""Parts: tiles of queries, and for each tile the runs of keys it needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.patterns.base import Pattern
from regard.patterns.box import Array, Lengths
from regard.patterns.token_order import TokenOrder

PAIRS_AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class PlanPart:
    """Some of a pattern's pairs, laid out as tiles after sorting queries and keys.

    Attributes:
        pattern: the pairs of this part; the parts of a plan do not overlap.
        order: how queries and keys were sorted.
        query_index: sorted place -> query number (a row of the query tensor, not an absolute position).
        key_index: sorted place -> key number.
        row: batch row of each tile (0 when the pattern is the same for all rows).
        query_start, query_stop: sorted places of each tile's queries.
        run_pointer: the runs of tile `t` are `run_pointer[t]` to `run_pointer[t + 1]`.
        run_start, run_stop: sorted places of each run's keys.
        run_whole: whether every query of the tile sees every key of the run; otherwise `mask` has the pairs.
        square: the pattern at every pair, `(row, query, key)`, where the attention is small.
    """

    pattern: Pattern
    order: TokenOrder
    lengths: Lengths
    query_index: Array
    key_index: Array
    row: Array
    query_start: Array
    query_stop: Array
    run_pointer: Array
    run_start: Array
    run_stop: Array
    run_whole: Array
    square: Array | None = None

    @property
    def tiles(self) -> int:
        return self.row.size

    @property
    def size(self) -> int:
        """Bytes, with what Python adds to each array."""
        return 512 + sum(128 + held.nbytes for held in vars(self).values() if isinstance(held, np.ndarray))

    @property
    def runs(self) -> int:
        return self.run_start.size

    def batch_rows(self, tile: int, rows: int) -> range:
        """The batch rows, of `rows`, that a tile applies to: its own, or all where the part is the same for all."""
        row = int(self.row[tile])
        return range(row, row + 1) if self.pattern.rows else range(rows)

    def queries(self, tile: int) -> Array:
        """Query numbers of a tile."""
        return self.query_index[self.query_start[tile] : self.query_stop[tile]]

    def keys(self, tile: int, *, whole: bool | None = None) -> Array:
        """Key numbers of a tile: of all its runs, or only of the whole or the ragged ones."""
        runs = range(self.run_pointer[tile], self.run_pointer[tile + 1])
        chosen = [run for run in runs if whole is None or self.run_whole[run] == whole]
        places = [self.key_index[self.run_start[run] : self.run_stop[run]] for run in chosen]
        return np.concatenate(places) if places else np.zeros(0, dtype=np.int64)

    def mask(self, query: Array, key: Array, row: Array | int) -> Tensor:
        """The mask `(..., query, key)` for query numbers `(..., query)` and key numbers `(..., key)`."""
        if self.square is not None:
            batch = np.asarray(row)[..., None, None]
            return torch.from_numpy(self.square[batch, query[..., :, None], key[..., None, :]])
        i = torch.from_numpy(np.ascontiguousarray(query))[..., :, None] + self.lengths.offset
        j = torch.from_numpy(np.ascontiguousarray(key))[..., None, :]
        batch = torch.as_tensor(row)
        batch = batch.reshape(*batch.shape, 1, 1) if batch.ndim else batch
        return self.pattern._allows(i, j, batch, self.lengths).expand(np.broadcast_shapes(i.shape, j.shape))

    def is_ragged(self, tile: int) -> bool:
        return not self.run_whole[self.run_pointer[tile] : self.run_pointer[tile + 1]].all()

    @property
    def area(self) -> int:
        """Pairs that a tile-by-tile computation touches, allowed or not."""
        per_run = self.run_stop - self.run_start
        per_tile = np.add.reduceat(np.append(per_run, 0), self.run_pointer[:-1]) * (np.diff(self.run_pointer) > 0)
        return int((per_tile * (self.query_stop - self.query_start)).sum()) if self.tiles else 0

    def count_pairs(self) -> int:
        """Allowed pairs: whole runs by their size, ragged ones by evaluating them."""
        if self.square is not None:
            return int(self.square.sum())
        width = self.run_stop - self.run_start
        owner = np.repeat(np.arange(self.tiles), np.diff(self.run_pointer))
        height = (self.query_stop - self.query_start)[owner]
        total = int((width * height)[self.run_whole].sum())
        return total + sum(int(mask.sum()) for mask in self._evaluate_ragged_masks(owner, height, width))

    def _evaluate_ragged_masks(self, owner: Array, height: Array, width: Array) -> Iterator[Tensor]:
        ragged = np.flatnonzero(~self.run_whole)
        shapes, which = np.unique(np.stack([height[ragged], width[ragged]]), axis=1, return_inverse=True)
        for number, (tall, wide) in enumerate(shapes.T):
            runs = ragged[which.reshape(-1) == number]
            at_once = max(1, PAIRS_AT_ONCE // int(tall * wide))
            for begin in range(0, runs.size, at_once):
                some = runs[begin : begin + at_once]
                query = self.query_index[self.query_start[owner[some]][:, None] + np.arange(tall)]
                key = self.key_index[self.run_start[some][:, None] + np.arange(wide)]
                yield self.mask(query, key, self.row[owner[some]])
