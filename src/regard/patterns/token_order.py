"""Token orders: sorting tokens into classes makes a scattered pattern dense.

A dilated window is a plain window inside each residue class; windows on a grid become contiguous blocks when tokens are
sorted by window. An order assigns a class to every position; tokens are sorted by class, and by position inside a
class. An order is *closed* when queries see keys of their own class only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from regard.patterns.box import Array, Grid, GridRange, TokenBox


@dataclass(frozen=True)
class TokenOrder:
    """The natural order: one class, nothing moves."""

    @property
    def name(self) -> str:
        """What tokens are sorted by, for display."""
        return "position"

    @property
    def closed(self) -> bool:
        return False

    @property
    def preference(self) -> tuple[int, int]:
        """Of two valid orders the greater is used: closed before open, then the one with more classes."""
        return (0, 0)

    @property
    def step(self) -> int:
        """The distance between neighbours inside a class, where it is the same everywhere."""
        return 1

    @property
    def grid(self) -> Grid | None:
        return None

    def find_classes(self, position: Array) -> Array:
        """The class of every position; a negative class of a closed order sees nothing."""
        return np.zeros_like(position)

    def fit_to_tile(self, block: int) -> TokenOrder:
        """The order for tiles of at most `block` queries, where a smaller class would share more keys."""
        return self

    def make_boxes(self, position: Array, first: Array, last: Array) -> TokenBox:
        """Boxes around the sorted ranges whose first and last members are `position[first]`, `position[last]`."""
        return TokenBox(position[first], position[last], self.step)


NATURAL_ORDER = TokenOrder()


@dataclass(frozen=True)
class ResidueOrder(TokenOrder):
    """Classes of equal residue: `position % step`."""

    modulus: int

    closed = True  # type: ignore[assignment]

    @property
    def name(self) -> str:
        return f"residue modulo {self.modulus}"

    @property
    def preference(self) -> tuple[int, int]:
        return (2, self.modulus)

    @property
    def step(self) -> int:
        return self.modulus

    def find_classes(self, position: Array) -> Array:
        return position % self.modulus


@dataclass(frozen=True)
class BlockOrder(TokenOrder):
    """Classes of `size` neighbours: nothing moves, but no tile reaches over a cut."""

    size: int

    closed = True  # type: ignore[assignment]

    @property
    def name(self) -> str:
        return f"block of {self.size}"

    @property
    def preference(self) -> tuple[int, int]:
        return (3, -self.size)

    def find_classes(self, position: Array) -> Array:
        return position // self.size  # positions before the sequence share no block with a key


@dataclass(frozen=True)
class _GridOrder(TokenOrder):
    token_grid: Grid

    @property
    def grid(self) -> Grid:
        return self.token_grid

    def find_cell_classes(self, row: Array, column: Array) -> Array:
        """The class of every cell."""
        raise NotImplementedError

    def find_classes(self, position: Array) -> Array:
        inside = self.token_grid.contains(position)
        return np.where(
            inside, self.find_cell_classes(self.token_grid.row(position), self.token_grid.column(position)), -1
        )

    def make_boxes(self, position: Array, first: Array, last: Array) -> TokenBox:
        grid = self.token_grid
        clipped = np.clip(position, grid.start, grid.start + grid.cells - 1)
        row, column, token_class = grid.row(clipped), grid.column(clipped), self.find_classes(position)
        # Leftmost and rightmost column of each class, looked up by class: what a range over several rows may touch.
        classes, inverse = np.unique(token_class, return_inverse=True)
        leftmost = np.full(classes.size, grid.columns - 1)
        rightmost = np.zeros(classes.size, dtype=column.dtype)
        np.minimum.at(leftmost, inverse, column)
        np.maximum.at(rightmost, inverse, column)
        outside = token_class[first] < 0
        one_row = (row[first] == row[last]) & ~outside
        left = np.where(one_row, column[first], np.where(outside, 0, leftmost[inverse[first]]))
        right = np.where(one_row, column[last], np.where(outside, grid.columns - 1, rightmost[inverse[first]]))
        steps = self.strides()
        edges = GridRange(row[first], row[last], left, right, *steps)
        return TokenBox(position[first], position[last], 1, grid, edges)

    def strides(self) -> tuple[int, int]:
        return (1, 1)


@dataclass(frozen=True)
class GridTileOrder(_GridOrder):
    """Classes of a grid's tiles: `(row - shift) // height, (column - shift) // width`."""

    height: int
    width: int
    row_shift: int = 0
    column_shift: int = 0
    is_closed: bool = True

    @property
    def name(self) -> str:
        return f"tile of {self.height} x {self.width}"

    @property
    def closed(self) -> bool:
        return self.is_closed

    @property
    def preference(self) -> tuple[int, int]:
        return (3 if self.is_closed else 1, -self.height * self.width)

    def fit_to_tile(self, block: int) -> TokenOrder:
        # An open class that does not fit a tile would be cut into odd pieces. Of all rectangles that do fit, the one
        # whose neighbourhood (as wide as the class itself) holds the fewest keys for each query.
        if self.is_closed or self.height * self.width <= block:
            return self
        sides = [(height, min(block // height, self.token_grid.columns)) for height in range(1, block + 1)]
        sides = [(height, width) for height, width in sides if height <= self.token_grid.rows]
        keys = {(h, w): (h + self.height - 1) * (w + self.width - 1) / (h * w) for h, w in sides}
        height, width = min(sides, key=keys.__getitem__)
        return dataclasses.replace(self, height=height, width=width)

    def find_cell_classes(self, row: Array, column: Array) -> Array:
        # A shift leaves a narrow first tile whose quotient is -1; adding one keeps every class number positive.
        across = (self.token_grid.columns // self.width) + 3
        down = (row - self.row_shift) // self.height + 1
        return down * across + (column - self.column_shift) // self.width + 1


@dataclass(frozen=True)
class GridResidueOrder(_GridOrder):
    """Classes of equal residue of row and column."""

    row_step: int
    column_step: int

    closed = True  # type: ignore[assignment]

    @property
    def name(self) -> str:
        return f"residue of row and column modulo {self.row_step} x {self.column_step}"

    @property
    def preference(self) -> tuple[int, int]:
        return (2, self.row_step * self.column_step)

    def find_cell_classes(self, row: Array, column: Array) -> Array:
        return (row % self.row_step) * self.column_step + column % self.column_step

    def strides(self) -> tuple[int, int]:
        return (self.row_step, self.column_step)
