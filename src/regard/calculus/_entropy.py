"""Entropy of attention weights, and its derivative by the inverse temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.calculus._softmax import Beta, levels, read_arguments

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def entropy(
    scores: Float[Tensor, "*batch key"],
    beta: Beta = 1.0,
    dim: int = -1,
    where: Bool[Tensor, "*mask"] | None = None,
) -> Float[Tensor, "*batch"]:
    """The entropy of the weights of a row, in nats; exp(entropy) is the effective number of keys.

        H = -sum_i p_i log p_i = log sum_j exp(beta g_j) - sum_i p_i beta g_i,     g_i = z_i - max_j z_j

    p: softmax weights at inverse temperature beta; z: `scores`; g: difference to the largest score (to the smallest
    when beta < 0). H is log(keys) at beta = 0 and log(number of ties) at beta = inf.

    Source: Shannon, A Mathematical Theory of Communication, section 6; the second form is the free-energy
    identity.

    Where we differ: both terms of the second form are non-negative, and the logarithm is taken by log1p, so
    even an entropy of 1e-40 has full precision. A row with no visible score has entropy 0.

    >>> entropy(torch.tensor([1.0, 1.0, 1.0, -5.0]), beta=float("inf")).exp()
    tensor(3.)
    """
    given = read_arguments("entropy", scores, beta, dim, where)
    row, scores, dim = levels(*given), given.scores, given.dim
    if scores.shape[dim] == 0:
        return row.weight.sum(dim)
    winner = row.energy.argmax(dim, keepdim=True)
    place = torch.arange(scores.shape[dim], device=scores.device)
    place = place.view([-1, *(1 for _ in range(-dim - 1))])
    energy = torch.where(row.weight == 0, 0.0, row.energy)
    # The largest score contributes exp(0) - 1 = 0 to the value, and its share to the gradient.
    excess = torch.where(place == winner, energy.expm1(), row.weight).sum(dim)
    return excess.log1p() - (row.weight / row.total * energy).sum(dim)


def entropy_slope(
    scores: Float[Tensor, "*batch key"],
    beta: Beta = 1.0,
    dim: int = -1,
    where: Bool[Tensor, "*mask"] | None = None,
) -> Float[Tensor, "*batch"]:
    """The derivative of the entropy by the inverse temperature.

        dH/dbeta = -beta Var_p(z),     Var_p(z) = sum_i p_i (z_i - sum_j p_j z_j)^2

    H: `entropy`; p: softmax weights at beta; z: `scores`. The slope is 0 at beta = 0 and in both infinite
    limits; sharpening (beta away from 0) never raises the entropy.

    Source: H = log Z - beta E_p[z] and d(log Z)/dbeta = E_p[z], dE_p[z]/dbeta = Var_p(z): the heat capacity
    of statistical mechanics. Where we differ: nowhere.

    >>> entropy_slope(torch.tensor([0.0, 2.0]), beta=0.0)
    tensor(-0.)
    """
    given = read_arguments("entropy_slope", scores, beta, dim, where)
    row, dim = levels(*given), given.dim
    share = row.weight / row.total
    gap = torch.where(row.weight == 0, 0.0, row.gap)
    mean = (share * gap).sum(dim, keepdim=True)
    variance = (share * (gap - mean).square()).sum(dim, keepdim=True)
    slope = torch.where(given.beta.isinf(), 0.0, -given.beta) * variance
    return slope.squeeze(dim)
