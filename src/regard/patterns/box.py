"""Sets of positions that a planner can reason about without listing them.

A planner calls a pattern for many pairs of boxes at once: are *none*, *some* or *all* of the pairs between these
queries and those keys allowed? A box is an arithmetic progression of positions and, for tokens on a grid, the product
of a row range and a column range. This coverage is an integer, so that composed patterns are arithmetic: `&` is the
minimum, `|` the maximum and `~a` is `2 - a` (Kleene's strong three-valued logic). It may be conservative (`SOME` for
what is none or all), never wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

NONE, SOME, ALL = np.int8(0), np.int8(1), np.int8(2)

Array = np.ndarray


class Lengths(NamedTuple):
    """The query length and the key length. The last query is aligned with the last key."""

    queries: int
    keys: int

    @property
    def offset(self) -> int:
        """The absolute position of the first query: negative when there are more queries than keys."""
        return self.keys - self.queries


@dataclass(frozen=True)
class Grid:
    """A grid of `rows` x `columns` tokens in the sequence: row-major order from position `start`."""

    rows: int
    columns: int
    start: int = 0

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns}"

    @property
    def cells(self) -> int:
        return self.rows * self.columns

    def contains(self, position):
        """Whether a position (array or tensor) is a cell of the grid."""
        return (position >= self.start) & (position < self.start + self.cells)

    def row(self, position):
        return (position - self.start) // self.columns

    def column(self, position):
        return (position - self.start) % self.columns


class GridRange(NamedTuple):
    """The rows and columns that a box may touch; `step` is known when the box is one residue class."""

    top: Array
    bottom: Array
    left: Array
    right: Array
    row_step: int = 1
    column_step: int = 1


@dataclass(frozen=True)
class TokenBox:
    """Many sets of positions at once: set `n` is contained in `first[n], first[n] + step, ..., last[n]`.

    When the set was cut out of a grid (a tile, a window, a residue class), `grid` and `range` describe it more sharply
    than its first and last position do.
    """

    first: Array
    last: Array
    step: int = 1
    grid: Grid | None = None
    range: GridRange | None = None

    def take(self, index: Array) -> TokenBox:
        """The sets with these numbers."""
        sharper = None
        if self.range is not None:
            edges = self.range
            sharper = edges._replace(
                top=edges.top[index], bottom=edges.bottom[index], left=edges.left[index], right=edges.right[index]
            )
        return TokenBox(self.first[index], self.last[index], self.step, self.grid, sharper)

    def on(self, grid: Grid) -> tuple[GridRange, Array, Array]:
        """Rows and columns of the sets on `grid`, which sets lie wholly inside it, and which touch it at all."""
        inside = grid.contains(self.first) & grid.contains(self.last)
        touches = (self.last >= grid.start) & (self.first < grid.start + grid.cells)
        if self.range is not None and self.grid == grid:
            return self.range, inside, touches
        first = np.clip(self.first, grid.start, grid.start + grid.cells - 1)
        last = np.clip(self.last, grid.start, grid.start + grid.cells - 1)
        top, bottom = grid.row(first), grid.row(last)
        one_row = top == bottom
        left = np.where(one_row, grid.column(first), 0)
        right = np.where(one_row, grid.column(last), grid.columns - 1)
        return GridRange(top, bottom, left, right), inside, touches


def coverage(some: Array, every: Array) -> Array:
    """NONE, SOME or ALL from two booleans: `some` pair may be allowed, `every` pair is allowed."""
    return np.where(every, ALL, np.where(some, SOME, NONE)).astype(np.int8)


def interval_coverage(low_first: Array, low_last: Array, high_first: Array, high_last: Array, key: TokenBox) -> Array:
    """Coverage when query `i` sees exactly the keys in `[low(i), high(i)]`, both ends growing with `i`.

    `low_first, high_first` belong to the box's first query and `low_last, high_last` to its last.
    """
    some = (key.last >= low_first) & (key.first <= high_last)
    every = (key.first >= low_last) & (key.last <= high_first)
    return coverage(some, every)


def class_coverage(query_low: Array, query_high: Array, key_low: Array, key_high: Array) -> Array:
    """Coverage when a query sees the keys of its own class and the boxes' classes lie in these ranges."""
    some = (query_low <= key_high) & (key_low <= query_high)
    every = (query_low == query_high) & (key_low == key_high) & (query_low == key_low)
    return coverage(some, every)


def residue_coverage(
    query_low: Array, query_step: int, key_low: Array, key_step: int, step: int, known: Array
) -> Array:
    """Coverage when a query sees the keys of its own residue modulo `step`.

    A box whose own step is a multiple of `step` has one residue; so has a box of one position (`known`).
    """
    query_known = known if query_step % step else np.ones_like(known)
    key_known = known if key_step % step else np.ones_like(known)
    same = (query_low - key_low) % step == 0
    return np.where(query_known & key_known, np.where(same, ALL, NONE), SOME).astype(np.int8)
