"""The derivative of softmax, without the cancellation that hides it in a saturated row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.calculus._softmax import Beta, beta_tensor, check_finite_beta, softmax

if TYPE_CHECKING:
    from jaxtyping import Float


def jacobian(scores: Float[Tensor, "*batch key"], beta: Beta = 1.0) -> Float[Tensor, "*batch key key"]:
    """Build the matrix of derivatives of every softmax weight with respect to every score.

        J_ij = d y_i / d z_j = beta y_i (delta_ij - y_j)

    y: softmax weights; z: `scores` (last axis); beta: finite inverse temperature; delta: 1 on the diagonal. J
    is symmetric, its rows sum to zero, and its spectral norm is at most |beta|/2, reached at y = (1/2, 1/2).
    A saturated softmax is therefore *insensitive*: no change of score moves it, and no gradient passes.

    Source: Prince, Understanding Deep Learning, problem 12.4.

    Where we differ: the diagonal is `beta y_i sum_{j != i} y_j`. The textbook's `diag(y) - y y^T` subtracts
    two equal numbers where a weight is close to one and answers 0 instead of 5.6e-42 in Prince's own example.

    >>> jacobian(torch.tensor([0.0, 0.0]))
    tensor([[ 0.2500, -0.2500],
            [-0.2500,  0.2500]])
    """
    check_finite_beta(beta, "jacobian")
    weight = softmax(scores, beta)
    keys = weight.shape[-1]
    same = torch.eye(keys, dtype=torch.bool, device=weight.device)
    other = torch.where(same, 0.0, weight[..., None, :])
    factor = torch.where(same, other.sum(-1, keepdim=True), -other)
    return _matrix_beta(beta, scores) * (weight[..., :, None] * factor)


def jvp(
    scores: Float[Tensor, "*batch key"], tangent: Float[Tensor, "*batch key"], beta: Beta = 1.0
) -> Float[Tensor, "*batch key"]:
    """Push a change of the scores forward to the change of the weights, in O(keys), building no matrix.

        J t = beta y * (t - <y, t>)

    t: `tangent`; y: softmax weights; <,>: inner product along the last axis; the other symbols as in
    `jacobian`.

    Source: the equation of `jacobian` applied to a vector.

    Where we differ: t is first measured from its entry at the largest weight, which J cannot see (J 1 = 0)
    and which keeps the result accurate where that weight is close to one.

    >>> jvp(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]))
    tensor([ 0.2500, -0.2500])
    """
    check_finite_beta(beta, "jvp")
    weight = softmax(scores, beta)
    weight, tangent = torch.broadcast_tensors(weight, tangent)
    if weight.shape[-1] == 0:
        return weight * tangent
    winner = weight.argmax(-1, keepdim=True)
    offset = torch.where(weight == 0, 0.0, tangent - tangent.gather(-1, winner))
    mean = (weight * offset).sum(-1, keepdim=True)
    return beta_tensor(beta, scores) * (weight * (offset - mean))


def vjp(
    scores: Float[Tensor, "*batch key"], cotangent: Float[Tensor, "*batch key"], beta: Beta = 1.0
) -> Float[Tensor, "*batch key"]:
    """Pull a gradient of the weights back to a gradient of the scores, in O(keys), building no matrix.

        J^T g = J g = beta y * (g - <y, g>)

    g: `cotangent`; the other symbols as in `jvp`, which this equals because J is symmetric.

    Source: as `jvp`. Where we differ: nowhere.

    >>> vjp(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]), beta=2.0)
    tensor([ 0.5000, -0.5000])
    """
    return jvp(scores, cotangent, beta)


def _matrix_beta(beta: Beta, scores: Tensor) -> Tensor:
    """Beta with one more axis when it is a tensor with axes, so that it meets a matrix per row."""
    beta = beta_tensor(beta, scores)
    return beta[..., None] if beta.ndim else beta
