"""Gaussian biases of relative position as inner products of features of absolute positions."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.biases.base import Bias
from regard.biases.gaussian import Gaussian
from regard.biases.quadratic import Quadratic
from regard.patterns.box import Lengths


def features_of(bias: Bias, lengths: Lengths) -> tuple[Tensor, Tensor] | None:
    r"""Features of queries `(head, query, f)` and of keys `(key, f)` whose inner products are the scores of the bias.

        Quadratic   -alpha |k - p|^2 = alpha (1, 2 p_1, 2 p_2) . (-|k|^2, k_1, k_2) - alpha |p|^2,    p = q + centre
        Gaussian    -1/2 (k - p)^T P (k - p) = (-P_11 / 2, -P_12, -P_22 / 2, (P p)_1, (P p)_2) . (k_1^2, k_1 k_2, k_2^2,
                    k_1, k_2) - 1/2 p^T P p

    The last term, the same for all keys of a query, is left out: softmax ignores it. A `Quadratic` needs 3 features on
    a grid and 2 on a sequence, a `Gaussian` on a grid 5. Concatenated to query and key they give ordinary attention
    without a bias. Heads share the features of the keys. Coordinates are centred, which halves the largest one and
    divides the rounding error of its square by four.

    `None` for other biases, and where tokens lie outside the grid.

    Source: the products are those of Cordonnier, Loukas and Jaggi (ICLR 2020), equation (9), read as absolute
    positions. Where we differ: they multiply encodings of relative positions, one for each pair.

        >>> from regard.biases import features_of
        >>> from regard.patterns import Lengths
        >>> query, key = features_of(Quadratic(2, grid=(3, 5)), Lengths(15, 15))
        >>> query.shape, key.shape
        (torch.Size([2, 15, 3]), torch.Size([15, 3]))
    """
    if not has_features(bias, lengths):
        return None
    assert isinstance(bias, (Quadratic, Gaussian))
    return _make_features(bias, *_centred_coordinates(bias, lengths))


def tile_features(bias: Quadratic | Gaussian, query_position: Tensor, key_position: Tensor) -> tuple[Tensor, Tensor]:
    r"""The features of `features_of` for the queries of one tile and any keys, with coordinates centred at the tile.

        -alpha |k - p|^2 = -alpha |(k - c) - (p - c)|^2,    c = mean over the queries of the tile of p, rounded

    An inner product of features subtracts squares of coordinates. Their rounding errors grow with the square of the
    distance from the origin, so that on a large grid the scores of the nearest keys, which have all the weight, are the
    least accurate ones. With the origin at the tile those keys have small coordinates.

    `query_position (query,)` and `key_position (key,)` are positions in the sequence, inside the grid if there is one.
    Features of queries `(head, query, f)` and of keys `(key, f)`; the scores differ from those of the bias by a
    constant for each query.

        >>> from regard.biases import tile_features
        >>> query, key = tile_features(Quadratic(2, grid=(9, 11)), torch.arange(22, 33), torch.arange(99))
        >>> query.shape, key.shape
        (torch.Size([2, 11, 3]), torch.Size([99, 3]))
    """
    dtype = torch.promote_types(bias.centre.dtype, torch.float32)
    query, key = (_find_coordinates(bias, position) for position in (query_position, key_position))
    # Whole numbers: subtracting them is exact.
    origin = (query.to(torch.float64).mean(0) + bias.centre.detach().double().mean(0)).round().to(query)
    return _make_features(bias, (query - origin).to(dtype), (key - origin).to(dtype))


def _find_coordinates(bias: Quadratic | Gaussian, position: Tensor) -> Tensor:
    """Coordinates of positions as whole numbers, `(token, axis)`."""
    place = position.to(bias.centre.device) - bias.start
    if bias.grid is None:
        return place[:, None]
    return torch.stack((place // bias.grid[1], place % bias.grid[1]), -1)


def _make_features(bias: Quadratic | Gaussian, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    target = query + bias.centre[:, None]  # (head, query, axis)
    if isinstance(bias, Quadratic):
        alpha = bias.alpha[:, None, None]
        ones = torch.ones_like(target[..., :1])
        return alpha * torch.cat((ones, 2 * target), -1), torch.cat((-key.square().sum(-1, keepdim=True), key), -1)
    axes = key.shape[1]
    first, second = torch.triu_indices(axes, axes, device=key.device)
    # Off the diagonal an entry of P counts twice.
    factor = torch.where(first == second, -0.5, -1.0).to(key.dtype)
    precision = bias.precision.to(key.dtype)
    steep = (precision[:, first, second] * factor)[:, None].expand(-1, query.shape[0], -1)
    return torch.cat((steep, target @ precision), -1), torch.cat((key[:, first] * key[:, second], key), -1)


def has_features(bias: Bias, lengths: Lengths) -> bool:
    """True if `features_of` returns features for this bias and these lengths; computes none."""
    if not bias.relative or not isinstance(bias, (Quadratic, Gaussian)):
        return False
    if bias.grid is None:
        return True
    return not bias.start and lengths.queries <= lengths.keys == bias.grid[0] * bias.grid[1]


def _centred_coordinates(bias: Quadratic | Gaussian, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """Coordinates of queries and keys, `(token, axis)`, relative to the centre of the keys."""
    dtype = torch.promote_types(bias.centre.dtype, torch.float32)  # bfloat16 represents integers up to 256 only
    query = torch.arange(lengths.queries, dtype=dtype, device=bias.centre.device) + lengths.offset
    key = torch.arange(lengths.keys, dtype=dtype, device=bias.centre.device)
    middle = (lengths.keys - 1) / 2
    if bias.grid is None:
        return (query - middle)[:, None], (key - middle)[:, None]
    rows, columns = bias.grid
    places = torch.stack((key // columns - (rows - 1) / 2, key % columns - (columns - 1) / 2), -1)
    return places[lengths.offset :], places
