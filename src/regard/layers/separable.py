"""Attention by position alone, one axis of a grid after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.biases import Bias, Quadratic, RowColumn


def separable_attention(rows: Tensor, columns: Tensor, x: Tensor) -> Tensor:
    r"""Every head's weighted mean over a whole grid, when its weights are a product over the two axes.

        output[b, r, c, h] = sum_{k, l} rows[h, r, k] columns[h, c, l] x[b, k, l]

    When the score of a pair is a number for its rows plus one for its columns, the softmax over the grid falls apart
    into one over rows and one over columns, because `e^{f + g} = e^f e^g` and the sum over all keys is the product of
    two sums. So `output = A1 X A2^T` for every channel: `R C (R + C)` products instead of `(R C)^2`.

    `rows (head, R, R)` and `columns (head, C, C)` are the weights, each row summing to one (`axis_weights`); `x` is
    `(batch, R, C, channel)`, the output `(batch, R, C, head, channel)`. It holds on a whole grid without a mask and
    without dropout of weights; a covariance with a slant does not fall apart.

    Source: the scores are those of Cordonnier, Loukas and Jaggi (ICLR 2020), sections 4.2 and 4.3. Where we differ:
    their code takes the square, eight times the products on 16 x 16 tokens.

        >>> from regard.layers.separable import axis_scores, axis_weights, separable_attention
        >>> rows, columns = axis_weights(*axis_scores(Quadratic(9, grid=(5, 7))))
        >>> separable_attention(rows, columns, torch.randn(2, 5, 7, 3)).shape
        torch.Size([2, 5, 7, 9, 3])
    """
    batch, height, width, channels = x.shape
    heads = columns.shape[0]
    # Columns first: the weights of all heads, stacked, meet each row of the image in one product.
    across = columns.reshape(heads * width, width) @ x  # (batch, R, head * C, channel)
    across = across.reshape(batch, height, heads, width * channels).transpose(1, 2)
    both = (rows @ across).reshape(batch, heads, height, width, channels)
    return both.permute(0, 2, 3, 1, 4)


def separable_weights(rows: Tensor, columns: Tensor) -> Tensor:
    """The square `(head, R C, R C)` that the two factors stand for; for study, and for dropout, which needs it.

    >>> from regard.layers.separable import separable_weights
    >>> separable_weights(torch.full((1, 2, 2), 0.5), torch.eye(3)[None])[0, 0].tolist()
    [0.5, 0.0, 0.0, 0.5, 0.0, 0.0]
    """
    heads, height, width = rows.shape[0], rows.shape[1], columns.shape[1]
    product = rows[:, :, None, :, None] * columns[:, None, :, None, :]
    return product.reshape(heads, height * width, height * width)


def axis_weights(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Scores along the two axes, `(head, R, R)` and `(head, C, C)`, as weights: a softmax over each one's keys."""
    return rows.softmax(-1), columns.softmax(-1)


def axis_scores(bias: Bias) -> tuple[Tensor, Tensor] | None:
    """A bias on a grid as scores along rows `(head, R, R)` and along columns `(head, C, C)`, query before key.

        score[h, (r, c), (k, l)] = rows[h, r, k] + columns[h, c, l]

    `None` for a bias that is no such sum: one with a slant (`Gaussian`), one that reads content, one along a line.

        >>> from regard.layers.separable import axis_scores
        >>> rows, columns = axis_scores(Quadratic(1, grid=(2, 3), centre=[[0, 1]], alpha=1.0))
        >>> rows.tolist(), columns[0, 0].tolist()
        ([[[-0.0, -1.0], [-1.0, -0.0]]], [-1.0, -0.0, -1.0])
    """
    if not bias.relative:  # a subclass with scores of its own
        return None
    if isinstance(bias, RowColumn):
        return table_scores(bias.row), table_scores(bias.column)
    if isinstance(bias, Quadratic) and bias.grid is not None:
        down, across = (
            -bias.alpha[:, None, None] * (distances(size, centre.device) - centre[:, None, None]).square()
            for size, centre in zip(bias.grid, bias.centre.unbind(dim=1), strict=True)
        )
        return down, across
    return None


def table_scores(table: Tensor) -> Tensor:
    """A table of relative positions, `(head, 2 size - 1)`, as scores `(head, size, size)`: entry `k - q + size - 1`."""
    size = (table.shape[-1] + 1) // 2
    return table[:, distances(size, table.device) + size - 1]


def distances(size: int, device: torch.device | str | None = None) -> Tensor:
    """Key minus query along one axis, `(size, size)`."""
    place = torch.arange(size, device=device)
    return place - place[:, None]
