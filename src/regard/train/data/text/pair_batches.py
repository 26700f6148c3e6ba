"""Batches of sentence pairs of similar length, for translation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from regard.errors import InputError
from regard.train.data.text.store import TokenStore
from regard.train.task import ORDER, seed_of


class PairBatch(NamedTuple):
    """Sentence pairs, padded on the right.

    source, target: `(pair, token)`.
    source_lengths, target_lengths: tokens that are not padding, `(pair,)`.
    indices: which pairs of the stores these are, `(pair,)`.
    """

    source: Tensor
    source_lengths: Tensor
    target: Tensor
    target_lengths: Tensor
    indices: Tensor


class PairBatches:
    """Pairs sorted by length and divided into batches of about `tokens_per_batch` tokens, in a new order every epoch.

    Neither the sources nor the targets of a batch have more than `tokens_per_batch` tokens, padding included, unless a
    single pair does. The batch of a step follows from the seed and the step alone.

    source, target: token stores with one unit for each sentence, in the same order.
    max_length: pairs of which a side is longer are left out (`dropped` counts them); `None` for none.
    pad: the padding token.

    Source: Vaswani et al., Attention Is All You Need (2017), section 5.1.
    """

    def __init__(
        self,
        source: TokenStore,
        target: TokenStore,
        tokens_per_batch: int,
        *,
        max_length: int | None = None,
        seed: int = 0,
        pad: int = 0,
    ) -> None:
        if len(source) != len(target):
            raise InputError(
                "Sources and targets do not form pairs.",
                asked=f"{len(source):,} sources and {len(target):,} targets",
                because="the source of a number is translated by the target of that number",
                instead="two stores of equal length; a sentence without tokens cannot be one of a pair",
            )
        self.source, self.target, self.seed, self.pad = source, target, seed, pad
        sizes = numpy.stack((source.lengths, target.lengths))
        kept = numpy.arange(len(source))
        if max_length is not None:
            kept = kept[sizes.max(0) <= max_length]
        self.dropped = len(source) - len(kept)
        if not len(kept):
            raise InputError(
                "There are no pairs.",
                asked=f"max_length={max_length}",
                found=f"{self.dropped:,} pairs, all of them longer",
                because="a pair is used if both sides have at most max_length tokens",
                instead=f"max_length={int(sizes.max(0).min(initial=1 << 62)) if len(source) else 1} or more",
            )
        order = kept[numpy.lexsort((kept, sizes[0, kept], sizes[1, kept], sizes.max(0)[kept]))]
        self._batches = list(_divide(order, sizes, tokens_per_batch))

    @property
    def batches_per_epoch(self) -> int:
        """Batches of an epoch."""
        return len(self._batches)

    def make_batch(self, step: int) -> PairBatch:
        """The batch of a step."""
        epoch, inside = divmod(step, len(self._batches))
        generator = torch.Generator().manual_seed(seed_of(self.seed, ORDER, epoch))
        return self._join(self._batches[int(torch.randperm(len(self._batches), generator=generator)[inside])])

    def evaluation_batches(self) -> Iterator[PairBatch]:
        """Every pair once, from the shortest to the longest."""
        yield from map(self._join, self._batches)

    def _join(self, indices: numpy.ndarray) -> PairBatch:
        source, source_lengths = pad_units(self.source, indices, self.pad)
        target, target_lengths = pad_units(self.target, indices, self.pad)
        return PairBatch(source, source_lengths, target, target_lengths, torch.from_numpy(indices))


def pad_units(store: TokenStore, units: Sequence[int] | numpy.ndarray, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Units of a store as `(unit, token)`, padded on the right, and their lengths."""
    rows = [store[int(unit)] for unit in units]
    lengths = torch.tensor([len(row) for row in rows])
    made = torch.full((len(rows), int(lengths.max())), pad, dtype=torch.int64)
    for number, row in enumerate(rows):
        made[number, : len(row)] = torch.from_numpy(row.astype(numpy.int64))
    return made, lengths


def _divide(order: numpy.ndarray, sizes: numpy.ndarray, tokens_per_batch: int) -> Iterator[numpy.ndarray]:
    """Consecutive pairs whose padded sides have at most this many tokens."""
    first, widest = 0, 0
    longer = sizes.max(0)[order].tolist()
    for place, length in enumerate(longer):
        if place > first and (place - first + 1) * max(widest, length) > tokens_per_batch:
            yield order[first:place]
            first, widest = place, 0
        widest = max(widest, length)
    yield order[first:]
