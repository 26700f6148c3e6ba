"""Attention as a fully connected layer, hard attention with a gradient, and keys that may be skipped."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.calculus._arguments import read_number, read_shaped, read_whole_number
from regard.calculus._softmax import Beta, check_finite_beta, read_arguments, softmax
from regard.errors import CalculusError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def connected_weight(
    weights: Float[Tensor, "*batch query key"], value_dim: int
) -> Float[Tensor, "*batch query*value_dim key*value_dim"]:
    """The matrix of the fully connected layer that attention with these weights is.

        vec(H) = (A (x) I_t) vec(V),     H = A V

    A: `weights`, row layout; (x): Kronecker product; t: `value_dim`; vec: rows one after the other, `flatten()`. In the
    column layout A^T takes the place of A, and vec stacks columns. Hard attention makes it a selection (one 1 in
    each row), beta = 0 a constant 1 / keys in each block.

    Source: vec(A V I) = (A (x) I) vec(V), the identity of Kronecker products.

    Where we differ: nowhere. The matrix has `queries * keys * value_dim^2` entries, nearly all zero: it is for study.

    >>> connected_weight(torch.tensor([[0.25, 0.75]]), 2)
    tensor([[0.2500, 0.0000, 0.7500, 0.0000],
            [0.0000, 0.2500, 0.0000, 0.7500]])
    """
    (weights,) = read_shaped("connected_weight", weights=(weights, "query key"))
    value_dim = read_whole_number("connected_weight", "value_dim", value_dim, least=1)
    same = torch.eye(value_dim, dtype=weights.dtype, device=weights.device)
    spread = weights[..., :, None, :, None] * same[:, None, :]
    return spread.flatten(-2).flatten(-3, -2)


def straight_through(scores: Float[Tensor, "*batch key"], beta: Beta = 1.0) -> Float[Tensor, "*batch key"]:
    """Hard attention weights, with the gradient of the soft ones at inverse temperature `beta`.

        forward    p = softmax(inf z)        backward    dp = J(beta z) beta dz

    z: `scores`; J: the Jacobian of softmax. Hard weights have gradient zero almost everywhere: nothing is learned
    through them; this estimator is biased and learns.

    Source: Bengio, Leonard and Courville, Estimating or Propagating Gradients Through Stochastic Neurons (2013).

    Where we differ: ties share the weight equally, as everywhere here.

    >>> scores = torch.tensor([0.0, 1.0], requires_grad=True)
    >>> hard = straight_through(scores)
    >>> hard.tolist(), torch.autograd.grad(hard[1], scores)[0]
    ([0.0, 1.0], tensor([-0.1966,  0.1966]))
    """
    check_finite_beta(beta, "straight_through")
    soft = softmax(scores, beta)
    return soft - soft.detach() + softmax(scores, math.inf).detach()  # in this order exact: 0 + hard


def skip_keys(scores: Float[Tensor, "*batch key"], tolerance: float, beta: float = 1.0) -> Bool[Tensor, "*batch key"]:
    """The keys that softmax may not skip: all others together have at most `tolerance` of the weight.

        visible where  beta (max_j z_j - z_i) <= ln(m / tolerance)

    z: `scores`; m: number of keys. A skipped key has weight at most tolerance / m, so the skipped weight is at most
    `tolerance`, and an output over the visible keys alone, normalised again, moves by at most tolerance * diam(V), with
    diam(V) the largest distance of two values. Pass the mask as `where=` of `softmax` or `mask=` of `attend`.

    Source: e^{-beta gap} <= tolerance / m. The output is a mixture of those of visible and skipped keys.

    Where we differ: nowhere. At `beta = 0` nothing may be skipped.

    >>> skip_keys(torch.tensor([0.0, -5.0, -20.0]), tolerance=1e-3)
    tensor([ True,  True, False])
    """
    check_finite_beta(beta, "skip_keys")
    if not 0 < read_number("skip_keys", "tolerance", tolerance) < 1 or beta < 0:
        raise CalculusError(
            "No keys can be skipped with that.",
            asked=f"tolerance = {tolerance}, beta = {beta}",
            because="every key has a positive weight; a tolerance is a share between 0 and 1, and beta is not negative",
            instead="tolerance=1e-6",
        )
    scores, steepness, dim, _ = read_arguments("skip_keys", scores, beta)
    if not scores.shape[dim]:
        return torch.zeros_like(scores, dtype=torch.bool)
    gap = scores.amax(dim, keepdim=True) - scores
    return (steepness * gap <= math.log(scores.shape[dim] / tolerance)) & (scores != -math.inf)
