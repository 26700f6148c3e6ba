"""The exact change of attention when one key changes, without recomputing it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.calculus._arguments import (
    check_axes,
    check_dtypes,
    read_number,
    read_shaped,
    read_tensor,
    read_whole_number,
)
from regard.calculus._softmax import check_finite_beta, softmax
from regard.errors import CalculusError

if TYPE_CHECKING:
    from jaxtyping import Float


class Perturbed(NamedTuple):
    """Attention after one key changed.

    `weight (*batch, query)` is the changed key's new weight, `output (*batch, query, value_dim)` the new
    output, and `factor (*batch, query)` the factor by which the weights of all other keys were multiplied.
    """

    weight: Tensor
    output: Tensor
    factor: Tensor


def perturb_key(
    weight: Float[Tensor, "*batch query"],
    output: Float[Tensor, "*batch query value_dim"],
    value: Float[Tensor, "*batch value_dim"],
    score_change: Float[Tensor, "*batch query"],
    *,
    rest: Float[Tensor, "*batch query"] | None = None,
) -> Perturbed:
    """Update attention for one key whose score changed, exactly and in O(queries * value_dim).

        a' = sigmoid(logit a + s),     A_i' = A_i (1 - a') / (1 - a),     h' = h + (a' - a) / (1 - a) (v - h)

    a: `weight` of the changed key for each query; s: `score_change`, see the function of that name; A_i: any
    other key's weight; h: `output`; v: the changed key's value. This is exact for changes of any size. The
    output moves on the line segment between v and the output without the key; |a' - a| <= |s| / 4.

    Source: a change of one score multiplies the odds a / (1 - a) by e^s and leaves all other ratios unchanged.

    Where we differ: neither logit nor 1 / (1 - a) is formed. With d = 1 - a + a e^s,

        a' = a e^s / d,     (1 - a') / (1 - a) = 1 / d,     (a' - a) / (1 - a) = a (e^s - 1) / d

    which stays finite for weights 0 and 1 and for s = inf or -inf; s = -inf removes the key. A weight of
    exactly 1 is an only key: the output does not change (and is zero if the key is removed). A weight of
    exactly 0 stays 0. Rounding in h is multiplied by 1 / d, so precision is lost when the key had nearly all the
    weight and loses it. Pass `rest`, the other keys' weight 1 - a, where it is known more accurately than by
    subtraction.

    >>> weight, output, factor = perturb_key(
    ...     torch.tensor([0.5]), torch.tensor([[1.0]]), torch.tensor([2.0]), torch.tensor([1.0])
    ... )
    >>> weight, output
    (tensor([0.7311]), tensor([[1.4621]]))
    """
    weight, output, value, score_change = _read_arguments("perturb_key", weight, output, value, score_change)
    rest = 1 - weight if rest is None else read_tensor("perturb_key", "rest", rest, weight)
    check_axes("perturb_key", weight=(weight, "query"), rest=(rest, "query"))
    moved, step, factor, gone = _update_odds(weight, score_change, rest)
    result = output + step[..., None] * (value[..., None, :] - output)
    return Perturbed(moved, torch.where(gone[..., None], 0.0, result), factor)


def perturb_key_first_order(
    weight: Float[Tensor, "*batch query"],
    output: Float[Tensor, "*batch query value_dim"],
    value: Float[Tensor, "*batch value_dim"],
    score_change: Float[Tensor, "*batch query"],
) -> Perturbed:
    """First-order approximation of `perturb_key`.

        a' = a + a (1 - a) s,     A_i' = A_i (1 - a s),     h' = h + a s (v - h)

    Symbols as in `perturb_key`. The error is O(s^2): halving s divides it by four.

    Source: the Taylor expansion of the sigmoid in `perturb_key`. Where we differ: nowhere.

    >>> half, one, two = torch.tensor([0.5]), torch.ones(1), torch.tensor([2.0])
    >>> perturb_key_first_order(half, torch.ones(1, 1), two, one).output
    tensor([[1.5000]])
    """
    weight, output, value, score_change = _read_arguments(
        "perturb_key_first_order", weight, output, value, score_change
    )
    pull = weight * score_change
    result = output + pull[..., None] * (value[..., None, :] - output)
    return Perturbed(weight + (1 - weight) * pull, result, 1 - pull)


def score_change(
    query: Float[Tensor, "*batch query dim"],
    key: Float[Tensor, "*batch dim"],
    *,
    shift: Float[Tensor, "*batch dim"] | None = None,
    stretch: float | None = None,
    beta: float | None = None,
) -> Float[Tensor, "*batch query"]:
    """The change of every query's score of one key when the key is shifted or scaled.

        s = beta e . q  for k -> k + e,     s = beta (c - 1) k . q  for k -> c k

    q: `query`; k: the one `key`; e: `shift`; c: `stretch`; beta: inverse temperature, `1/sqrt(dim)` unless
    given. A stretched key gains weight where k . q > 0, loses it where k . q < 0, and keeps it where they are
    orthogonal.

    Source: the score beta k . q is linear in k. Where we differ: nowhere.

    >>> score_change(torch.tensor([[1.0, 2.0]]), torch.tensor([1.0, 0.0]), stretch=3.0, beta=1.0)
    tensor([2.])
    """
    query, key = read_shaped("score_change", query=(query, "query dim"), key=(key, "dim"))
    check_dtypes("score_change", query=query, key=key)
    temperature = _read_beta("score_change", beta, query)
    if shift is not None and stretch is None:
        direction = read_tensor("score_change", "shift", shift, query)
        check_axes("score_change", query=(query, "query dim"), shift=(direction, "dim"))
        check_dtypes("score_change", query=query, shift=direction)
    elif stretch is not None and shift is None:
        direction = key * (_read_factor("score_change", "stretch", stretch) - 1)
    else:
        raise CalculusError(
            "A key is either shifted or stretched.",
            asked="neither shift nor stretch" if shift is None else "shift and stretch together",
            because="shift adds a vector to the key and stretch multiplies it; the order would matter",
            instead="exactly one of shift=vector and stretch=number",
        )
    return temperature * (query @ direction[..., :, None]).squeeze(-1)


def perturb_attention(
    query: Float[Tensor, "*batch query dim"],
    key: Float[Tensor, "*batch key dim"],
    value: Float[Tensor, "*batch key value_dim"],
    index: int,
    *,
    shift: Float[Tensor, "*batch dim"] | None = None,
    stretch: float | None = None,
    beta: float | None = None,
) -> tuple[Float[Tensor, "*batch query key"], Float[Tensor, "*batch query value_dim"]]:
    """Attend once with the old keys, then return the weights and output with key `index` shifted or scaled.

        A = softmax(beta q k^T);     A' by the formula of `perturb_key` with s = `score_change`;     h' = A' v

    Symbols as in those two functions. Source: as `perturb_key`.

    Where we differ: all weights are known, so 1 - a is the sum of the other keys' weights and h' is computed from
    the new weights; no precision is lost, whatever the old weight. Beta must be finite.

    >>> q, k, v = torch.tensor([[1.0]]), torch.tensor([[0.0], [0.0]]), torch.tensor([[1.0], [3.0]])
    >>> perturb_attention(q, k, v, 0, shift=torch.tensor([1.0]))
    (tensor([[0.7311, 0.2689]]), tensor([[1.5379]]))
    """
    query, key, value = read_shaped(
        "perturb_attention", query=(query, "query dim"), key=(key, "key dim"), value=(value, "key value_dim")
    )
    check_dtypes("perturb_attention", query=query, key=key, value=value)
    keys = key.shape[-2]
    index = read_whole_number("perturb_attention", "index", index)
    if not -keys <= index < keys:
        raise CalculusError(
            "There is no such key to move.",
            asked=f"index = {index}",
            found=f"{keys} keys",
            because="an index names one of the keys, from either end",
            instead=f"an index from {-keys} to {keys - 1}",
        )
    temperature = _read_beta("perturb_attention", beta, query)
    check_finite_beta(temperature, "perturb_attention")
    change = score_change(query, key[..., index, :], shift=shift, stretch=stretch, beta=temperature)
    weights = softmax(query @ key.mT, temperature)
    chosen = torch.arange(keys, device=key.device) == index % keys
    rest = torch.where(chosen, 0.0, weights).sum(-1)
    moved, _, factor, _ = _update_odds(weights[..., index], change, rest)
    new_weights = torch.where(chosen, moved[..., None], weights * factor[..., None])
    return new_weights, new_weights @ value


def _read_arguments(function: str, weight: Tensor, output: Tensor, value: Tensor, score_change: Tensor) -> list[Tensor]:
    axes = {"weight": (weight, "query"), "output": (output, "query value_dim"), "value": (value, "value_dim")}
    return read_shaped(function, **axes, score_change=(score_change, "query"))


def _read_beta(function: str, beta: Any, query: Tensor) -> Any:
    """The inverse temperature, a number or a tensor of one; `1/sqrt(dim)` unless given."""
    if beta is None:
        return 1 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    return _read_factor(function, "beta", beta)


def _read_factor(function: str, name: str, value: Any) -> Any:
    """A number, or a tensor of floating-point numbers, which keeps its gradient."""
    return read_tensor(function, name, value) if isinstance(value, Tensor) else read_number(function, name, value)


def _update_odds(weight: Tensor, change: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New weight, step of the output towards the value, factor of the other weights, emptiness."""
    raised = change > 0
    # Not `abs`: at s = 0 its gradient would be 0.
    size = torch.where(raised, change, -change)
    decay, loss = (-size).exp(), -(-size).expm1()
    # Both denominators are d, the first divided by e^s; neither subtracts numbers that may be close.
    up = weight + rest * decay
    down = torch.where(weight > 0.5, rest + weight * decay, 1 - weight * loss)
    denominator = torch.where(raised, up, down)
    nothing = denominator == 0
    denominator = torch.where(nothing, 1.0, denominator)
    only, removed = rest == 0, change == -math.inf
    moved = weight * torch.where(raised, 1.0, decay) / denominator
    moved = torch.where(only & ~removed, weight, moved)
    factor = torch.where(nothing, 1.0, torch.where(raised, decay, 1.0) / denominator)
    step = torch.where(only, 0.0, weight * torch.where(raised, loss, -loss) / denominator)
    return moved, step, factor, only & removed
