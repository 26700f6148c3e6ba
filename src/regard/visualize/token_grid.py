"""The grid of tokens of an image."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError

# Tokens before the patches: a class token, a distillation token, four registers.
MOST_FIRST = 8


@dataclass(frozen=True)
class TokenGrid:
    """Tokens of a grid in row-major order, after `first` others (a class token)."""

    grid: tuple[int, int]
    first: int = 0

    def token(self, query: tuple[int, int], image: tuple[int, int]) -> int:
        """The token of a pixel (row, column) of an image with these numbers of rows and columns."""
        if (
            not isinstance(query, tuple | list)
            or len(query) != 2
            or not all(isinstance(each, Integral) for each in query)
        ):
            raise InputError(
                "A pixel has a row and a column.",
                asked=f"query={query!r}",
                because="a pixel is given by two integers",
                instead=f"query=({image[0] // 2}, {image[1] // 2})",
            )
        row, column = query
        if not (0 <= row < image[0] and 0 <= column < image[1]):
            raise InputError(
                "There is no such pixel.",
                asked=f"query={query}",
                found=f"an image of {image[0]} rows and {image[1]} columns",
                because="pixels are counted from 0, rows first",
                instead=f"query=({image[0] // 2}, {image[1] // 2})",
            )
        return self.first + row * self.grid[0] // image[0] * self.grid[1] + column * self.grid[1] // image[1]

    def box(self, token: int, image: tuple[int, int]) -> tuple[float, float, float, float]:
        """The patch of a token in the image: top, left, height and width in pixels."""
        row, column = divmod(token - self.first, self.grid[1])
        high, wide = image[0] / self.grid[0], image[1] / self.grid[1]
        return row * high, column * wide, high, wide

    def maps(self, rows: Tensor) -> Tensor:
        """Weights over tokens, `(..., key)`, as weights over the grid, `(..., row, column)`, without the first ones."""
        return rows[..., self.first :].unflatten(-1, self.grid)

    def spread(self, weights: Tensor, image: tuple[int, int]) -> Tensor:
        """Weights over the grid, `(..., row, column)`, for every pixel of the image."""
        row, column = (torch.arange(size) * cells // size for size, cells in zip(image, self.grid, strict=True))
        return weights[..., row[:, None], column]


def find_token_grid(model: nn.Module, keys: int, image: tuple[int, int]) -> TokenGrid:
    """The grid of a model's tokens: from its configuration, or with the aspect ratio of the image."""
    for grid in _read_grids(model):
        first = keys - grid[0] * grid[1]
        if 0 <= first <= MOST_FIRST:
            return TokenGrid(grid, first)
    for first in range(min(MOST_FIRST, keys - 1) + 1):
        for rows in range(1, keys - first + 1):
            columns = (keys - first) // rows
            if rows * columns == keys - first and rows * image[1] == columns * image[0]:
                return TokenGrid((rows, columns), first)
    raise InputError(
        "It is not clear which token is which part of the image.",
        asked=f"an image of {image[0]} x {image[1]} pixels",
        found=f"{keys} tokens",
        because="they are not a grid with the aspect ratio of the image, with or without a few tokens before it",
        instead="show(layer, grid) with a grid of tokens (1, row, column, channel), for a layer on a grid",
    )


def _read_grids(model: Any) -> list[tuple[int, int]]:
    """The grids that a model of Regard, timm or Hugging Face has as attributes."""
    found = [getattr(getattr(model, "config", None), "grid", None)]
    found.append(getattr(getattr(model, "patch_embed", None), "grid_size", None))
    for module in model.modules():
        found.append(getattr(module, "grid", None))
    return [(grid[0], grid[1]) for grid in found if isinstance(grid, tuple | list) and len(grid) == 2]
