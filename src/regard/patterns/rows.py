"""Patterns that differ from one batch row to the next: packed segments and padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.caching import lru_cache_small, outside_cache_if_fake
from regard.errors import PatternError
from regard.patterns.arguments import check_integer
from regard.patterns.base import Pattern
from regard.patterns.box import Array, Lengths, TokenBox, coverage


@dataclass(frozen=True, repr=False)
class Padding(Pattern):
    """Hides padding: queries see only the real keys of their batch row.

    `side="right"`: key `j` of batch row `b` is real when `j < lengths[b]`; `side="left"`: when `j >= keys -
    lengths[b]`. Padded queries still get an output, which depends on real keys only.
    """

    counts: tuple[int, ...] = field(repr=False)
    side: str = "right"

    def __init__(self, lengths: Sequence[int] | Tensor, side: str = "right") -> None:
        if isinstance(lengths, Tensor) and lengths.dtype == torch.bool:
            raise PatternError(
                "Padding needs lengths, not a mask.",
                asked=f"Padding(a boolean tensor of shape {tuple(lengths.shape)})",
                because="a batch row is described by its number of real tokens",
                instead="Padding(mask.sum(-1)) if padding is on the right, with side='left' if on the left;\n"
                "attend(..., mask=mask[:, None, None]) for any other mask of keys",
            )
        listed = lengths.reshape(-1).tolist() if isinstance(lengths, Tensor) else lengths
        listed = list(listed) if isinstance(listed, Iterable) else [listed]
        numbers = tuple(check_integer("Padding", "lengths", length) for length in listed)
        if not numbers or min(numbers) < 0 or side not in ("left", "right"):
            raise PatternError(
                "Padding needs one length for each batch row and a side.",
                asked=f"Padding({list(numbers)}, side={side!r})",
                because="a length is zero or more, at least one row is needed, and the side is 'left' or 'right'",
                instead='Padding([5, 3, 7]) or Padding([5, 3, 7], side="left")',
            )
        object.__setattr__(self, "counts", numbers)
        object.__setattr__(self, "side", side)

    def __repr__(self) -> str:
        side = "" if self.side == "right" else f", side={self.side!r}"
        return f"Padding({list(self.counts)}{side})"

    @property
    def rows(self) -> int:
        return len(self.counts)

    @property
    def _needs_key_length(self) -> bool:
        return self.side == "left"

    def _check_lengths(self, lengths: Lengths) -> None:
        if max(self.counts) > lengths.keys:
            raise PatternError(
                "A padded row is longer than the sequence.",
                asked=repr(self),
                found=f"{lengths.keys} keys",
                because=f"a row of {max(self.counts)} real tokens cannot lie in {lengths.keys} keys",
                instead="lengths of at most the number of keys; tensors are (*batch, head, token, dim)",
            )

    def _find_real_keys(self, keys: int) -> tuple[Array, Array]:
        """The first real key of each row, and the first one after it that is not."""
        count = np.asarray(self.counts, dtype=np.int64)
        return (np.zeros_like(count), count) if self.side == "right" else (keys - count, np.full_like(count, keys))

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        # Dynamo warns about caches.
        find_bounds = _find_bounds if torch.compiler.is_compiling() else outside_cache_if_fake(_find_bounds_cached)
        start, stop = find_bounds(self, lengths.keys, j.device)
        # Adding `0 * i` broadcasts to the queries, on which the result does not depend.
        return (j + 0 * i >= start[row]) & (j < stop[row])

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        start, stop = self._find_real_keys(lengths.keys)
        some = (key.last >= start[row]) & (key.first < stop[row])
        return coverage(some, (key.first >= start[row]) & (key.last < stop[row]))

    def _find_key_intervals(self, lengths: Lengths) -> tuple[Array, Array]:
        start, stop = self._find_real_keys(lengths.keys)
        return start[:, None], stop[:, None]

    @property
    def _is_prefix_stable(self) -> bool:
        return True

    @property
    def _supports_left_padding(self) -> bool:
        return True

    @property
    def is_key_padding(self) -> bool:
        return True

    def _count_pairs(self, lengths: Lengths) -> int:
        return lengths.queries * sum(self.counts)

    def _pair_count_formulas(self, queries: Any, keys: Any, lengths: tuple[int, int] | None = None) -> Iterator[Any]:
        from regard.patterns.pair_counts import Form

        yield Form(queries * sum(self.counts))


def _find_bounds(padding: Padding, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first real key of each row, and the first one after it that is not, as tensors."""
    count = torch.tensor(padding.counts, device=device)
    return (0 * count, count) if padding.side == "right" else (keys - count, 0 * count + keys)


