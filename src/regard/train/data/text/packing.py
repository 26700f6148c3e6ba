"""Packing: whole documents or sentences share a row, so that nothing is computed for padding.

Tokens of one row see their own document only (`Segments`), and positions restart with it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy
import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.patterns import Segments
from regard.train.data.text.store import TokenStore
from regard.train.task import ORDER, seed_of

# Rows that are filled at the same time: the next document goes to the fullest one that has room for it.
OPEN_ROWS = 64
# The segment id of padding, which neither sees nor is seen (`Segments`).
PADDING_SEGMENT = -1


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Rows of several documents each.

    Attributes:
        tokens: `(row, token)`; after the last document of a row the padding token.
        segment_ids: which document of its row a token belongs to, counted from 0; -1 for padding, `(row, token)`.
        positions: of each token in its document, `(row, token)`; 0 for padding.
        units: for each row, the units of the token store in it, `segment_ids` being an index.
    """

    tokens: Tensor
    segment_ids: Tensor
    positions: Tensor
    units: list[list[int]]

    @cached_property
    def pattern(self) -> Segments:
        """Tokens see their own document."""
        return Segments(self.segment_ids)

    def next_tokens(self, ignore_index: int = -100) -> Tensor:
        """The targets of a language model, `(row, token)`: the next token of the same document, else `ignore_index`."""
        targets = torch.full_like(self.tokens, ignore_index)
        same = (self.segment_ids[:, 1:] == self.segment_ids[:, :-1]) & (self.segment_ids[:, 1:] >= 0)
        targets[:, :-1] = torch.where(same, self.tokens[:, 1:], ignore_index)
        return targets

    @property
    def token_count(self) -> int:
        """Tokens that are not padding."""
        return int((self.segment_ids >= 0).sum())


class PackedDocuments:
    """The units of a token store in rows of at most `row_length` tokens, in a new order every epoch.

    Each epoch has every unit once. A unit longer than `max_length` is divided into parts of that length, which do not
    see each other. The batch of a step follows from the seed and the step alone.

    store: a `TokenStore`.
    row_length: most tokens of a row.
    rows: rows of a batch.
    max_length: most tokens of a segment, the context length of the model; `row_length` if `None`.
    pad: the padding token.
    """

    def __init__(
        self,
        store: TokenStore,
        row_length: int,
        *,
        rows: int = 1,
        max_length: int | None = None,
        seed: int = 0,
        pad: int = 0,
    ) -> None:
        longest = row_length if max_length is None else max_length
        if min(row_length, rows, longest) < 1 or longest > row_length:
            raise ConfigError(
                "Documents cannot be packed so.",
                asked=f"row_length={row_length}, rows={rows}, max_length={max_length}",
                because="a row has room for at least one segment of the greatest length",
                instead="row_length=2048, rows=1, max_length=512, or the like",
            )
        self.store, self.row_length, self.rows, self.seed, self.pad = store, row_length, rows, seed, pad
        lengths = store.lengths
        parts = -(-lengths // longest)
        # Unit, first token and number of tokens of every part.
        self._unit = numpy.repeat(numpy.arange(len(store)), parts)
        inside = (numpy.arange(len(self._unit)) - numpy.repeat(numpy.cumsum(parts) - parts, parts)) * longest
        self._first = store.starts[:-1][self._unit] + inside
        self._length = numpy.minimum(lengths[self._unit] - inside, longest)
        self._packed: dict[int, list[list[int]]] = {}
        self._batches: list[int] = []  # of the epochs that were counted so far

    @property
    def batches_per_epoch(self) -> int:
        """Batches of the first epoch; another order may fill slightly more or fewer rows in later ones."""
        return self.count_batches(0)

    def count_batches(self, epoch: int) -> int:
        """Batches of an epoch."""
        while len(self._batches) <= epoch:
            self._batches.append(-(-len(self._pack_epoch(len(self._batches))) // self.rows))
        return self._batches[epoch]

    def locate(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and its number within it."""
        epoch = 0
        while step >= self.count_batches(epoch):
            step -= self.count_batches(epoch)
            epoch += 1
        return epoch, step

    def make_batch(self, step: int) -> PackedBatch:
        """The batch of a step."""
        epoch, inside = self.locate(step)
        return self._join(self._pack_epoch(epoch)[inside * self.rows : (inside + 1) * self.rows])

    def evaluation_batches(self) -> Iterator[PackedBatch]:
        """Every unit once, in the order of the store."""
        packed = self._pack(numpy.arange(len(self._unit)))
        for first in range(0, len(packed), self.rows):
            yield self._join(packed[first : first + self.rows])

    def _pack_epoch(self, epoch: int) -> list[list[int]]:
        """The parts in each row of an epoch."""
        if epoch not in self._packed:
            generator = torch.Generator().manual_seed(seed_of(self.seed, ORDER, epoch))
            order = torch.randperm(len(self._unit), generator=generator).numpy()
            self._packed = {epoch: self._pack(order)}  # one epoch at a time is kept
        return self._packed[epoch]

    def _pack(self, order: numpy.ndarray) -> list[list[int]]:
        """Rows of parts, taken in this order: best fit among at most `OPEN_ROWS` rows that are not full."""
        rows: list[list[int]] = []
        spaces: list[tuple[int, int]] = []  # room and number of the open rows, sorted
        for part, length in zip(order.tolist(), self._length[order].tolist(), strict=True):
            place = bisect.bisect_left(spaces, (length, -1))
            if place == len(spaces):
                if len(spaces) == OPEN_ROWS:
                    spaces.pop(0)  # the fullest
                rows.append([part])
                room, number = self.row_length - length, len(rows) - 1
            else:
                room, number = spaces.pop(place)
                rows[number].append(part)
                room -= length
            if room:
                bisect.insort(spaces, (room, number))
        return rows

    def _join(self, rows: list[list[int]]) -> PackedBatch:
        lengths = [self._length[row] for row in rows]
        width = max(int(each.sum()) for each in lengths)
        tokens = numpy.full((len(rows), width), self.pad, dtype=numpy.int64)
        segments = numpy.full((len(rows), width), PADDING_SEGMENT, dtype=numpy.int64)
        positions = numpy.zeros((len(rows), width), dtype=numpy.int64)
        for number, (row, counts) in enumerate(zip(rows, lengths, strict=True)):
            starts = numpy.cumsum(counts) - counts
            filled = int(counts.sum())
            segments[number, :filled] = numpy.repeat(numpy.arange(len(row)), counts)
            positions[number, :filled] = numpy.arange(filled) - numpy.repeat(starts, counts)
            tokens[number, :filled] = self.store.tokens[
                numpy.repeat(self._first[row], counts) + positions[number, :filled]
            ]
        units = [self._unit[row].tolist() for row in rows]
        made = [torch.from_numpy(each) for each in (tokens, segments, positions)]
        return PackedBatch(made[0], made[1], made[2], units)
