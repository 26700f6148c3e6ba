"""Some rows and columns of a pattern: what a process that holds a part of the tokens computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.caching import lru_cache_small
from regard.errors import PatternError
from regard.patterns.base import Pattern
from regard.patterns.box import ALL, NONE, Array, Lengths, TokenBox
from regard.patterns.sequence import Full
from regard.patterns.token_order import NATURAL_ORDER, TokenOrder

Runs = tuple[tuple[int, int], ...]  # [start, stop) of token numbers, in rising order


class SequencePart(NamedTuple):
    """Some queries of a longer sequence: the lengths of the whole, and which of its queries they are."""

    whole: Lengths
    queries: Runs


def count_tokens(runs: Runs) -> int:
    """How many tokens the runs hold."""
    return sum(stop - start for start, stop in runs)


@lru_cache_small(maxsize=64)
def list_tokens(runs: Runs) -> Array:
    """The token numbers of the runs, in order."""
    return np.concatenate([np.arange(*run) for run in runs]) if runs else np.zeros(0, dtype=np.int64)


def to_runs(marks: Array) -> Runs:
    """The runs of marked tokens."""
    edges = np.flatnonzero(np.diff(marks.astype(np.int8), prepend=0, append=0))
    return tuple((int(start), int(stop)) for start, stop in edges.reshape(-1, 2))


@dataclass(frozen=True, repr=False)
class Submatrix(Pattern):
    """The pairs of a pattern between some of its queries and some of its keys, both numbered anew.

    Attributes:
        pattern: the whole.
        whole: its lengths.
        queries, keys: runs of query and key numbers.
    """

    pattern: Pattern
    whole: Lengths
    queries: Runs
    keys: Runs

    def __repr__(self) -> str:
        return f"{self.pattern!r} of queries {_describe(self.queries)} and keys {_describe(self.keys)}"

    @property
    def rows(self) -> int | None:
        return self.pattern.rows

    @property
    def heads(self) -> int | None:
        return self.pattern.heads

    @property
    def counts(self) -> Lengths:
        """How many queries and keys there are."""
        return Lengths(count_tokens(self.queries), count_tokens(self.keys))

    def _check_lengths(self, lengths: Lengths) -> None:
        if lengths != self.counts:
            raise PatternError(
                "A part of a pattern does not fit the tensors.",
                asked=f"{self.counts.queries} queries and {self.counts.keys} keys of {self.pattern!r}",
                found=f"{lengths.queries} queries and {lengths.keys} keys",
                because="every token of the part has its own number in the whole",
                instead="tensors with the tokens of the part",
            )

    def _find_queries(self, position: Array) -> Array:
        """The positions in the whole of queries at these positions of the part."""
        counts, numbers = self.counts, list_tokens(self.queries)
        return numbers[np.clip(position - counts.offset, 0, len(numbers) - 1)] + self.whole.offset

    def _find_keys(self, position: Array) -> Array:
        numbers = list_tokens(self.keys)
        return numbers[np.clip(position, 0, len(numbers) - 1)]

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        queries = torch.from_numpy(list_tokens(self.queries)).to(i.device) + self.whole.offset
        keys = torch.from_numpy(list_tokens(self.keys)).to(j.device)
        return self.pattern._allows(queries[i - self.counts.offset], keys[j], row, self.whole)

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        return self.pattern._box_coverage(
            self._widen(query, self._find_queries, self.queries), self._widen(key, self._find_keys, self.keys), row,
            self.whole,
        )  # fmt: skip

    def _widen(self, box: TokenBox, find: Callable[[Array], Array], runs: Runs) -> TokenBox:
        """A box of the whole. One that spans several runs contains more tokens than there are: its coverage is
        conservative, never wrong."""
        sharper = (None, None) if self._shift is None else (box.grid, box.range)
        return TokenBox(find(box.first), find(box.last), box.step if len(runs) == 1 else 1, *sharper)

    @property
    def _is_opaque(self) -> bool:
        return self.pattern._is_opaque

    @property
    def _needs_key_length(self) -> bool:
        return False  # that of the whole is known

    @property
    def _shift(self) -> int | None:
        """How far the positions of the part lie from those of the whole, if queries and keys are the same run."""
        same = self.queries == self.keys and len(self.queries) == 1 and self.whole.offset == 0
        return self.queries[0][0] if same else None

    def _find_dense_order(self) -> TokenOrder:
        order = self.pattern._find_dense_order()
        return NATURAL_ORDER if self._shift is None or order == NATURAL_ORDER else _ShiftedOrder(order, self._shift)

    def _is_global(self, position: Array) -> Array:
        return self.pattern._is_global(self._find_queries(position))

    @property
    def is_key_padding(self) -> bool:
        return self.pattern.is_key_padding


@dataclass(frozen=True)
class _ShiftedOrder(TokenOrder):
    """The order of a whole sequence, for a run of its tokens that begins at `start`."""

    order: TokenOrder
    start: int

    @property
    def name(self) -> str:
        return self.order.name

    @property
    def closed(self) -> bool:
        return self.order.closed

    @property
    def preference(self) -> tuple[int, int]:
        return self.order.preference

    @property
    def step(self) -> int:
        return self.order.step

    def find_classes(self, position: Array) -> Array:
        return self.order.find_classes(position + self.start)

    def fit_to_tile(self, block: int) -> TokenOrder:
        return _ShiftedOrder(self.order.fit_to_tile(block), self.start)

    def make_boxes(self, position: Array, first: Array, last: Array) -> TokenBox:
        box = self.order.make_boxes(position + self.start, first, last)
        return TokenBox(box.first - self.start, box.last - self.start, box.step, box.grid, box.range)


def restrict(pattern: Pattern, whole: Lengths, queries: Runs, keys: Runs) -> Pattern:
    """The part of a pattern between these tokens: `Full()` where it is known to allow all of them."""
    if queries == ((0, whole.queries),) and keys == ((0, whole.keys),):
        return pattern
    covered = _cover_boxes(pattern, whole, _find_ends(queries, whole.offset), _find_ends(keys))
    return Full() if covered.size and (covered == ALL).all() else Submatrix(pattern, whole, queries, keys)


def _find_ends(runs: Runs, offset: int = 0) -> tuple[Array, Array]:
    """The positions of the first and the last token of each run."""
    start, stop = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    return start + offset, stop + offset - 1


def _cover_boxes(pattern: Pattern, whole: Lengths, query: tuple[Array, Array], key: tuple[Array, Array]) -> Array:
    """`(row, query box, key box)`."""
    pattern = pattern._with_folded_heads
    shape = (pattern.rows or 1, len(query[0]), len(key[0]))
    row, i, j = (axis.reshape(-1) for axis in np.indices(shape))
    queries, keys = TokenBox(query[0][i], query[1][i]), TokenBox(key[0][j], key[1][j])
    return pattern._box_coverage(queries, keys, row, whole).reshape(shape)


def find_needed_keys(pattern: Pattern, whole: Lengths, queries: Runs, keys: Runs) -> Runs:
    """Those of the keys that some of the queries may see: exact for most patterns, all where nothing is known."""
    numbers = list_tokens(keys)
    return _select(pattern, whole, _find_ends(queries, whole.offset), (numbers, numbers), numbers, axis=1)


def find_needed_queries(pattern: Pattern, whole: Lengths, queries: Runs, keys: Runs) -> Runs:
    """Those of the queries that may see some of the keys."""
    numbers = list_tokens(queries)
    absolute = numbers + whole.offset
    return _select(pattern, whole, (absolute, absolute), _find_ends(keys), numbers, axis=2)


def _select(
    pattern: Pattern, whole: Lengths, query: tuple[Array, Array], key: tuple[Array, Array], numbers: Array, axis: int
) -> Runs:
    if not len(query[0]) or not len(key[0]):
        return ()
    needed = (_cover_boxes(pattern, whole, query, key) != NONE).any(axis=(0, axis))
    marks = np.zeros(int(numbers[-1]) + 1, dtype=bool)
    marks[numbers[needed]] = True
    return to_runs(marks)


def _describe(runs: Runs) -> str:
    return ", ".join(f"{start}:{stop}" for start, stop in runs) or "none"
