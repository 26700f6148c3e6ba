"""Separable attention: a softmax over a grid as one over rows and one over columns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.calculus._arguments import check_axes, check_dtypes, read_tensors
from regard.errors import CalculusError

if TYPE_CHECKING:
    from jaxtyping import Float


def separable_attention(
    rows: Float[Tensor, "head query_row key_row"],
    columns: Float[Tensor, "head query_column key_column"],
    x: Float[Tensor, "batch key_row key_column channel"],
) -> Float[Tensor, "batch query_row query_column head channel"]:
    r"""Every head's weighted mean over a whole grid, when its weights are a product over the two axes.

        output[b, r, c, h] = sum_{k, l} rows[h, r, k] columns[h, c, l] x[b, k, l]

    When the score of a pair is a score of its rows plus one of its columns, the softmax over the grid factorises
    into one over rows and one over columns, because `e^{f + g} = e^f e^g` and the sum over all keys is the product of
    two sums. So `output = A1 X A2^T` for every channel: on a grid of R x C tokens `R C (R + C)` products instead of
    `(R C)^2`. Each row of `rows` and `columns` sums to one (`axis_weights`). The grids of queries and keys may differ:
    `R' x C'` queries over `R x C` keys take `R C' C + R' R C'` products.

    Source: the scores are those of Cordonnier, Loukas and Jaggi, "On the Relationship between Self-Attention and
    Convolutional Layers" (ICLR 2020), sections 4.2 and 4.3.

    Where we differ: their code computes all pairs, eight times the products on 16 x 16 tokens. The factorisation
    requires a whole grid without a mask and without attention dropout; a rotated covariance does not factorise.

        >>> import torch
        >>> from regard.calculus import axis_weights, separable_attention
        >>> rows, columns = axis_weights(torch.randn(9, 2, 5), torch.randn(9, 3, 7))
        >>> separable_attention(rows, columns, torch.randn(11, 5, 7, 4)).shape
        torch.Size([11, 2, 3, 9, 4])
    """
    rows, columns, x = _read_factors("separable_attention", rows=rows, columns=columns, x=x)
    batch, key_rows, key_columns, channels = x.shape
    heads, query_rows, _ = rows.shape
    query_columns = columns.shape[1]
    # Columns first: the stacked weights of all heads times each row of the image, in one product.
    across = columns.reshape(heads * query_columns, key_columns) @ x  # (batch, row, head * column, channel)
    across = across.reshape(batch, key_rows, heads, query_columns * channels).transpose(1, 2)
    both = (rows @ across).reshape(batch, heads, query_rows, query_columns, channels)
    return both.permute(0, 2, 3, 1, 4)


def separable_weights(
    rows: Float[Tensor, "head query_row key_row"], columns: Float[Tensor, "head query_column key_column"]
) -> Float[Tensor, "head query key"]:
    """The attention weights of all pairs, from the two factors; for inspection, and for attention dropout.

        weight[h, (r, c), (k, l)] = rows[h, r, k] columns[h, c, l]

    Source: the definition of `separable_attention`, multiplied out.

    Where we differ: tokens are in raster order, `row * columns + column`.

        >>> import torch
        >>> from regard.calculus import separable_weights
        >>> separable_weights(torch.full((1, 2, 2), 0.5), torch.eye(3)[None])[0, 0].tolist()
        [0.5, 0.0, 0.0, 0.5, 0.0, 0.0]
    """
    rows, columns = _read_factors("separable_weights", rows=rows, columns=columns)
    product = rows[:, :, None, :, None] * columns[:, None, :, None, :]
    return product.flatten(3, 4).flatten(1, 2)


def axis_weights(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Scores along the two axes as weights: a softmax over each one's keys, the last axis.

    A query whose scores are all minus infinity along an axis has no visible key: its weights are zero.

    Source: the factors of `separable_attention`.

    Where we differ: nothing.

        >>> import torch
        >>> from regard.calculus import axis_weights
        >>> rows, columns = axis_weights(torch.zeros(1, 2, 2), torch.zeros(1, 4, 4))
        >>> rows[0, 0].tolist(), columns[0, 0].tolist()
        ([0.5, 0.5], [0.25, 0.25, 0.25, 0.25])
    """
    rows, columns = read_tensors("axis_weights", rows=rows, columns=columns)
    check_axes("axis_weights", rows=(rows, "key_row"))
    check_axes("axis_weights", columns=(columns, "key_column"))
    return _softmax(rows), _softmax(columns)


def _read_factors(function: str, **given: Any) -> list[Tensor]:
    """Validate the factors and, if given, the grid: exactly these axes."""
    axes = {
        "rows": "head query_row key_row",
        "columns": "head query_column key_column",
        "x": "batch key_row key_column channel",
    }
    tensors = dict(zip(given, read_tensors(function, **given), strict=True))
    check_axes(function, **{name: (tensor, axes[name]) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        if tensor.ndim != len(axes[name].split()):
            raise CalculusError(
                f"{function} has no axes for a batch of factors.",
                asked=f"{name} {tuple(tensor.shape)}",
                because=f"{name} has the axes ({', '.join(axes[name].split())})",
                instead="a loop, or torch.vmap, over what is before them",
            )
    check_dtypes(function, **tensors)
    return list(tensors.values())


def _softmax(scores: Tensor) -> Tensor:
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(nothing, 0).softmax(-1).masked_fill(nothing, 0)
