"""Patterns over a sequence: full, causal, windows, strides, global tokens, blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.caching import lru_cache_small
from regard.errors import PatternError
from regard.patterns.arguments import LONGEST, LONGEST_AXIS, check_at_most, check_integer, set_integer
from regard.patterns.base import Pattern
from regard.patterns.box import (
    ALL,
    Array,
    Grid,
    Lengths,
    TokenBox,
    class_coverage,
    coverage,
    interval_coverage,
    residue_coverage,
)
from regard.patterns.token_order import NATURAL_ORDER, BlockOrder, ResidueOrder, TokenOrder


@dataclass(frozen=True, repr=False)
class Full(Pattern):
    """Every query sees every key.

    Prince, *Understanding Deep Learning*, figure 12.15a. `N^2` pairs.
    """

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=i.device).expand(torch.broadcast_shapes(i.shape, j.shape))

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        return np.full(query.first.shape, ALL)

    def _find_key_intervals(self, lengths: Lengths) -> tuple[Array, Array]:
        keys = np.asarray(lengths.keys)
        return 0 * keys, keys

    @property
    def is_full(self) -> bool:
        return True

    @property
    def _running_sum_reads(self) -> int:
        return 0

    def _count_pairs(self, lengths: Lengths) -> int:
        return lengths.queries * lengths.keys

    def _pair_count_formulas(self, queries: Any, keys: Any, lengths: tuple[int, int] | None = None) -> Iterator[Any]:
        from regard.patterns.pair_counts import Form

        yield Form(queries * keys)


@dataclass(frozen=True, repr=False)
class Causal(Pattern):
    """A query sees itself and what came before: `j <= i`.

    Prince, figure 12.15b. `N(N+1)/2` pairs on equal lengths. With fewer queries than keys the last query sits on the
    last key, which is what a cache needs; torch's `is_causal` aligns the first query with the first key instead.
    """

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        return j <= i

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        return coverage(key.first <= query.last, key.last <= query.first)

    def _find_key_intervals(self, lengths: Lengths) -> tuple[Array, Array]:
        return np.zeros((), dtype=np.int64), _query_positions(lengths) + 1

    @property
    def is_causal(self) -> bool:
        return True

    def is_shift_invariant(self, grid: Grid | None = None) -> bool:
        return grid is None

    @property
    def _running_sum_reads(self) -> int:
        return 0

    def _count_pairs(self, lengths: Lengths) -> int:
        return _triangular_number(lengths.keys) - _triangular_number(lengths.offset)

    def _pair_count_formulas(self, queries: Any, keys: Any, lengths: tuple[int, int] | None = None) -> Iterator[Any]:
        from regard.patterns import pair_counts

        return pair_counts.causal(queries, keys)

    def _intersect(self, other: Pattern) -> Pattern | None:
        return Window(other.left, 0, other.step) if isinstance(other, Window) else super()._intersect(other)


def _query_positions(lengths: Lengths) -> Array:
    """The absolute positions of the queries."""
    return np.arange(lengths.offset, lengths.keys)


def _triangular_number(count: int) -> int:
    return count * (count + 1) // 2 if count > 0 else 0


@dataclass(frozen=True, repr=False)
class Window(Pattern):
    """A query sees itself, `left` keys before it and `right` keys after it, every `step`-th token.

    `j = i - step*a` for `0 <= a <= left`, or `j = i + step*b` for `1 <= b <= right`. The query's own position is not
    counted: `Window(1, 0)` sees two keys. `step > 1` is the dilated window of Longformer (Beltagy et al. 2020).

    Prince, figure 12.15c-f: panel c with radius r is `Window(r, r)`; panel d of width w is `Window(w - 1, 0)`; panels
    e, f are `Window(w - 1, 0, step=2)` and `step=3`.
    """

    left: int
    right: int
    step: int = 1

    def __post_init__(self) -> None:
        set_integer(self, "left", self.left, 0)
        set_integer(self, "right", self.right, 0)
        set_integer(self, "step", self.step, 1)
        check_at_most("Window", "step * max(left, right)", self.step * max(self.left, self.right), LONGEST)

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        near = (j >= i - self.left * self.step) & (j <= i + self.right * self.step)
        return near if self.step == 1 else near & ((i - j) % self.step == 0)

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        before, after = self.left * self.step, self.right * self.step
        near = interval_coverage(
            query.first - before, query.last - before, query.first + after, query.last + after, key
        )
        if self.step == 1:
            return near
        return np.minimum(near, Strided(self.step)._box_coverage(query, key, row, lengths))

    def _count_pairs(self, lengths: Lengths) -> int:
        # Sum over the window's offsets of the number of queries that have a key there.
        queries, keys, step = *lengths, self.step
        left, right = min(self.left, max(keys - 1, 0) // step), min(self.right, max(queries - 1, 0) // step)
        shift = np.arange(-left, right + 1) * step
        last = np.minimum(keys - 1, keys - 1 - shift)
        return int(np.maximum(0, last - np.maximum(lengths.offset, -shift) + 1).sum())

    def _find_dense_order(self) -> TokenOrder:
        return NATURAL_ORDER if self.step == 1 else ResidueOrder(self.step)

    def _find_key_intervals(self, lengths: Lengths) -> tuple[Array, Array] | None:
        position = _query_positions(lengths)
        return None if self.step > 1 else (position - self.left, position + self.right + 1)

    @property
    def _is_scattered(self) -> bool:
        return self.step > 1

    @property
    def sliding_window(self) -> int | None:
        return self.left if self.right == 0 and self.step == 1 else None

    @property
    def _hides_future(self) -> bool:
        return self.right == 0

    @property
    def reach(self) -> int:
        return self.left * self.step

    def is_shift_invariant(self, grid: Grid | None = None) -> bool:
        return grid is None

    @property
    def max_keys_per_query(self) -> int:
        return self.left + self.right + 1

    @property
    def _running_sum_reads(self) -> int | None:
        return 2 if self.step == 1 else None

    def _pair_count_formulas(self, queries: Any, keys: Any, lengths: tuple[int, int] | None = None) -> Iterator[Any]:
        from regard.patterns import pair_counts

        return pair_counts.window(self.left, self.right, self.step, queries, keys)

    def _intersect(self, other: Pattern) -> Pattern | None:
        if isinstance(other, Window) and self.step == other.step:
            return Window(min(self.left, other.left), min(self.right, other.right), self.step)
        return super()._intersect(other)


@dataclass(frozen=True, repr=False)
class Strided(Pattern):
    """A query sees the keys a whole number of steps away: `(i - j) % step == 0`.

    With `Causal()` and a window it is the strided pattern of Child et al. 2019, *Generating Long Sequences with Sparse
    Transformers*.
    """

    step: int

    def __post_init__(self) -> None:
        set_integer(self, "step", self.step, 1)

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        return (i - j) % self.step == 0

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        single = (query.first == query.last) & (key.first == key.last)
        return residue_coverage(query.first, query.step, key.first, key.step, self.step, single)

    def _count_pairs(self, lengths: Lengths) -> int:
        classes, held = np.unique(np.arange(lengths.keys) % self.step, return_counts=True)
        query = np.arange(lengths.offset, lengths.keys) % self.step
        place = np.searchsorted(classes, query)
        here = np.append(classes, -1)[place] == query
        return int((np.append(held, 0)[place] * here).sum())

    def _find_dense_order(self) -> TokenOrder:
        return NATURAL_ORDER if self.step == 1 else ResidueOrder(self.step)

    @property
    def _is_scattered(self) -> bool:
        return True

    def is_shift_invariant(self, grid: Grid | None = None) -> bool:
        return grid is None

    @property
    def _running_sum_reads(self) -> int:
        return 0

    def _pair_count_formulas(self, queries: Any, keys: Any, lengths: tuple[int, int] | None = None) -> Iterator[Any]:
        from regard.patterns import pair_counts

        return pair_counts.strided(self.step, queries, keys, lengths)


@dataclass(frozen=True, repr=False)
class First(Pattern):
    """The first `count` tokens are global: they see everything and everything sees them: `i < count or j < count`.

    Prince, figure 12.15h; ETC (Ainslie et al. 2020). As an encoder's class tokens: in a decoder write `Causal() &
    First(n)`, or the global tokens leak the future.
    """

    count: int

    def __post_init__(self) -> None:
        set_integer(self, "count", self.count, 0)

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        return (i < self.count) | (j < self.count)

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        some = (query.first < self.count) | (key.first < self.count)
        return coverage(some, (query.last < self.count) | (key.last < self.count))

    def _is_global(self, position: Array) -> Array:
        return position < self.count

    def _count_pairs(self, lengths: Lengths) -> int:
        others = max(0, lengths.queries - max(0, min(self.count - lengths.offset, lengths.queries)))
        return lengths.queries * lengths.keys - others * max(0, lengths.keys - self.count)

    def _find_key_intervals(self, lengths: Lengths) -> tuple[Array, Array]:
        return np.zeros((), dtype=np.int64), np.where(_query_positions(lengths) < self.count, lengths.keys, self.count)

    def _pair_count_formulas(self, queries: Any, keys: Any, lengths: tuple[int, int] | None = None) -> Iterator[Any]:
        from regard.patterns import pair_counts

        return pair_counts.first(self.count, queries, keys)


@dataclass(frozen=True, repr=False)
class Selected(Pattern):
    """Chosen tokens are global: `i in indices or j in indices`.

    Prince, figure 12.15g (`Causal() & Selected(...)` for the decoder pictured there), for example the tokens that
    start a sentence; Longformer's global attention.
    """

    indices: tuple[int, ...]

    def __init__(self, indices: Iterable[int]) -> None:
        listed = list(indices) if isinstance(indices, Iterable) else [indices]
        chosen = tuple(sorted({check_integer("Selected", "indices", index) for index in listed}))
        if chosen and chosen[0] < 0:
            raise PatternError(
                "Selected names tokens that do not exist.",
                asked=f"Selected({list(chosen)})",
                because="positions count from 0; a negative one is not counted from the end",
                instead="the positions themselves",
            )
        if chosen:
            check_at_most(
                "Selected", "max(indices)", chosen[-1], LONGEST_AXIS
            )  # a table has an entry for each up to it
        object.__setattr__(self, "indices", chosen)

    def __repr__(self) -> str:
        return f"Selected({list(self.indices)})"

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        chosen = _make_membership_table(self.indices, i.device)
        top = len(chosen) - 1
        return chosen[(i + 1).clamp(0, top)] | chosen[(j + 1).clamp(0, top)]

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        indices = np.asarray(self.indices, dtype=np.int64)

        def count(box: TokenBox) -> Array:
            return np.searchsorted(indices, box.last, "right") - np.searchsorted(indices, box.first, "left")

        in_query, in_key = count(query), count(key)
        some = (in_query > 0) | (in_key > 0)
        every = (in_query == query.last - query.first + 1) | (in_key == key.last - key.first + 1)
        return coverage(some, every)

    def _is_global(self, position: Array) -> Array:
        return np.isin(position, self.indices)

    def _count_pairs(self, lengths: Lengths) -> int:
        among_queries = sum(lengths.offset <= index < lengths.keys for index in self.indices)
        among_keys = sum(0 <= index < lengths.keys for index in self.indices)
        others = (lengths.queries - among_queries) * (lengths.keys - among_keys)
        return lengths.queries * lengths.keys - others

    @property
    def _is_scattered(self) -> bool:
        return True

    def _pair_count_formulas(self, queries: Any, keys: Any, lengths: tuple[int, int] | None = None) -> Iterator[Any]:
        from regard.patterns import pair_counts

        return pair_counts.selected(self.indices, queries, keys, lengths)


@lru_cache_small(maxsize=8)
def _make_membership_table(indices: tuple[int, ...], device: torch.device) -> Tensor:
    """A lookup table whose entry `p + 1` says whether position `p` was chosen; both ends are `False`."""
    table = np.zeros((indices[-1] if indices else 0) + 3, dtype=bool)
    table[np.asarray(indices, dtype=np.int64) + 1] = True
    with torch.inference_mode(False):
        return torch.from_numpy(table).to(device)


@dataclass(frozen=True, repr=False)
class Blocks(Pattern):
    """A query sees the keys of its own block: `i // size == j // size`.

    The block-diagonal pattern: local blocks of Prince, section 12.9; with `Window` it is the fixed pattern of Child
    et al.
    """

    size: int

    def __post_init__(self) -> None:
        set_integer(self, "size", self.size, 1)

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        return i // self.size == j // self.size

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        edges = (query.first, query.last, key.first, key.last)
        return class_coverage(*(edge // self.size for edge in edges))

    def _count_pairs(self, lengths: Lengths) -> int:
        blocks = -(-lengths.keys // self.size)
        keys = np.minimum((np.arange(blocks) + 1) * self.size, lengths.keys) - np.arange(blocks) * self.size
        low = np.maximum(np.arange(blocks) * self.size, max(lengths.offset, 0))
        queries = np.maximum(np.minimum((np.arange(blocks) + 1) * self.size, lengths.keys) - low, 0)
        return int(keys @ queries)

    def _find_dense_order(self) -> TokenOrder:
        return BlockOrder(self.size)

    @property
    def reach(self) -> int:
        return self.size - 1

    @property
    def max_keys_per_query(self) -> int:
        return self.size

    @property
    def _running_sum_reads(self) -> int:
        return 0

    def _pair_count_formulas(self, queries: Any, keys: Any, lengths: tuple[int, int] | None = None) -> Iterator[Any]:
        from regard.patterns import pair_counts

        return pair_counts.blocks(self.size, queries, keys, lengths)
