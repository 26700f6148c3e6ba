"""Merging attentions over disjoint keys by the log-sum-exp of their scores, as in FlashAttention and online softmax."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from regard.calculus._arguments import read_shaped

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
    """Merge the attentions of the same queries over two disjoint sets of keys into the attention over both.

        h = (e^{l_a} h_a + e^{l_b} h_b) / (e^{l_a} + e^{l_b}),     l = log(e^{l_a} + e^{l_b})

    h: outputs; l: log-sum-exp of the scores of each output, beta included. Merging is commutative and
    associative, so chunks may be merged in any order.

    Source: Milakov & Gimelshein, Online normalizer calculation for softmax (2018).

    Where we differ: a part with no keys has `lse = -inf`; its output is ignored, even if it is NaN, and two
    empty parts give zeros and -inf, with zero gradient. `lse` must be below +inf.

    >>> output, lse = merge(torch.tensor([[2.0]]), torch.zeros(1), torch.tensor([[4.0]]), torch.zeros(1))
    >>> output, lse
    (tensor([[3.]]), tensor([0.6931]))
    """
    parts = read_shaped(
        "merge",
        output_a=(output_a, "query value_dim"),
        lse_a=(lse_a, "query"),
        output_b=(output_b, "query value_dim"),
        lse_b=(lse_b, "query"),
    )
    return _merge(*parts)


def _merge(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> Merged:
    top = torch.maximum(lse_a, lse_b).detach()
    top = torch.where(top == -math.inf, 0.0, top)
    mass_a, mass_b = (lse_a - top).exp(), (lse_b - top).exp()
    total = mass_a + mass_b
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    output = _weight_output(mass_a / total, output_a) + _weight_output(mass_b / total, output_b)
    return Merged(output, torch.where(empty, -math.inf, top + total.log()))


def append_key(
    output: Float[Tensor, "*batch query value_dim"],
    lse: Float[Tensor, "*batch query"],
    score: Float[Tensor, "*batch query"],
    value: Float[Tensor, "*batch value_dim"],
) -> Merged:
    """Append one key to an unmasked attention, without visiting the old ones.

        h' = (e^l h + e^s v) / (e^l + e^s),     l' = log(e^l + e^s)

    h, l: output and log-sum-exp so far; s: the new key's score for each query, beta and bias included (-inf
    for a query that does not attend to it); v: its value. The cost is O(queries * value_dim), independent of the
    number of keys.

    Source: as `merge`, with one part a single key. Where we differ: an attention may start empty (`lse =
    -inf`).

    >>> append_key(torch.zeros(1, 1), torch.tensor([-torch.inf]), torch.zeros(1), torch.tensor([5.0])).output
    tensor([[5.]])
    """
    output, lse, score, value = _read_key("append_key", output, lse, score, value)
    return _merge(output, lse, value[..., None, :], score)


def remove_key(
    output: Float[Tensor, "*batch query value_dim"],
    lse: Float[Tensor, "*batch query"],
    score: Float[Tensor, "*batch query"],
    value: Float[Tensor, "*batch value_dim"],
) -> Merged:
    """Remove one key from an attention: the inverse of `append_key`.

        h' = h + a / (1 - a) (h - v),     l' = l + log(1 - a),     a = e^{s - l}

    a: the weight the key had; the other symbols as in `append_key`.

    Source: the equations of `append_key`, solved for h and l.

    Where we differ: removal cannot undo rounding. The remaining weight, 1 - a, is known to one part in
    (1 - a) / (eps max(1, |l|)); the relative error of the result is the inverse of that. Where no digit would
    be right, the key is treated as the only one, and the result is empty: zeros and -inf.

    >>> output, lse = append_key(torch.tensor([[2.0]]), torch.zeros(1), torch.zeros(1), torch.tensor([4.0]))
    >>> remove_key(output, lse, torch.zeros(1), torch.tensor([4.0])).output
    tensor([[2.]])
    """
    output, lse, score, value = _read_key("remove_key", output, lse, score, value)
    drop = torch.where(score == -math.inf, -math.inf, score - lse)
    left = -drop.expm1()
    only = ~(left > torch.finfo(left.dtype).eps * lse.abs().clamp(min=1.0))
    left = torch.where(only, 1.0, left)
    ratio = torch.where(only, 0.0, drop.clamp(max=0.0).exp() / left)
    rest = output + _weight_output(ratio, output - value[..., None, :])
    rest = torch.where(only[..., None], 0.0, rest)
    return Merged(rest, torch.where(only, -math.inf, lse + left.log()))


def _read_key(function: str, output: Tensor, lse: Tensor, score: Tensor, value: Tensor) -> list[Tensor]:
    axes = {"output": (output, "query value_dim"), "lse": (lse, "query"), "score": (score, "query")}
    return read_shaped(function, **axes, value=(value, "value_dim"))


def _weight_output(mass: Tensor, output: Tensor) -> Tensor:
    """`mass * output`, and 0 where the mass is zero, even if the output is NaN or infinite."""
    mass = mass[..., None]
    return mass * torch.where(mass == 0, 0.0, output)
