"""The derivative of softmax, accurate in saturated rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.calculus._arguments import check_axes, read_tensor
from regard.calculus._softmax import Beta, check_finite_beta, read_arguments, softmax

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
    two equal numbers where a weight is close to one and gives 0 instead of 5.6e-42 in Prince's own example.

    >>> jacobian(torch.tensor([0.0, 0.0]))
    tensor([[ 0.2500, -0.2500],
            [-0.2500,  0.2500]])
    """
    check_finite_beta(beta, "jacobian")
    scores, temperature, *_ = read_arguments("jacobian", scores, beta)
    weight = softmax(scores, temperature)
    keys = weight.shape[-1]
    same = torch.eye(keys, dtype=torch.bool, device=weight.device)
    other = torch.where(same, 0.0, weight[..., None, :])
    factor = torch.where(same, other.sum(-1, keepdim=True), -other)
    temperature = temperature[..., None] if temperature.ndim else temperature  # broadcast against one matrix per row
    return temperature * (weight[..., :, None] * factor)


def jvp(
    scores: Float[Tensor, "*batch key"], tangent: Float[Tensor, "*batch key"], beta: Beta = 1.0
) -> Float[Tensor, "*batch key"]:
    """Jacobian-vector product: the change of the weights for a change of the scores, in O(keys).

        J t = beta y * (t - <y, t>)

    t: `tangent`; y: softmax weights; <,>: inner product along the last axis; the other symbols as in
    `jacobian`.

    Source: the equation of `jacobian` applied to a vector.

    Where we differ: the entry of t at the largest weight is subtracted from t first. That does not change J t
    (J 1 = 0) and keeps the result accurate where that weight is close to one.

    >>> jvp(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]))
    tensor([ 0.2500, -0.2500])
    """
    return _multiply_by_jacobian("jvp", scores, "tangent", tangent, beta)


def _multiply_by_jacobian(function: str, scores: Any, name: str, tangent: Any, beta: Any) -> Tensor:
    check_finite_beta(beta, function)
    scores, temperature, *_ = read_arguments(function, scores, beta)
    tangent = read_tensor(function, name, tangent, scores)
    check_axes(function, scores=(scores, ""), **{name: (tangent, "")})
    weight = softmax(scores, temperature)
    weight, tangent = torch.broadcast_tensors(weight, tangent)
    if weight.shape[-1] == 0:
        return weight * tangent
    winner = weight.argmax(-1, keepdim=True)
    offset = torch.where(weight == 0, 0.0, tangent - tangent.gather(-1, winner))
    mean = (weight * offset).sum(-1, keepdim=True)
    return temperature * (weight * (offset - mean))


def vjp(
    scores: Float[Tensor, "*batch key"], cotangent: Float[Tensor, "*batch key"], beta: Beta = 1.0
) -> Float[Tensor, "*batch key"]:
    """Vector-Jacobian product: the grad of the scores for a grad of the weights, in O(keys).

        J^T g = J g = beta y * (g - <y, g>)

    g: `cotangent`; the other symbols as in `jvp`, which this equals because J is symmetric.

    Source: as `jvp`. Where we differ: nowhere.

    >>> vjp(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]), beta=2.0)
    tensor([ 0.5000, -0.5000])
    """
    return _multiply_by_jacobian("vjp", scores, "cotangent", cotangent, beta)