@lru_cache_small(maxsize=16)
def _find_bounds_cached(padding: Padding, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # a cached tensor outlives the caller's mode
        return _find_bounds(padding, keys, device)


class Segments(Pattern):
    """Tokens see tokens of their own segment: `ids[b, i] == ids[b, j]`.

    Documents packed into one row do not attend to each other. `ids` is `(batch, keys)`, or `(keys,)` for one
    row; with fewer queries than keys a query reads its id at its absolute position. A negative id belongs to no
    segment.
    """

    def __init__(self, ids: Tensor | Array | Sequence) -> None:
        try:
            table = np.array(ids.tolist() if isinstance(ids, Tensor) else ids)
        except ValueError:  # rows of unequal length
            table = np.zeros(())
        if table.ndim == 1:
            table = table[None]
        if table.ndim != 2 or table.dtype.kind not in "iu" or not len(table):
            raise PatternError(
                "Segments needs an integer for each token.",
                asked=f"ids of shape {table.shape} and type {table.dtype}",
                because="ids[batch, token] names the segment of a token",
                instead="Segments([[0, 0, 1, 1, 1]]) for a batch of one row with two segments",
            )
        self.ids = np.ascontiguousarray(table.astype(np.int64))
        self.ids.setflags(write=False)
        self._hash = hash((self.ids.shape, self.ids.tobytes()))

    def __repr__(self) -> str:
        return f"Segments({self.ids.tolist()})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segments) and np.array_equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return self._hash

    @property
    def rows(self) -> int:
        return len(self.ids)

    @property
    def fixed_length(self) -> int:
        return self.ids.shape[1]

    @property
    def _supports_left_padding(self) -> bool:
        return True

    def _check_lengths(self, lengths: Lengths) -> None:
        if self.ids.shape[1] != lengths.keys:
            raise PatternError(
                "Segments does not fit the sequence.",
                asked=f"ids for {self.ids.shape[1]} tokens",
                found=f"{lengths.queries} queries and {lengths.keys} keys",
                because="every key needs exactly one segment id",
                instead=f"ids of shape ({len(self.ids)}, {lengths.keys})",
            )

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        ids = outside_cache_if_fake(_segment_ids_on)(self, j.device)
        top = max(ids.shape[1] - 1, 0)
        if not ids.shape[1]:
            return (i == j) & (i != j)
        mine = torch.where(i >= 0, ids[row, i.clamp(0, top)], -1)
        return (mine == ids[row, j.clamp(0, top)]) & (mine >= 0)

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        if not lengths.keys:
            return coverage(np.zeros_like(query.first, dtype=bool), np.zeros_like(query.first, dtype=bool))
        extremes = _make_id_extremes(self)
        query_low, query_high = extremes.over(row, np.maximum(query.first, 0), np.maximum(query.last, 0))
        key_low, key_high = extremes.over(row, key.first, key.last)
        real = (query_high >= 0) & (key_high >= 0) & (query.last >= 0)
        some = real & (query_low <= key_high) & (key_low <= query_high)
        one = (query_low == query_high) & (key_low == key_high) & (query_low == key_low)
        return coverage(some, one & (query_low >= 0) & (query.first >= 0))

    def _count_pairs(self, lengths: Lengths) -> int:
        total = 0
        for ids in self.ids:
            kinds, counts = np.unique(ids, return_counts=True)
            held = ids[max(lengths.offset, 0) :]
            mine = counts[np.searchsorted(kinds, held)] * (held >= 0) if len(kinds) else held
            total += int(mine.sum())
        return total


class _IdExtremes:
    """Smallest and largest id of any range, from tables of ranges of 1, 2, 4, ... tokens."""

    def __init__(self, ids: Array) -> None:
        self.low, self.high = [ids], [ids]
        width = 1
        while 2 * width <= ids.shape[1]:
            self.low.append(np.minimum(self.low[-1][:, :-width], self.low[-1][:, width:]))
            self.high.append(np.maximum(self.high[-1][:, :-width], self.high[-1][:, width:]))
            width *= 2

    def over(self, row: Array, first: Array, last: Array) -> tuple[Array, Array]:
        level = np.log2(last - first + 1).astype(np.int64)
        low, high = np.empty_like(first), np.empty_like(first)
        for depth in np.unique(level):
            here = level == depth
            rows, left, right = row[here], first[here], last[here] - (1 << int(depth)) + 1
            low[here] = np.minimum(self.low[depth][rows, left], self.low[depth][rows, right])
            high[here] = np.maximum(self.high[depth][rows, left], self.high[depth][rows, right])
        return low, high


@lru_cache_small(maxsize=2)
def _make_id_extremes(segments: Segments) -> _IdExtremes:
    return _IdExtremes(segments.ids)


@lru_cache_small(maxsize=2)
def _segment_ids_on(segments: Segments, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.from_numpy(segments.ids.copy()).to(device)
