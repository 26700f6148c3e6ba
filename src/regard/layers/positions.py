"""Absolute positions that are added to tokens: computed ones, and learned ones on a line or a grid."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from regard.calculus import sinusoidal
from regard.errors import ConfigError, InputError


class SinusoidalPositions(nn.Module):
    """The table of `regard.calculus.sinusoidal`, computed for the positions that are given.

        PE(p)_{2i} = sin(w_i p),   PE(p)_{2i+1} = cos(w_i p),   w_i = base^(-2i / dim)

    Source: Vaswani et al., Attention Is All You Need (2017), section 3.5.

    Where we differ: there is no maximal length; the table is computed in float64 where it is needed and cast last.

        >>> from regard.layers import SinusoidalPositions
        >>> SinusoidalPositions(4)(torch.arange(2))
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999]])

    Args:
        dim: channels of a token.
        base: of the frequencies `w_i`.
    """

    def __init__(self, dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        sinusoidal(0, dim, base=base)  # refuses what has no table

    def forward(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Positions of any shape; `(*positions, dim)`."""
        return sinusoidal(positions, self.dim, base=self.base, dtype=dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, base={self.base}"


class LearnedPositions(nn.Module):
    """One learned vector for each position of a sequence.

    Args:
        count: number of positions.
        dim: channels of a token.

    >>> positions = LearnedPositions(7, 4)
    >>> positions(torch.arange(3)).shape, positions.resized(11).weight.shape
    (torch.Size([3, 4]), torch.Size([11, 4]))
    """

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        if count < 1:
            raise ConfigError(
                "There is no position to learn.",
                asked=f"LearnedPositions({count}, {dim})",
                because="the table has at least one row",
                instead="LearnedPositions(1024, dim)",
            )
        self.weight = nn.Parameter(torch.empty(count, dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        try:
            return nn.functional.embedding(positions, self.weight)
        except IndexError:
            raise InputError(
                "A position is out of range.",
                asked=f"positions from {int(positions.min())} to {int(positions.max())}",
                found=f"{len(self.weight)} learned ones",
                because="the table has no row for it",
                instead=f"a text of at most {len(self.weight)} tokens, or resized({int(positions.max()) + 1})",
            ) from None

    def resized(self, count: int) -> LearnedPositions:
        """The table with another number of positions, by linear interpolation; the first and the last stay the same."""
        other = LearnedPositions(count, self.weight.shape[1]).to(self.weight)
        with torch.no_grad():
            other.weight.copy_(_interpolate(self.weight, count))
        return other

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


def _interpolate(weight: Tensor, count: int) -> Tensor:
    if count == len(weight):
        return weight
    return interpolate(weight.T[None], size=count, mode="linear", align_corners=True)[0].T


class GridPositions(nn.Module):
    """One learned vector for each cell of a grid, row by row, after those of `first` tokens outside the grid.

    The weight is `(first + rows * columns, dim)`: one table, as ViT's checkpoints have it.

    Source: Dosovitskiy et al., An Image is Worth 16x16 Words (2021), section 3.2 for the interpolation.

        >>> from regard.layers import GridPositions
        >>> positions = GridPositions((2, 3), 4, first=1)
        >>> positions().shape, positions((4, 5)).shape
        (torch.Size([7, 4]), torch.Size([21, 4]))

    Args:
        grid: rows and columns.
        dim: channels of a token.
        first: tokens before the grid, such as a class token.
    """

    def __init__(self, grid: tuple[int, int], dim: int, *, first: int = 0) -> None:
        super().__init__()
        if min(grid) < 1 or first < 0:
            raise ConfigError(
                "A grid of positions has rows and columns.",
                asked=f"GridPositions(grid={grid}, first={first})",
                because="there is at least one row and one column, and no negative number of tokens before them",
                instead="GridPositions((14, 14), dim, first=1)",
            )
        self.grid, self.first = (grid[0], grid[1]), first
        self.weight = nn.Parameter(torch.empty(first + grid[0] * grid[1], dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, grid: tuple[int, int] | None = None) -> Tensor:
        """The table for a grid: the learned one for the grid that was learned, exactly; else a bicubic one."""
        if grid is None or tuple(grid) == self.grid:
            return self.weight
        if min(grid) < 1:
            raise InputError(
                "There is no such grid.",
                asked=f"positions for a grid of {grid[0]} x {grid[1]}",
                because="a grid has at least one row and one column",
                instead="an image of at least one patch",
            )
        cells = self.weight[self.first :].T.reshape(1, -1, *self.grid)
        cells = cells.to(torch.promote_types(cells.dtype, torch.float32))  # torch has no bicubic in half precision
        resized = interpolate(cells, size=tuple(grid), mode="bicubic", antialias=True, align_corners=False)
        return torch.cat((self.weight[: self.first], resized[0].flatten(1).T.to(self.weight.dtype)))

    def resized(self, grid: tuple[int, int]) -> GridPositions:
        """A module that has learned the interpolated table."""
        other = GridPositions(grid, self.weight.shape[1], first=self.first).to(self.weight)
        with torch.no_grad():
            other.weight.copy_(self(grid))
        return other

    def extra_repr(self) -> str:
        return f"{self.grid}, {self.weight.shape[1]}, first={self.first}"
