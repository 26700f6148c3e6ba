"""Patterns over a grid of tokens, in row-major order: windows, strides and axes of an image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import PatternError
from regard.patterns.arguments import LONGEST_AXIS, check_grid_fits, set_integer, set_pair
from regard.patterns.base import Pattern
from regard.patterns.box import Array, Grid, Lengths, TokenBox, class_coverage, coverage, residue_coverage
from regard.patterns.compose import Not
from regard.patterns.token_order import GridResidueOrder, GridTileOrder, TokenOrder


class GridPattern(Pattern):
    """Tokens from `start` on lie on a grid of `rows x columns`; pairs with an earlier token are not allowed.

    Compose with `First(start)` to let class tokens see everything: `First(1) | Neighborhood((14, 14), 3, start=1)`.
    """

    grid: tuple[int, int]
    start: int

    def __post_init__(self) -> None:
        set_pair(self, "grid", self.grid, 1)
        set_integer(self, "start", self.start, 0, LONGEST_AXIS)

    @property
    def token_grid(self) -> Grid:
        return Grid(*self.grid, self.start)

    def _list_grids(self) -> frozenset[Grid]:
        return frozenset((self.token_grid,))

    def _check_lengths(self, lengths: Lengths) -> None:
        check_grid_fits(self, self.token_grid, lengths)

    @property
    def fixed_length(self) -> int:
        return self.start + self.token_grid.cells

    def _covers_grid(self, lengths: Lengths) -> bool:
        """Whether queries and keys are all tokens of the grid and those before it."""
        return lengths.queries == lengths.keys == self.fixed_length

    def _flat_distance(self, up: int, left: int) -> int:
        """The distance in positions to the token that many rows up and columns to the left."""
        return up * self.grid[1] + left

    def _allows_cells(self, row_i: Tensor, row_j: Tensor, column_i: Tensor, column_j: Tensor) -> Tensor:
        """The definition on rows and columns."""
        raise NotImplementedError

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        grid = self.token_grid
        inside = grid.contains(i) & grid.contains(j)
        columns = grid.columns
        row_i = torch.div(i - grid.start, columns, rounding_mode="floor")
        row_j = torch.div(j - grid.start, columns, rounding_mode="floor")
        return inside & self._allows_cells(row_i, row_j, (i - grid.start) % columns, (j - grid.start) % columns)

    def _locate_boxes(self, query: TokenBox, key: TokenBox) -> tuple:
        """Rows and columns of both boxes, which pairs of boxes lie inside the grid, and which touch it."""
        query_range, query_inside, query_touches = query.on(self.token_grid)
        key_range, key_inside, key_touches = key.on(self.token_grid)
        return query_range, key_range, query_inside & key_inside, query_touches & key_touches

    @staticmethod
    def _limit_to_grid(answer: Array, inside: Array, touches: Array) -> Array:
        """Pairs off the grid are not allowed, so boxes that extend beyond its edge are at most *some*."""
        return np.minimum(answer, coverage(touches, inside))


@dataclass(frozen=True, repr=False)
class Neighborhood(GridPattern):
    """A token sees the tokens within `radius` rows and `radius` columns of it, every `step`-th one.

    `edges="clip"`: near the border the neighbourhood loses what lies outside (a convolution's zero padding).
    `edges="shift"`: it moves inwards and stays whole, `(2 radius + 1)^2` keys for every token (Neighborhood
    Attention, Hassani et al. 2023). `radius` may be `(rows, columns)`.

    The number of pairs is the product of the two one-dimensional counts.
    """

    grid: tuple[int, int]
    radius: int | tuple[int, int]
    step: int = 1
    edges: str = "clip"
    start: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        set_pair(self, "radius", self.radius, 0)
        set_integer(self, "step", self.step, 1, LONGEST_AXIS)
        _check_edges(self)

    @property
    def radii(self) -> tuple[int, int]:
        assert isinstance(self.radius, tuple)
        return self.radius

    def _find_neighbor_range(self, at, size: int, radius: int):
        """First and last neighbour of coordinate `at` along an axis of `size`; works on arrays and tensors."""
        step = self.step
        if self.edges == "clip":
            return at - radius * step, at + radius * step
        residue, place = at % step, at // step
        count = (size - residue + step - 1) // step
        clip = torch.clamp if isinstance(at, Tensor) else np.clip
        first = clip(place - radius, 0 * place, count - 2 * radius - 1)
        return residue + first * step, residue + (first + 2 * radius) * step

    def _allows_cells(self, row_i: Tensor, row_j: Tensor, column_i: Tensor, column_j: Tensor) -> Tensor:
        top, bottom = self._find_neighbor_range(row_i, self.grid[0], self.radii[0])
        left, right = self._find_neighbor_range(column_i, self.grid[1], self.radii[1])
        near = (row_j >= top) & (row_j <= bottom) & (column_j >= left) & (column_j <= right)
        if self.step == 1:
            return near
        return near & ((row_i - row_j) % self.step == 0) & ((column_i - column_j) % self.step == 0)

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        mine, other, inside, touches = self._locate_boxes(query, key)
        answer = np.minimum(
            self._axis_coverage(mine.top, mine.bottom, other.top, other.bottom, self.grid[0], self.radii[0]),
            self._axis_coverage(mine.left, mine.right, other.left, other.right, self.grid[1], self.radii[1]),
        )
        if self.step > 1:
            stride = GridStride(self.grid, self.step, start=self.start)
            answer = np.minimum(answer, stride._box_coverage(query, key, row, lengths))
        return self._limit_to_grid(answer, inside, touches)

    def _axis_coverage(self, low: Array, high: Array, key_low: Array, key_high: Array, size: int, radius: int) -> Array:
        if self.step == 1:
            first_low, first_high = self._find_neighbor_range(low, size, radius)
            last_low, last_high = self._find_neighbor_range(high, size, radius)
            some = (key_high >= first_low) & (key_low <= last_high)
            return coverage(some, (key_low >= last_low) & (key_high <= first_high))
        # Shifted windows of one residue class start at the borders of the class: these are bounds.
        reach = (2 if self.edges == "shift" else 1) * radius * self.step
        some = (key_high >= low - reach) & (key_low <= high + reach)
        every = (key_high - low <= radius * self.step) & (high - key_low <= radius * self.step)
        return coverage(some, every & (self.edges == "clip"))

    def _count_pairs(self, lengths: Lengths) -> int | None:
        if not self._covers_grid(lengths):
            return None
        count = 1
        for size, radius in zip(self.grid, self.radii, strict=True):
            at = np.arange(size)
            first, last = self._find_neighbor_range(at, size, radius)
            # Clipping drops neighbours outside the axis; steps from the inside keep the residue.
            lost_before = np.maximum(0, -(first // self.step))
            lost_after = np.maximum(0, -((size - 1 - last) // self.step))
            count *= int((2 * radius + 1 - lost_before - lost_after).sum())
        return count

    def _find_dense_order(self) -> TokenOrder:
        if self.step > 1:
            return GridResidueOrder(self.token_grid, self.step, self.step)
        # A square tile of queries shares most of its keys. One as wide as the neighbourhood itself keeps about a
        # quarter of the pairs useful while its products stay large enough to be fast.
        height, width = (min(max(2 * radius + 1, 4), 16) for radius in self.radii)
        return GridTileOrder(self.token_grid, min(height, self.grid[0]), min(width, self.grid[1]), is_closed=False)

    @property
    def reach(self) -> int:
        # A neighbourhood that moves inwards at the edge reaches twice as far from there.
        sides = 2 if self.edges == "shift" else 1
        farthest = ((size, sides * radius) for size, radius in zip(self.grid, self.radii, strict=True))
        return self._flat_distance(*(self.step * min((size - 1) // self.step, most) for size, most in farthest))

    def is_shift_invariant(self, grid: Grid | None = None) -> bool:
        return grid == self.token_grid and self.edges == "clip"

    @property
    def max_keys_per_query(self) -> int:
        return (2 * self.radii[0] + 1) * (2 * self.radii[1] + 1)

    def _pair_count_formulas(self, queries: Any, keys: Any, lengths: tuple[int, int] | None = None) -> Iterator[Any]:
        from regard.patterns import pair_counts as count

        axes = zip(count.SIDES, self.radii, strict=True)
        rows, columns = (count.neighbors(side, radius, self.step, self.edges) for side, radius in axes)
        return count.product(self.start, (rows, columns), queries, keys)


def _check_edges(pattern: Neighborhood) -> None:
    if pattern.edges not in ("clip", "shift"):
        raise PatternError(
            "Neighborhood has two kinds of edges.",
            asked=f"edges={pattern.edges!r}",
            because="a neighbourhood at the border either loses keys or moves inwards",
            instead='edges="clip" or edges="shift"',
        )
    need = [(2 * radius + 1) * pattern.step for radius in pattern.radii]
    if pattern.edges == "shift" and (need[0] > pattern.grid[0] or need[1] > pattern.grid[1]):
        raise PatternError(
            "A shifted neighbourhood does not fit its grid.",
            asked=f"radius {pattern.radii} with step {pattern.step} on a grid of {pattern.grid[0]} x {pattern.grid[1]}",
            because=f"it must stay whole, and spans {need[0]} rows and {need[1]} columns",
            instead='a smaller radius or step, or edges="clip"',
        )


@dataclass(frozen=True, repr=False)
class GridWindow(GridPattern):
    """A token sees the tokens of its own window: equal `(row - shift) // window` and `(column - shift) // window`.

    Swin (Liu et al. 2021): `shift=window // 2` on every second layer. Windows cut by the border stay cut; nothing
    wraps around.
    """

    grid: tuple[int, int]
    window: int | tuple[int, int]
    shift: int | tuple[int, int] = 0
    start: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        set_pair(self, "window", self.window, 1)
        set_pair(self, "shift", self.shift, 0)

    @property
    def _window_and_shift(self) -> tuple[int, int, int, int]:
        assert isinstance(self.window, tuple)
        assert isinstance(self.shift, tuple)
        return (*self.window, self.shift[0] % self.window[0], self.shift[1] % self.window[1])

    def _allows_cells(self, row_i: Tensor, row_j: Tensor, column_i: Tensor, column_j: Tensor) -> Tensor:
        height, width, down, across = self._window_and_shift
        rows = torch.div(row_i - down, height, rounding_mode="floor")
        columns = torch.div(column_i - across, width, rounding_mode="floor")
        same_row = rows == torch.div(row_j - down, height, rounding_mode="floor")
        return same_row & (columns == torch.div(column_j - across, width, rounding_mode="floor"))

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        height, width, down, across = self._window_and_shift
        mine, other, inside, touches = self._locate_boxes(query, key)
        rows = (mine.top, mine.bottom, other.top, other.bottom)
        columns = (mine.left, mine.right, other.left, other.right)
        answer = np.minimum(
            class_coverage(*((edge - down) // height for edge in rows)),
            class_coverage(*((edge - across) // width for edge in columns)),
        )
        return self._limit_to_grid(answer, inside, touches)

    def _count_pairs(self, lengths: Lengths) -> int | None:
        if not self._covers_grid(lengths):
            return None
        height, width, down, across = self._window_and_shift
        rows = np.unique((np.arange(self.grid[0]) - down) // height, return_counts=True)[1]
        columns = np.unique((np.arange(self.grid[1]) - across) // width, return_counts=True)[1]
        return int((rows**2).sum() * (columns**2).sum())

    def _find_dense_order(self) -> TokenOrder:
        return GridTileOrder(self.token_grid, *self._window_and_shift)

    @property
    def reach(self) -> int:
        height, width, *_ = self._window_and_shift
        return self._flat_distance(min(height, self.grid[0]) - 1, min(width, self.grid[1]) - 1)

    @property
    def max_keys_per_query(self) -> int:
        height, width, *_ = self._window_and_shift
        return height * width

    def _pair_count_formulas(self, queries: Any, keys: Any, lengths: tuple[int, int] | None = None) -> Iterator[Any]:
        from regard.patterns import pair_counts as count

        height, width, down, across = self._window_and_shift
        rows, columns = count.windows(count.SIDES[0], height, down), count.windows(count.SIDES[1], width, across)
        return count.product(self.start, (rows, columns), queries, keys)


@dataclass(frozen=True, repr=False)
class GridStride(GridPattern):
    """A token sees the tokens a whole number of steps away in rows and in columns.

    The grid attention of MaxViT (Tu et al. 2022) and of Prince, section 12.10; after `GridWindow(grid, step)` the
    receptive field covers the grid.
    """

    grid: tuple[int, int]
    step: int | tuple[int, int]
    start: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        set_pair(self, "step", self.step, 1)

    @property
    def steps(self) -> tuple[int, int]:
        assert isinstance(self.step, tuple)
        return self.step

    def _allows_cells(self, row_i: Tensor, row_j: Tensor, column_i: Tensor, column_j: Tensor) -> Tensor:
        down, across = self.steps
        return ((row_i - row_j) % down == 0) & ((column_i - column_j) % across == 0)

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        down, across = self.steps
        mine, other, inside, touches = self._locate_boxes(query, key)
        one_row = (mine.top == mine.bottom) & (other.top == other.bottom)
        one_column = (mine.left == mine.right) & (other.left == other.right)
        answer = np.minimum(
            residue_coverage(mine.top, mine.row_step, other.top, other.row_step, down, one_row),
            residue_coverage(mine.left, mine.column_step, other.left, other.column_step, across, one_column),
        )
        return self._limit_to_grid(answer, inside, touches)

    def _count_pairs(self, lengths: Lengths) -> int | None:
        if not self._covers_grid(lengths):
            return None
        rows = np.bincount(np.arange(self.grid[0]) % self.steps[0])
        columns = np.bincount(np.arange(self.grid[1]) % self.steps[1])
        return int((rows**2).sum() * (columns**2).sum())

    def _find_dense_order(self) -> TokenOrder:
        return GridResidueOrder(self.token_grid, *self.steps)

    @property
    def reach(self) -> int:
        axes = zip(self.grid, self.steps, strict=True)
        return self._flat_distance(*(step * ((size - 1) // step) for size, step in axes))

    def is_shift_invariant(self, grid: Grid | None = None) -> bool:
        return grid == self.token_grid

    @property
    def max_keys_per_query(self) -> int:
        rows, columns = (-(-size // step) for size, step in zip(self.grid, self.steps, strict=True))
        return rows * columns

    def _pair_count_formulas(self, queries: Any, keys: Any, lengths: tuple[int, int] | None = None) -> Iterator[Any]:
        from regard.patterns import pair_counts as count

        rows, columns = (count.residues(side, step) for side, step in zip(count.SIDES, self.steps, strict=True))
        return count.product(self.start, (rows, columns), queries, keys)


@dataclass(frozen=True, repr=False)
class Axial(GridPattern):
    """A token sees its own row and its own column (Ho et al. 2019, *Axial Attention*).

    `rows * columns * (rows + columns - 1)` pairs; two layers connect everything.
    """

    grid: tuple[int, int]
    start: int = 0

    @property
    def _row_and_column_windows(self) -> tuple[GridWindow, GridWindow]:
        rows, columns = self.grid
        return GridWindow(self.grid, (1, columns), start=self.start), GridWindow(self.grid, (rows, 1), start=self.start)

    def _allows_cells(self, row_i: Tensor, row_j: Tensor, column_i: Tensor, column_j: Tensor) -> Tensor:
        return (row_i == row_j) | (column_i == column_j)

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        along, down = self._row_and_column_windows
        return np.maximum(along._box_coverage(query, key, row, lengths), down._box_coverage(query, key, row, lengths))

    def _count_pairs(self, lengths: Lengths) -> int | None:
        if not self._covers_grid(lengths):
            return None
        rows, columns = self.grid
        return rows * columns * (rows + columns - 1)

    def _split_union(self) -> tuple[Pattern, ...]:
        along, down = self._row_and_column_windows
        return along, down & Not(along)

    @property
    def reach(self) -> int:
        rows, columns = self.grid
        return max((rows - 1) * columns, columns - 1)

    def is_shift_invariant(self, grid: Grid | None = None) -> bool:
        return grid == self.token_grid

    @property
    def max_keys_per_query(self) -> int:
        return sum(self.grid) - 1

    def _pair_count_formulas(self, queries: Any, keys: Any, lengths: tuple[int, int] | None = None) -> Iterator[Any]:
        from regard.patterns import pair_counts

        return pair_counts.axial(self.start, queries, keys)
