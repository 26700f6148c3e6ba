"""A learned score for every relative position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.biases._arguments import (
    check_grid,
    check_heads,
    check_integer,
    draw_normal,
    format_arguments,
    make_error,
    to_default_dtype,
)
from regard.biases._geometry import find_deltas, look_up_entries, select_head, zero_off_grid
from regard.biases.base import Bias


class RelativeTable(Bias):
    r"""One learned scalar per head and relative position, on a sequence or on a grid.

        line   score[h, i, j] = table[h, clip(j - i, -distance, distance) + distance]
        grid   score[h, i, j] = table[h, row(j) - row(i) + R - 1, column(j) - column(i) + C - 1]

    with `i` the query's position, `j` the key's, and `grid = (R, C)` in row-major order from position `start`.
    The table is `(head, 2 distance + 1)` or `(head, 2 R - 1, 2 C - 1)`. On a sequence all keys farther than
    `distance` share one entry on each side, and every integer is a position. Pairs with a token outside
    the grid have score 0.

    Source: the clipping is Shaw, Uszkoreit and Vaswani, "Self-Attention with Relative Position
    Representations" (NAACL 2018), section 3.2; the table on a grid is `B` in equation (4) of Liu et al.,
    "Swin Transformer" (ICCV 2021).

    Where we differ: Shaw et al. learn a vector per relative position and multiply it by the query; this is
    the scalar. Swin subtracts the other way round, query minus key; a Swin table is converted by
    `swin.T.reshape(heads, 2 R - 1, 2 C - 1).flip(1, 2)`. Both tables start as N(0, 0.02^2); Swin truncates that
    normal at +-2, a hundred standard deviations, which has no effect.

    Args:
        heads: number of heads.
        distance: the largest relative position on a sequence with an entry of its own.
        grid: rows and columns; give either this or `distance`.
        start: position of the grid's first token, 1 after a class token.
        generator: random generator of the initial table.
        dtype, device: of the parameters; torch's defaults if not given.

    >>> bias = RelativeTable(3, grid=(5, 7), start=1)
    >>> bias, tuple(bias.table.shape)
    (RelativeTable(heads=3, grid=(5, 7), start=1), (3, 9, 13))
    >>> tuple(bias.scores(torch.arange(36)[:, None], torch.arange(36)).shape)
    (3, 36, 36)
    """

    relative = True
    heads_first = True

    def __init__(
        self,
        heads: int,
        distance: int | None = None,
        grid: Sequence[int] | None = None,
        start: int = 0,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.heads = check_heads("RelativeTable", heads)
        if (distance is None) == (grid is None):
            raise make_error(
                "RelativeTable",
                asked=f"distance={distance!r}, grid={grid!r}",
                found="neither of them" if distance is None else "both of them",
                because="the table lies along a line (distance) or on a grid (grid), and its shape follows",
                instead="distance=128 for a sequence, or grid=(14, 14) for an image",
            )
        self.grid, self.start = check_grid("RelativeTable", grid, start)
        self.distance = None
        if self.grid is None:
            self.distance = check_integer(
                "RelativeTable",
                "distance",
                distance,
                1,
                because="a table with a single entry adds the same to every score, which softmax ignores",
                instead="distance=1, which tells before, same and after apart, or more",
            )
            shape = (2 * self.distance + 1,)
        else:
            shape = (2 * self.grid[0] - 1, 2 * self.grid[1] - 1)
        table = draw_normal((self.heads, *shape), std=0.02, generator=generator)
        self.table = nn.Parameter(to_default_dtype(table, dtype, device))

    def scores(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        entry, inside = self._find_entries(query_position, key_position)
        return zero_off_grid(look_up_entries(self.table.flatten(1), entry), inside)

    def score(self, head: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        entry, inside = self._find_entries(query_position, key_position)
        return zero_off_grid(self.table.flatten(1)[select_head(self.heads, head), entry], inside)

    def _find_entries(self, query_position: Tensor, key_position: Tensor) -> tuple[Tensor, Tensor | None]:
        """Each pair's index into the flattened table, and which pairs lie on the grid."""
        along, inside = find_deltas(query_position, key_position, self.grid, self.start)
        if self.distance is not None:
            return along[0].clamp(-self.distance, self.distance) + self.distance, inside
        assert self.grid is not None
        rows, columns = self.grid
        return (along[0] + rows - 1) * (2 * columns - 1) + along[1] + columns - 1, inside

    def extra_repr(self) -> str:
        return format_arguments(heads=self.heads, distance=self.distance, grid=self.grid, start=self.start or None)
