"""Joining attentions over disjoint keys, by one number per query: the log-sum-exp of its scores."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


class Merged(NamedTuple):
    """An attention's `output (*batch, query, value_dim)` and its `lse (*batch, query)`."""

    output: Tensor
    lse: Tensor


def merge(
    output_a: Float[Tensor, "*batch query value_dim"],
    lse_a: Float[Tensor, "*batch query"],
    output_b: Float[Tensor, "*batch query value_dim"],
    lse_b: Float[Tensor, "*batch query"],
) -> Merged:
    """Join the attentions of the same queries over two disjoint sets of keys into the attention over both.

        h = (e^{l_a} h_a + e^{l_b} h_b) / (e^{l_a} + e^{l_b}),     l = log(e^{l_a} + e^{l_b})

    h: outputs; l: log-sum-exp of the scores each output was made from, beta included. Merging is commutative
    and associative, so chunks may be joined in any order.

    Source: Milakov & Gimelshein, Online normalizer calculation for softmax (2018).

    Where we differ: a part with no keys has `lse = -inf`; its output is ignored, even if it is NaN, and two
    empty parts give zeros and -inf, with zero gradient. `lse` must be below +inf.

    >>> output, lse = merge(torch.tensor([[2.0]]), torch.zeros(1), torch.tensor([[4.0]]), torch.zeros(1))
    >>> output, lse
    (tensor([[3.]]), tensor([0.6931]))
    """
    top = torch.maximum(lse_a, lse_b).detach()
    top = torch.where(top == -math.inf, 0.0, top)
    mass_a, mass_b = (lse_a - top).exp(), (lse_b - top).exp()
    total = mass_a + mass_b
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    output = _weighed(mass_a / total, output_a) + _weighed(mass_b / total, output_b)
    return Merged(output, torch.where(empty, -math.inf, top + total.log()))


def append_key(
    output: Float[Tensor, "*batch query value_dim"],
    lse: Float[Tensor, "*batch query"],
    score: Float[Tensor, "*batch query"],
    value: Float[Tensor, "*batch value_dim"],
) -> Merged:
    """Let every query of an unmasked attention see one more key, without visiting the old ones.

        h' = (e^l h + e^s v) / (e^l + e^s),     l' = log(e^l + e^s)

    h, l: output and log-sum-exp so far; s: the new key's score for each query, beta and bias included (-inf
    for a query that may not see it); v: its value. The cost is O(queries * value_dim), whatever the number of
    keys.

    Source: as `merge`, with one part a single key. Where we differ: an attention may start empty (`lse =
    -inf`).

    >>> append_key(torch.zeros(1, 1), torch.tensor([-torch.inf]), torch.zeros(1), torch.tensor([5.0])).output
    tensor([[5.]])
    """
    return merge(output, lse, value[..., None, :].expand_as(output), score)


def remove_key(
    output: Float[Tensor, "*batch query value_dim"],
    lse: Float[Tensor, "*batch query"],
    score: Float[Tensor, "*batch query"],
    value: Float[Tensor, "*batch value_dim"],
) -> Merged:
    """Take one key out of an attention again: the inverse of `append_key`.

        h' = h + a / (1 - a) (h - v),     l' = l + log(1 - a),     a = e^{s - l}

    a: the weight the key had; the other symbols as in `append_key`.

    Source: the equations of `append_key`, solved for h and l.

    Where we differ: removal cannot restore what rounding took. What is left, 1 - a, is known to one part in
    (1 - a) / (eps max(1, |l|)); the result's relative error is the inverse of that. Where not one digit would
    be right, the key counts as the only one, and removing it leaves nothing: zeros and -inf.

    >>> output, lse = append_key(torch.tensor([[2.0]]), torch.zeros(1), torch.zeros(1), torch.tensor([4.0]))
    >>> remove_key(output, lse, torch.zeros(1), torch.tensor([4.0])).output
    tensor([[2.]])
    """
    drop = torch.where(score == -math.inf, -math.inf, score - lse)
    left = -drop.expm1()
    only = ~(left > torch.finfo(left.dtype).eps * lse.abs().clamp(min=1.0))
    left = torch.where(only, 1.0, left)
    ratio = torch.where(only, 0.0, drop.clamp(max=0.0).exp() / left)
    rest = output + _weighed(ratio, output - value[..., None, :])
    rest = torch.where(only[..., None], 0.0, rest)
    return Merged(rest, torch.where(only, -math.inf, lse + left.log()))


def _weighed(mass: Tensor, output: Tensor) -> Tensor:
    """`mass * output` where a mass of zero wins over anything, NaN and infinity included."""
    mass = mass[..., None]
    return mass * torch.where(mass == 0, 0.0, output)
