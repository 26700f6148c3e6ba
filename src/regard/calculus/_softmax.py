"""Softmax at every inverse temperature, and the logarithm of its normaliser."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from regard.errors import CalculusError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Beta = float | Tensor


class Levels(NamedTuple):
    """A row measured downwards from its winner: what softmax, its entropy and its normaliser share."""

    visible: Tensor  # which scores take part
    top: Tensor  # the winner's score, its sign flipped if beta < 0; -inf where nothing is visible
    steepness: Tensor  # |beta|, with 0 in place of an infinity (`lost` has taken its part)
    gap: Tensor  # score minus winner, <= 0, always finite
    energy: Tensor  # |beta| * gap, -inf where the weight is zero by definition
    weight: Tensor  # exp(energy): the winner has exactly 1
    total: Tensor  # sum of the weights, at least 1, and 1 in place of 0 where nothing is visible


def levels(scores: Tensor, beta: Beta, dim: int, where: Tensor | None) -> Levels:
    """Shift by the winner before multiplying by beta, so that no finite score can overflow."""
    check_scores(scores)
    beta = beta_tensor(beta, scores)
    visible = scores != -math.inf
    if where is not None:
        visible = visible & where
    # `where(beta < 0, ...)` and not `abs`: the gradient with respect to beta must survive at beta = 0.
    signed = torch.where(beta < 0, -scores, scores)
    steepness = torch.where(beta < 0, -beta, beta)
    shown = torch.where(visible, signed, -math.inf).detach()
    top = shown.amax(dim, keepdim=True) if scores.shape[dim] else shown.sum(dim, keepdim=True) - math.inf
    lowest = torch.finfo(scores.dtype).min
    gap = torch.where(visible & ~top.isinf(), signed - top, 0.0).clamp(min=lowest)
    hard = steepness.isinf() | (top.isinf() & (steepness != 0))
    lost = (shown < top) & hard
    steepness = torch.where(steepness.isinf(), 0.0, steepness)
    energy = (steepness * gap).masked_fill(lost | ~visible, -math.inf)
    weight = energy.exp()
    total = weight.sum(dim, keepdim=True)
    total = torch.where(visible.any(dim, keepdim=True), total, 1.0)
    return Levels(visible, top, steepness, gap, energy, weight, total)


def softmax(
    scores: Float[Tensor, "*batch key"],
    beta: Beta = 1.0,
    dim: int = -1,
    where: Bool[Tensor, "*mask"] | None = None,
) -> Float[Tensor, "*batch key"]:
    """Turn scores into weights that are non-negative and sum to one, at any inverse temperature.

        p_i = exp(beta z_i) / sum_j exp(beta z_j)

    z: `scores`; beta: inverse temperature, a number or a tensor that broadcasts with size 1 on `dim`; the sum
    runs over the visible j. `beta = 0` is exactly uniform, `inf` is hard (ties share equally), a negative
    beta prefers small scores and `-inf` is hard on the smallest.

    Source: Bishop & Bishop, Deep Learning, exercise 12.2 (beta = 1); beta is the inverse temperature of
    statistical mechanics.

    Where we differ: `where` (True means visible) hides scores, and so does a score of -inf at *every* beta,
    0 and negative ones included, because -inf is how a masked score is written. A hidden score never touches
    the result, even if it is NaN. A row with nothing visible gives zeros, with zero gradient. Positivity is a
    statement about real numbers: a float32 weight is exactly 0 once `beta z` is 103.98 below the winner's.

    >>> softmax(torch.tensor([1.0, 2.0, 3.0]))
    tensor([0.0900, 0.2447, 0.6652])
    >>> softmax(torch.tensor([3.0, 1.0, 3.0]), beta=math.inf)
    tensor([0.5000, 0.0000, 0.5000])
    """
    row = levels(scores, beta, dim, where)
    return row.weight / row.total


def logsumexp(
    scores: Float[Tensor, "*batch key"],
    beta: Beta = 1.0,
    dim: int = -1,
    where: Bool[Tensor, "*mask"] | None = None,
) -> Float[Tensor, "*batch"]:
    """Give the logarithm of the softmax normaliser, the one number `merge` needs to join two attentions.

        lse = log sum_j exp(beta z_j)

    Symbols as in `softmax`; beta must be finite. Source: the normaliser in `softmax`.

    Where we differ from `torch.logsumexp`: a row with nothing visible is -inf with zero gradient, not NaN.

    >>> logsumexp(torch.tensor([0.0, 0.0]))
    tensor(0.6931)
    """
    check_finite_beta(beta, "logsumexp")
    row = levels(scores, beta, dim, where)
    empty = ~row.visible.any(dim, keepdim=True)
    base = torch.where(empty, 0.0, row.top) * row.steepness
    return torch.where(empty, -math.inf, base + row.total.log()).squeeze(dim)


def beta_tensor(beta: Beta, scores: Tensor) -> Tensor:
    """Beta as a tensor of the scores' dtype, refused if it is a NaN."""
    if isinstance(beta, Tensor):
        return beta.to(scores)
    if math.isnan(beta):
        raise CalculusError(
            "beta is not a number.",
            asked="beta = nan",
            because="every real beta has a meaning, and so have inf and -inf, but nan has none",
            instead="look where beta was computed; 1/sqrt(dim) is the usual value",
        )
    return torch.full((), beta, dtype=scores.dtype, device=scores.device)


def check_finite_beta(beta: Beta, formula: str) -> None:
    """Refuse an infinite beta where the formula has no limit; a tensor is trusted, to stay traceable."""
    if not isinstance(beta, Tensor) and math.isinf(beta):
        raise CalculusError(
            f"{formula} has no value at infinite beta.",
            asked=f"beta = {beta}",
            because="it diverges, or has no derivative where scores tie",
            instead="a large finite beta; softmax, entropy and entropy_slope accept infinity",
        )


def check_scores(scores: Tensor) -> None:
    """Refuse scores that are not real floating-point numbers with at least one axis."""
    if not scores.is_floating_point() or scores.ndim == 0:
        raise CalculusError(
            "softmax needs an axis of floating-point scores.",
            asked=f"scores of {scores.dtype} with shape {tuple(scores.shape)}",
            because="weights are real numbers between 0 and 1, shared along an axis",
            instead="scores.float(), or scores.double(), with at least one axis",
        )
