"""What happens to attention when one key moves: exactly, and without attending again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from regard.calculus._softmax import check_finite_beta, softmax
from regard.errors import CalculusError

if TYPE_CHECKING:
    from jaxtyping import Float


class Perturbed(NamedTuple):
    """Attention after one key moved.

    `weight (*batch, query)` is the moved key's new weight, `output (*batch, query, value_dim)` the new
    output, and `factor (*batch, query)` the one number by which the weights of all other keys were
    multiplied.
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

    a: `weight` of the moved key for each query; s: `score_change`, see the function of that name; A_i: any
    other key's weight; h: `output`; v: the moved key's value. The law holds for changes of any size. The
    output moves on the straight segment between v and what the query sees without the key; |a' - a| <= |s| /
    4.

    Source: a change of one score multiplies the odds a / (1 - a) by e^s and leaves all other ratios alone.

    Where we differ: neither logit nor 1 / (1 - a) is formed. With d = 1 - a + a e^s,

        a' = a e^s / d,     (1 - a') / (1 - a) = 1 / d,     (a' - a) / (1 - a) = a (e^s - 1) / d

    which stays finite for weights 0 and 1 and for s = inf or -inf; s = -inf removes the key. A weight of
    exactly 1 is an only key: the output does not change (and is zero if the key is removed). A weight of
    exactly 0 stays 0. Rounding in h counts 1 / d times, so a key that gave up nearly all the weight leaves
    fewer digits. Pass `rest`, the other keys' weight 1 - a, where it is known more exactly than the
    subtraction gives it.

    >>> weight, output, factor = perturb_key(
    ...     torch.tensor([0.5]), torch.tensor([[1.0]]), torch.tensor([2.0]), torch.tensor([1.0])
    ... )
    >>> weight, output
    (tensor([0.7311]), tensor([[1.4621]]))
    """
    rest = 1 - weight if rest is None else rest
    moved, step, factor, gone = _odds(weight, score_change, rest)
    result = output + step[..., None] * (value[..., None, :] - output)
    return Perturbed(moved, torch.where(gone[..., None], 0.0, result), factor)


def perturb_key_first_order(
    weight: Float[Tensor, "*batch query"],
    output: Float[Tensor, "*batch query value_dim"],
    value: Float[Tensor, "*batch value_dim"],
    score_change: Float[Tensor, "*batch query"],
) -> Perturbed:
    """Approximate `perturb_key` by its tangent, to see how far a linear argument carries.

        a' = a + a (1 - a) s,     A_i' = A_i (1 - a s),     h' = h + a s (v - h)

    Symbols as in `perturb_key`. The error is O(s^2): halving s divides it by four.

    Source: the Taylor expansion of the sigmoid in `perturb_key`. Where we differ: nowhere.

    >>> half, one, two = torch.tensor([0.5]), torch.ones(1), torch.tensor([2.0])
    >>> perturb_key_first_order(half, torch.ones(1, 1), two, one).output
    tensor([[1.5000]])
    """
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
    """Say by how much every query's score of one key changes when the key is shifted or stretched.

        s = beta e . q  for k -> k + e,     s = beta (c - 1) k . q  for k -> c k

    q: `query`; k: the one `key`; e: `shift`; c: `stretch`; beta: inverse temperature, `1/sqrt(dim)` unless
    given. A stretched key gains weight where k . q > 0, loses it where k . q < 0, and keeps it where they are
    orthogonal.

    Source: the score beta k . q is linear in k. Where we differ: nowhere.

    >>> score_change(torch.tensor([[1.0, 2.0]]), torch.tensor([1.0, 0.0]), stretch=3.0, beta=1.0)
    tensor([2.])
    """
    beta = 1 / math.sqrt(query.shape[-1]) if beta is None else beta
    if shift is not None and stretch is None:
        direction = shift
    elif stretch is not None and shift is None:
        direction = key * (stretch - 1)
    else:
        raise CalculusError(
            "A key is moved in one way at a time.",
            asked="neither shift nor stretch" if shift is None else "shift and stretch together",
            because="shift adds a vector to the key and stretch multiplies it; the order would matter",
            instead="exactly one of shift=vector and stretch=number",
        )
    return beta * (query @ direction[..., :, None]).squeeze(-1)


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
    """Attend once with the old keys, then give the weights and output with key `index` shifted or stretched.

        A = softmax(beta q k^T);     A' by the law of `perturb_key` with s = `score_change`;     h' = A' v

    Symbols as in those two functions. Source: as `perturb_key`.

    Where we differ: having all weights at hand, it sums 1 - a from the other keys' and takes h' from the new
    weights, so no digit is lost, whatever the old weight. Beta must be finite.

    >>> q, k, v = torch.tensor([[1.0]]), torch.tensor([[0.0], [0.0]]), torch.tensor([[1.0], [3.0]])
    >>> perturb_attention(q, k, v, 0, shift=torch.tensor([1.0]))
    (tensor([[0.7311, 0.2689]]), tensor([[1.5379]]))
    """
    keys = key.shape[-2]
    if not -keys <= index < keys:
        raise CalculusError(
            "There is no such key to move.",
            asked=f"index = {index}",
            found=f"{keys} keys",
            because="an index names one of the keys, from either end",
            instead=f"an index from {-keys} to {keys - 1}",
        )
    beta = 1 / math.sqrt(query.shape[-1]) if beta is None else beta
    check_finite_beta(beta, "perturb_attention")
    change = score_change(query, key[..., index, :], shift=shift, stretch=stretch, beta=beta)
    weights = softmax(query @ key.mT, beta)
    chosen = torch.arange(keys, device=key.device) == index % keys
    rest = torch.where(chosen, 0.0, weights).sum(-1)
    moved, _, factor, _ = _odds(weights[..., index], change, rest)
    new_weights = torch.where(chosen, moved[..., None], weights * factor[..., None])
    return new_weights, new_weights @ value


def _odds(weight: Tensor, change: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
