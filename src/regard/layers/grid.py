"""Attention over a grid of tokens, with any description, for all queries or for some."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.attention import Attention, attend
from regard.errors import InputError
from regard.layers.multihead import MultiHeadAttention
from regard.layers.projections import AttentionSizes
from regard.layers.row_subset import restrict_to_queries


class GridAttention(nn.Module):
    """Multi-head attention over the cells of a grid.

        output[x, y] = b + sum_h sum_{x', y'} alpha_h[x, y, x', y'] value_h[x', y'] W_h^o
        alpha_h[x, y, :, :] = softmax over (x', y') of scale query_h[x, y] . key_h[x', y'] + bias_h[x, y, x', y']

    `x` is a row and `y` a column; the softmax runs over both together. It is one-dimensional attention over the grid
    read row by row, and takes the same descriptions: patterns such as `Neighborhood(grid, 1)`, biases such as
    `RowColumn(heads, grid)` or `Gaussian`.

    Grids are `(batch, row, column, channel)`. Sizes are free as in `MultiHeadAttention`; with `bias="o"` there are
    `H D_in (2 D_key + D_value) + H D_value D_out + D_out` parameters.

    Sources: Cordonnier, Loukas and Jaggi, On the Relationship between Self-Attention and Convolutional Layers (2020),
    equations 1 to 3.

        >>> from regard.layers.grid import GridAttention
        >>> layer = GridAttention(8, 2, attention=Attention(pattern=Neighborhood((5, 7), 1)))
        >>> image = torch.randn(3, 5, 7, 8)
        >>> layer(image).shape, layer.at(image, rows=2, columns=6).shape
        (torch.Size([3, 5, 7, 8]), torch.Size([3, 8]))

    Args:
        sizes, heads, kv_heads, attention, bias, dropout: as in `MultiHeadAttention`.
    """

    def __init__(
        self,
        sizes: int | AttentionSizes,
        heads: int | None = None,
        *,
        kv_heads: int | None = None,
        attention: Attention | None = None,
        bias: bool | str = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(
            sizes, heads, kv_heads=kv_heads, attention=attention, bias=bias, dropout=dropout
        )

    def forward(self, grid: Tensor) -> Tensor:
        """The output of every cell, `(batch, row, column, output)`."""
        self._check_grid(grid)
        return self.attention(grid.flatten(1, 2)).unflatten(1, grid.shape[1:3])

    def weights(self, grid: Tensor) -> Tensor:
        """Attention weights `(batch, head, row, column, row', column')`; this builds the square."""
        self._check_grid(grid)
        places = grid.shape[1:3]
        return self.attention.weights(grid.flatten(1, 2)).unflatten(-1, places).unflatten(-3, places)

    def at(self, grid: Tensor, rows: int | Tensor, columns: int | Tensor) -> Tensor:
        """The output of some cells only, `(batch, *cells, output)`: the same numbers as in the whole output.

        `rows` and `columns` broadcast against each other, so that `rows=torch.arange(0, 8, 2)[:, None]` and
        `columns=torch.arange(0, 6, 2)` evaluate every second cell of a grid of 8 x 6: attention with a stride. Keys
        and values are those of the whole grid, and weights are not dropped.
        """
        self._check_grid(grid)
        places = _find_token_indices(grid, rows, columns)
        tokens, layer = grid.flatten(1, 2), self.attention
        chosen = places.flatten()
        query = layer.projections.query(tokens[:, chosen])
        key, value = layer.projections.key_value(tokens)
        mixed = attend(query, key, value, restrict_to_queries(layer.attention, chosen, query, key))
        output = layer.output(mixed.transpose(1, 2).flatten(2))
        return output.reshape(len(grid), *places.shape, output.shape[-1])

    def _check_grid(self, grid: Tensor) -> None:
        width = self.attention.sizes.input
        if grid.ndim != 4 or grid.shape[-1] != width:
            raise InputError(
                "This is not a grid of tokens.",
                asked=f"(batch, row, column, {width})",
                found=f"a tensor {tuple(grid.shape)}",
                because="cells have a row and a column, and channels come last",
                instead="image.permute(0, 2, 3, 1), if channels come first",
            )


def _find_token_indices(grid: Tensor, rows: int | Tensor, columns: int | Tensor) -> Tensor:
    """Token indices of these cells when the grid is read row by row."""
    height, width = grid.shape[1:3]
    row, column = (torch.as_tensor(index, device=grid.device) for index in (rows, columns))
    inside = bool(((row >= 0) & (row < height)).all() & ((column >= 0) & (column < width)).all())
    if not inside or row.dtype.is_floating_point or column.dtype.is_floating_point:
        raise InputError(
            "A cell lies outside the grid.",
            asked=f"rows {row.tolist()} and columns {column.tolist()}",
            found=f"a grid of {height} x {width}",
            because="rows and columns are counted from 0, and nothing wraps around",
            instead=f"rows from 0 to {height - 1} and columns from 0 to {width - 1}",
        )
    return row * width + column


__all__ = ["GridAttention"]
