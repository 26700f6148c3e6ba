"""Softmax at every inverse temperature, and the logarithm of its normaliser."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.calculus._arguments import check_axes, read_axis, read_mask, read_number, read_tensor
from regard.errors import CalculusError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

Beta = float | Tensor


class Levels(NamedTuple):
    """A row of scores relative to its maximum: intermediate results of softmax, entropy and logsumexp."""

    visible: Tensor  # which scores are visible
    top: Tensor  # the largest score, its sign flipped if beta < 0; -inf where nothing is visible
    steepness: Tensor  # |beta|, with 0 in place of an infinity (`not_best` has taken its part)
    gap: Tensor  # score minus the largest, <= 0, always finite
    energy: Tensor  # |beta| * gap, -inf where the weight is zero by definition
    weight: Tensor  # exp(energy): exactly 1 for the largest score
    total: Tensor  # sum of the weights, at least 1, and 1 in place of 0 where nothing is visible


class Arguments(NamedTuple):
    """The validated arguments of softmax, entropy and logsumexp."""

    scores: Tensor
    beta: Tensor
    dim: int  # counted from the end
    where: Tensor | None


def read_arguments(function: str, scores: Any, beta: Any, dim: Any = -1, where: Any = None) -> Arguments:
    scores = read_tensor(function, "scores", scores)
    if scores.ndim == 0:
        raise CalculusError(
            f"{function} needs an axis of scores.",
            asked=f"scores with shape {tuple(scores.shape)}",
            because="weights are shared along an axis",
            instead="scores=torch.tensor([0.5, 1.0, 2.0])",
        )
    dim = read_axis(function, dim, scores)
    mask = None if where is None else read_mask(function, "where", where, scores)
    return Arguments(scores, read_beta(function, beta, scores, dim), dim, mask)


def levels(scores: Tensor, beta: Tensor, dim: int, where: Tensor | None) -> Levels:
    """Subtract the maximum before multiplying by beta, so that no finite score overflows."""
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
    not_best = (shown < top) & hard
    steepness = torch.where(steepness.isinf(), 0.0, steepness)
    energy = (steepness * gap).masked_fill(not_best | ~visible, -math.inf)
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
    0 and negative ones included, because -inf is how a masked score is written. A masked score never affects
    the result, even if it is NaN. A row with nothing visible gives zeros, with zero gradient. In floating point
    weights may underflow: a float32 weight is exactly 0 once `beta z` is 103.98 below the largest.

    >>> softmax(torch.tensor([1.0, 2.0, 3.0]))
    tensor([0.0900, 0.2447, 0.6652])
    >>> softmax(torch.tensor([3.0, 1.0, 3.0]), beta=math.inf)
    tensor([0.5000, 0.0000, 0.5000])
    """
    row = levels(*read_arguments("softmax", scores, beta, dim, where))
    return row.weight / row.total


def logsumexp(
    scores: Float[Tensor, "*batch key"],
    beta: Beta = 1.0,
    dim: int = -1,
    where: Bool[Tensor, "*mask"] | None = None,
) -> Float[Tensor, "*batch"]:
    """The logarithm of the softmax normaliser, which `merge` uses to combine two attentions.

        lse = log sum_j exp(beta z_j)

    Symbols as in `softmax`; beta must be finite. Source: the normaliser in `softmax`.

    Where we differ from `torch.logsumexp`: a row with nothing visible is -inf with zero gradient, not NaN.

    >>> logsumexp(torch.tensor([0.0, 0.0]))
    tensor(0.6931)
    """
    check_finite_beta(beta, "logsumexp")
    given = read_arguments("logsumexp", scores, beta, dim, where)
    row, dim = levels(*given), given.dim
    empty = ~row.visible.any(dim, keepdim=True)
    base = torch.where(empty, 0.0, row.top) * row.steepness
    return torch.where(empty, -math.inf, base + row.total.log()).squeeze(dim)


def read_beta(function: str, beta: Any, scores: Tensor, dim: int = -1) -> Tensor:
    """Beta as a tensor of the scores' dtype: a number, or a tensor with size 1 on the axis of the keys."""
    if isinstance(beta, Tensor | list | tuple) or hasattr(beta, "__array__"):
        given: Any = beta.to(scores) if isinstance(beta, Tensor) and _is_whole(beta) else beta
        found = read_tensor(function, "beta", given, scores).to(scores)
        if found.ndim >= -dim and found.shape[dim] != 1:
            raise CalculusError(
                f"{function} has one beta for all scores of a row.",
                asked=f"beta {tuple(found.shape)} for scores {tuple(scores.shape)}",
                because="beta is the temperature of a row, and its scores lie along one axis",
                instead="a number, or a tensor with size 1 on that axis: beta[..., None]",
            )
        check_axes(function, scores=(scores, ""), beta=(found, ""))
        return found
    if isinstance(beta, float) and math.isnan(beta):
        raise CalculusError(
            "beta is not a number.",
            asked="beta = nan",
            because="every real beta has a meaning, and so have inf and -inf, but nan has none",
            instead="check where beta is computed; 1/sqrt(dim) is the usual value",
        )
    return torch.full((), read_number(function, "beta", beta), dtype=scores.dtype, device=scores.device)


def _is_whole(beta: Tensor) -> bool:
    """True for an integer tensor, which is accepted and converted."""
    return not beta.is_floating_point() and not beta.is_complex() and beta.dtype != torch.bool


def check_finite_beta(beta: Beta, formula: str) -> None:
    """Raise for an infinite beta where the formula has no limit; tensors are not checked, to stay traceable."""
    if isinstance(beta, float) and math.isinf(beta):
        raise CalculusError(
            f"{formula} has no value at infinite beta.",
            asked=f"beta = {beta}",
            because="it diverges, or has no derivative where scores tie",
            instead="a large finite beta; softmax, entropy and entropy_slope accept infinity",
        )
