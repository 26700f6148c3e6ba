"""What the page draws of a head: tiles, rows and columns of its weights, thumbnails, and attention rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from regard.errors import InputError
from regard.lab.layer_heads import LayerHeads

THUMBNAIL = 32  # cells along each side
Check = Callable[[], None]


def compute_tile(
    layer: LayerHeads,
    head: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
    size: int,
    weighting: str = "weights",
    check: Check = lambda: None,
) -> tuple[Tensor, bool, float]:
    """A part of the weights, mean-pooled to at most `size` cells along each side; whether it is exact; the largest.

    A few rows at a time are computed and pooled: memory is that of the strips, however large the part is.
    """
    factors = layer.key_factors(head, weighting)
    high, wide = -(-(rows[1] - rows[0]) // size), -(-(columns[1] - columns[0]) // size)
    pooling = _make_pooling(columns[1] - columns[0], wide)
    parts, largest = [], 0.0
    step = max((1 << 20) // max(layer.keys, 1) // high, 1) * high
    for start in range(rows[0], rows[1], step):
        check()
        stop = min(start + step, rows[1])
        if layer.causal and columns[0] >= stop:
            parts.append(torch.zeros(-(-(stop - start) // high), pooling.shape[1]))
            continue
        strip = layer.rows(range(start, stop), head)[0, :, columns[0] : columns[1]].float()
        strip = strip if factors is None else strip * factors[columns[0] : columns[1]]
        largest = max(largest, float(strip.max()))
        if high == wide == 1:
            parts.append(strip)
        else:
            parts.append(_make_pooling(stop - start, high).T @ (strip @ pooling))
    return torch.cat(parts), high == wide == 1, largest


def _make_pooling(count: int, cell: int) -> Tensor:
    """The matrix of the means over `cell` neighbours; the last of them may be fewer."""
    index = torch.arange(count) // cell
    matrix = torch.zeros(count, int(index[-1]) + 1)
    matrix[torch.arange(count), index] = 1
    return matrix / matrix.sum(0)


def compute_row(
    layer: LayerHeads, head: int, token: int, side: str, weighting: str = "weights", check: Check = lambda: None
) -> Tensor:
    """The weights that a query gives to all keys, or those that a key receives from all queries."""
    factors = layer.key_factors(head, weighting)
    if side == "query":
        row = layer.rows([token], head)[0, 0].float()
        return row if factors is None else row * factors
    parts = [torch.zeros(min(token, layer.queries) if layer.causal else 0)]  # earlier queries do not see the key
    for _, strip in layer.strips(head, first=len(parts[0])):
        check()
        parts.append(strip[0, :, token].float())
    column = torch.cat(parts)
    return column if factors is None else column * factors[token]


def make_thumbnail_pooling(count: int) -> Tensor:
    """The matrix that averages tokens to the cells of a thumbnail: all of them where there are few."""
    return _make_pooling(count, -(-count // THUMBNAIL))


def compute_rollout(layers: Sequence[LayerHeads], token: int, check: Check = lambda: None) -> Tensor:
    """How much of each input token reaches a token of the last layer, `(key,)`: attention rollout.

        r <- (r + r A_l) / 2    from the last layer l to the first, A_l the mean over the heads

    Source: Abnar and Zuidema, Quantifying Attention Flow in Transformers (2020), equation 1. It begins with the one-hot
    row of the token, so that a vector meets each matrix, and no two matrices are multiplied.
    """
    for layer in layers:
        if layer.queries != layer.keys:
            raise InputError(
                "Rollout needs attention of a sequence to itself.",
                asked=f"rollout through {layer.name}",
                found=f"{layer.queries} queries and {layer.keys} keys",
                because="a residual connection adds a token to itself",
                instead="the attention of the encoder, or of the decoder, to itself",
            )
    share = torch.zeros(layers[-1].queries)
    share[token] = 1
    for layer in reversed(layers):
        moved = torch.zeros(layer.keys)
        needed = share.nonzero().flatten()
        for places in needed.split(max((1 << 20) // (layer.keys * layer.heads), 1)):
            check()
            moved += torch.einsum("q,qk->k", share[places], layer.rows(places.tolist()).float().mean(0))
        share = (share + moved) / 2
    return share
