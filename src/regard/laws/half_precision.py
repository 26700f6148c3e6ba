"""Half precision against float64 on the same inputs, with a tolerance from perturbed inputs and parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.precision import perturb_parameters
from regard.adapters.rng import Rng
from regard.laws.law import Observation, expect_finite, expect_true

# How far a correct answer may be off, in answers of float64 to inputs that are moved by a few roundings.
SAFETY = 16.0
# The same for a subject compared with itself on ordinary numbers. A rounding is a relative error of at most eps / 2,
# eps / sqrt(12) on average; moving every input and every parameter by eps is more than a rounding of every product.
HALF_SAFETY = 2.0


class WidenedCall:
    """The numbers of a half-precision view, computed with in float64."""

    def __init__(self, view: Adapter, target: Any) -> None:
        self.view = copy.copy(view)
        self.view.target, self.view.dtype = target, torch.float64
        self.view._rebind(view)

    def __call__(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.view.run(x, mask)


def widen_to_float64(view: Adapter, native: Adapter) -> WidenedCall | None:
    """A half-precision view whose rounded numbers are computed with in float64."""
    if isinstance(view.target, nn.Module):
        return WidenedCall(view, copy.deepcopy(view.target).double())
    double = native.at(torch.float64)
    return None if double is None else WidenedCall(double, double.target)


def expect_like_float64(
    run: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    output: Tensor,
    eps: float,
    rng: Rng,
    words: dict,
    target: object = None,
) -> Iterator[Observation]:
    """The answer of float64 to the same numbers, as closely as it answers to these numbers rounded once more."""
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    expected = run(*wide)
    if not expected.isfinite().all():
        return
    apart = float((expected - output.double()).abs().max())
    spread = measure_spread(run, wide, expected, (4 * eps, 2 * eps), rng, target)
    bound = SAFETY * (spread + 4 * eps * float(expected.abs().max()))
    yield expect_true(
        not apart > bound,
        f"is {apart:.1e} away from that of float64, bound {bound:.1e}",
        **words,
    )


def measure_spread(
    run: Callable[..., Tensor],
    inputs: list[Tensor],
    expected: Tensor,
    moves: tuple[float, float],
    rng: Rng,
    target: object = None,
) -> float:
    """How far an answer moves when all inputs and all parameters of `target` are moved, each by its share of itself."""
    spread = torch.zeros((), dtype=torch.float64)
    for _ in range(4):
        back = perturb_parameters(target, moves[1], rng)
        near = [_perturb(x, moves[0], rng) if x.is_floating_point() else x for x in inputs]
        spread = torch.maximum(spread, (run(*near) - expected).abs().max())
        back()
    return float(spread)


def _perturb(x: Tensor, eps: float, rng: Rng) -> Tensor:
    return x * (1 + eps * rng.normal(*x.shape, dtype=x.dtype))


@torch.no_grad()
def expect_like_native(
    native: Adapter, half: Adapter, x: Tensor, mask: Tensor | None, where: Tensor | None, rng: Rng, changed: str
) -> Iterator[Observation]:
    """The half-precision variant of a subject gives what its rounded numbers give in the subject's own precision.

    A variant that refuses the call is not compared: -1e9 overflows float16.
    """
    wide, target = native, None
    if isinstance(half.target, nn.Module):
        wide = copy.copy(native)
        wide.target = target = copy.deepcopy(half.target).to(native.dtype)
        wide._views, wide._eps = {}, None
        wide._rebind(native)
    rounded = x.to(half.dtype) if x.is_floating_point() else x
    try:
        output = half.run(rounded, mask)
    except Exception:  # a refusal is not silent
        return

    def run(x: Tensor) -> Tensor:
        return wide.run(x, mask) if where is None else wide.run(x, mask)[where]

    inputs = [rounded.to(native.dtype) if x.is_floating_point() else x]
    expected, found = run(*inputs), output.to(native.dtype)
    found = found if where is None else found[where]
    if not expected.isfinite().all():
        return
    yield expect_finite(found, changed=changed)
    if not found.isfinite().all():
        return
    eps = torch.finfo(half.dtype).eps
    spread = measure_spread(run, inputs, expected, (eps, eps), rng, target)
    steps = 2 + math.sqrt(x.shape[1]) / 4  # sums may be carried on in half precision from block to block
    bound = HALF_SAFETY * (spread + steps * eps * float(expected.abs().max()))
    apart = float((expected - found).abs().max())
    names = [str(dtype).removeprefix("torch.") for dtype in (native.dtype, half.dtype)]
    effect = f"is {apart:.1e} away from that of {names[0]}, bound {bound:.1e}: more than {names[1]} rounds"
    yield expect_true(not apart > bound, effect, changed=changed)


def make_nearly_equal_tokens(subject: Adapter, x: Tensor, rng: Rng) -> Tensor:
    """Two tokens, each repeated over one half of the sequence and moved a little: all keys weigh about the same.

    A running sum of their weights saturates in half precision, and stops at the first half. The keys of an operator
    are one token's, its values those of two.
    """
    half = x.shape[1] // 2
    groups = torch.cat([x[:, :1].expand_as(x[:, :half]), x[:, -1:].expand_as(x[:, half:])], 1)
    if not x.is_floating_point():
        return groups.contiguous()
    near = groups + 0.1 * x
    if isinstance(subject, OperatorAdapter):
        query, key, _ = subject.parted(0.1 * x)
        return subject.joined(query, key, subject.parted(near)[2])
    return near
