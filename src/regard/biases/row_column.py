"""A learned score for every relative row plus one for every relative column."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.biases._arguments import (
    check_grid,
    check_heads,
    draw_normal,
    format_arguments,
    make_error,
    to_default_dtype,
)
from regard.biases._geometry import find_deltas, look_up_entries, select_head, zero_off_grid
from regard.biases.base import Bias


class RowColumn(Bias):
    r"""The sum of a learned number for the relative row and one for the relative column.

        score[h, i, j] = row[h, row(j) - row(i) + R - 1] + column[h, column(j) - column(i) + C - 1]

    with `i` the query's position, `j` the key's, and `grid = (R, C)` in row-major order from position `start`.
    The tables are `(head, 2 R - 1)` and `(head, 2 C - 1)`. Pairs with a token outside the grid have score 0.
    Because the score is a sum over the two axes, position-only attention on a whole grid factorises into one
    softmax over rows and one over columns.

    Source: Cordonnier, Loukas and Jaggi, "On the Relationship between Self-Attention and Convolutional
    Layers" (ICLR 2020), section 4.3, the learned relative encoding without content.

    Where we differ: the paper learns vectors for rows and columns, shared by the heads, and one weight vector
    per head; their inner products are the tables here, which hold `2 R + 2 C - 2` numbers per head. `R` and
    `C` may differ. Both tables start as N(0, 0.02^2).

    Args:
        heads: number of heads.
        grid: rows and columns.
        start: position of the grid's first token, 1 after a class token.
        generator: random generator of the initial tables.
        dtype, device: of the parameters; torch's defaults if not given.

    >>> bias = RowColumn(3, grid=(5, 7))
    >>> tuple(bias.row.shape), tuple(bias.column.shape)
    ((3, 9), (3, 13))
    >>> tuple(bias.scores(torch.arange(35)[:, None], torch.arange(35)).shape)
    (3, 35, 35)
    """

    relative = True
    heads_first = True

    def __init__(
        self,
        heads: int,
        grid: Sequence[int],
        start: int = 0,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.heads = check_heads("RowColumn", heads)
        if grid is None:
            raise make_error(
                "RowColumn",
                asked="grid=None",
                found="no rows and no columns",
                because="the score is the sum over the two axes of a grid",
                instead="grid=(rows, columns), or RelativeTable(heads, distance=...) for a sequence",
            )
        checked, self.start = check_grid("RowColumn", grid, start)
        assert checked is not None
        self.grid = checked
        rows, columns = checked
        row = draw_normal((self.heads, 2 * rows - 1), std=0.02, generator=generator)
        column = draw_normal((self.heads, 2 * columns - 1), std=0.02, generator=generator)
        self.row = nn.Parameter(to_default_dtype(row, dtype, device))
        self.column = nn.Parameter(to_default_dtype(column, dtype, device))

    def scores(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        (row, column), inside = find_deltas(query_position, key_position, self.grid, self.start)
        rows, columns = self.grid
        return zero_off_grid(
            look_up_entries(self.row, row + rows - 1) + look_up_entries(self.column, column + columns - 1), inside
        )

    def score(self, head: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        head = select_head(self.heads, head)
        (row, column), inside = find_deltas(query_position, key_position, self.grid, self.start)
        rows, columns = self.grid
        return zero_off_grid(self.row[head, row + rows - 1] + self.column[head, column + columns - 1], inside)

    def extra_repr(self) -> str:
        return format_arguments(heads=self.heads, grid=self.grid, start=self.start or None)
