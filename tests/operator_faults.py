"""Faults to plant in backends, of kinds that occurred or are easily made: the random cases must find all of them.

`FAULTS` has for each the backend that is wrong and what to put in place of what.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard import Window
from regard.backends import base, blocked, linear_attention, native, positional, reference, scores, sdpa

Fault = tuple[str, object, str, Callable]


def _lose_strided_gradient(tile, by_head: Tensor, total: Tensor, run=scores.Tile._differentiate_tensor) -> None:
    run(tile, by_head, total if tile.learned[0].is_contiguous() else total.clone())


def _ignore_beta(request, *tensors, run=sdpa._run) -> Tensor:
    return run(dataclasses.replace(request, scale=1 / math.sqrt(request.query.shape[-1])), *tensors)


def _repeat_heads(tensor: Tensor, group: int) -> Tensor:
    return tensor.repeat(1, group, 1, 1)


def _share_wrong_heads(query, key, value, *rest, enable_gqa=False, run=sdpa.scaled_dot_product_attention, **options):
    group = query.shape[1] // key.shape[1]
    return run(query, _repeat_heads(key, group), _repeat_heads(value, group), *rest, **options)


def _widen_window(pattern, lengths, block, run=scores.group_tiles):
    if isinstance(pattern, Window):
        pattern = Window(pattern.left + 1, pattern.right, step=pattern.step)
    return run(pattern, lengths, block)


def _start_late(pattern, lengths, run=native.find_key_intervals):
    intervals = run(pattern, lengths)
    return intervals if intervals is None else (torch.minimum(intervals[0] + 1, intervals[1]), intervals[1])


def _look_backwards(request, run=positional.make_table) -> Tensor:
    return run(request).flip(-1)


def _swap_axes(bias, run=positional.axis_scores):
    axes = run(bias)
    return axes if axes is None else tuple(scores.mT for scores in axes)


def _take_neighbour(bias, lengths, run=native.make_bias_table):
    table, *codes = run(bias, lengths)
    return table.roll(1, -1), *codes


def _first_winner(*arguments, run=blocked.find_winners):
    best, winner, count = run(*arguments)
    return best, winner, count.clamp(max=1)


def _softmax_as_if_dense(scores: Tensor) -> Tensor:
    return torch.ops.aten._softmax.out(scores, -1, False, out=scores)


def _no_row(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor[..., :1], dtype=torch.bool)


def _round_half(request, position, run=reference.compute_weights):
    weight, *rest = run(request, position)
    return weight.to(request.query.dtype).to(weight.dtype), *rest


class _ShortGradient(torch.autograd.Function):
    """A gradient that lacks the last three bits of half precision."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * (1 + 2**-5)


def _shorten_half(request, run=native._unify_dtypes):
    query, key, value = run(request)
    return query, key, _ShortGradient.apply(value) if value.dtype == torch.bfloat16 else value


FAULTS: dict[str, Fault] = {
    "a strided bias learns nothing": ("blocked", scores.Tile, "_differentiate_tensor", _lose_strided_gradient),
    "outputs without a graph": ("reference", base.Request, "keep_graph", lambda request, output: output),
    "another scale": ("sdpa", sdpa, "_run", _ignore_beta),
    "a broken query passes": (
        "linear",
        linear_attention,
        "_find_nonfinite_queries",
        lambda query, request: _no_row(query),
    ),
    "a broken value passes": (
        "linear",
        linear_attention,
        "_find_nonfinite_values",
        lambda key, value, request: torch.zeros_like(value) > 0,
    ),
    "padding that is read": (
        "linear",
        linear_attention,
        "_find_real_keys",
        lambda found, r: torch.ones(1, 1, r.key.shape[2], 1) > 0,
    ),
    "a window too wide": ("blocked", scores, "group_tiles", _widen_window),
    "an interval too short": ("native", native, "find_key_intervals", _start_late),
    "a table of its neighbours": ("native", native, "make_bias_table", _take_neighbour),
    "half a gradient's bits": ("native", native, "_unify_dtypes", _shorten_half),
    "a bias the wrong way round": ("positional", positional, "make_table", _look_backwards),
    "axes the wrong way round": ("positional", positional, "axis_scores", _swap_axes),
    "heads that share the wrong keys": ("sdpa", sdpa, "scaled_dot_product_attention", _share_wrong_heads),
    "heads in another order": ("reference", reference, "_repeat_heads", _repeat_heads),
    "ties that are not shared": ("blocked", blocked, "find_winners", _first_winner),
    "softmax written past its strides": ("blocked", blocked, "_softmax_in_place", _softmax_as_if_dense),
    "broken rows that pass": ("blocked", blocked, "find_nonfinite_rows", _no_row),
    "weights in half precision": ("reference", reference, "compute_weights", _round_half),
}
