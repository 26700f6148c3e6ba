"""A gradient, and the difference quotients that it must agree with.

A kink, as ReLU has, is no fault: a difference quotient across it is the mean of two slopes, and a pre-activation beside
it may have one sign in float32 and the other in float64. So wherever the two sides disagree, the gradient is taken
around the place as well. What it varies there by itself is allowed for; where that is all there is to see, nothing is
said, and the case counts as discarded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from regard.adapters import precision
from regard.adapters.base import Adapter
from regard.adapters.rng import Rng
from regard.laws.compare import FACTOR, compare
from regard.laws.law import Observation, expect_equal, expect_finite, expect_true

Call = Callable[..., Tensor]
# Above this a difference quotient tells nothing.
COARSEST = 1e-5
# A comparison that allows for more than this share of the gradient tells nothing.
UNTOLD = 0.1
# Roundings of the input that may stand for those on the way to a pre-activation.
NEARBY = (16.0, 16.0, 64.0, 64.0)


class CheckedGradient:
    """The gradient of one weighted sum of outputs, and what it must agree with."""

    def __init__(self, subject: Adapter, call: Call, inputs: Sequence[Tensor], weight: Tensor, reduction: int) -> None:
        self.subject, self.call, self.weight, self.reduction = subject, call, weight, reduction
        self.inputs = [tensor.detach().clone() for tensor in inputs]
        self.output, self.gradients = self.of(range(len(inputs)))
        # Where the derivative vanishes its rounding does not: it is relative to what went into it.
        unit = find_largest([weight]) * find_largest([self.output]) / (find_largest(self.inputs) + 1e-30)
        self.largest = max(find_largest(self.gradients), unit)
        # Comparisons that told something, and those that a kink or a jump nearby made worthless.
        self.compared = self.skipped = 0

    def of(
        self, wanted: Sequence[int], twice: bool = False, inputs: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Output and gradients with respect to some of the inputs, the others being constants."""
        leaves = [
            tensor.clone().requires_grad_() if index in wanted else tensor.clone()
            for index, tensor in enumerate(self.inputs if inputs is None else inputs)
        ]
        output = self.call(self.subject, *leaves)
        if output.requires_grad:
            run_backward(self.subject, output, self.weight, keep=twice)
            if twice:
                for leaf in leaves:
                    leaf.grad = None
                run_backward(self.subject, output, self.weight)
        gradients = [gradient_of(leaf) for leaf in leaves]
        return output.detach(), [gradients[index] for index in wanted]

    def observe(
        self, rng: Rng, names: Sequence[str], token_axis: int | None = None, together: bool = False
    ) -> Iterator[Observation]:
        """Directions in all inputs, in each of them, and in the last token only."""
        for index, gradient in enumerate(self.gradients):
            name = names[0] if together else names[index]
            yield expect_finite(
                gradient.flatten(1) if gradient.ndim > 2 else gradient, output=f"the gradient of the {name}"
            )
        if not all(gradient.isfinite().all() for gradient in self.gradients):
            return
        double = self.subject.at(torch.float64)
        if double is not None and double is not self.subject:
            yield from self._observe_against_float64(double, names, together)
            if self.compared or self.skipped:
                return
        if self.subject.eps > COARSEST:
            return
        whole = [self._draw_direction(tensor, rng, together) for tensor in self.inputs]
        yield from self._observe_direction(whole, "every input" if len(names) > 1 else f"the {names[0]}")
        if together:
            return
        for index, name in enumerate(names):
            only = [each if place == index else torch.zeros_like(each) for place, each in enumerate(whole)]
            if len(names) > 1:
                yield from self._observe_direction(only, f"the {name} only")
            axis = token_axis if token_axis is not None else self.inputs[index].ndim - 2
            last = [torch.zeros_like(each) for each in whole]
            last[index].select(axis, -1).copy_(whole[index].select(axis, -1))
            yield from self._observe_direction(last, f"the last token of the {name}")

    def _draw_direction(self, tensor: Tensor, rng: Rng, together: bool) -> Tensor:
        size = max(float(tensor.double().pow(2).mean().sqrt()), 0.05) if together and tensor.numel() else 1.0
        return (size * rng.normal(*tensor.shape)).to(tensor.dtype)

    def _observe_direction(self, direction: list[Tensor], name: str) -> Iterator[Observation]:
        """The slope that the gradient says, against the slope that is measured.

        A kink within one step bends the quotient, not the gradient; what is wrong is wrong at every step.
        """
        derivative = self._find_slope_of_gradient(self.gradients, direction)
        best = None
        steps = [self.subject.eps**0.2 / n for n in ((1, 16, 256) if self.subject.eps < 1e-12 else (1, 4, 16))]
        for step in steps:
            measurement = self._measure_slope(direction, derivative, step)
            if measurement is not None and (best is None or measurement[2] < best[2]):
                best = measurement
            if best is not None and best[2] <= 1:
                break
        if best is None or best[2] > 1:
            best = self._measure_slope_beside_kinks(direction, derivative, [*steps, steps[-1] / 16])
        if best is None:
            self.skipped += 1  # it has no slope here that could be measured
            return
        self.compared += 1
        measured, scale, _ = best
        yield expect_equal(
            torch.tensor([measured], dtype=torch.float64),
            torch.tensor([derivative], dtype=torch.float64),
            scale=scale,
            reduction=self.reduction,
            changed=f"{name}, along one direction",
            output="the slope",
            effect=f"is {measured:.4e} by differences and {derivative:.4e} by the gradient",
        )

    def _find_slope_of_gradient(self, gradients: list[Tensor], direction: list[Tensor]) -> float:
        return sum((g.double() * u.double()).sum().item() for g, u in zip(gradients, direction, strict=True))

    def _measure_slope_beside_kinks(
        self, direction: list[Tensor], derivative: float, steps: list[float]
    ) -> tuple[float, float, float] | None:
        """The step that comes nearest to the gradient, allowing for what the gradient itself varies within that step.

        A difference quotient is the mean of the slopes along its step: kinks move it by no more than the slopes vary.
        None where the variation, or the rounding at a step short enough, is as large as the gradient.
        """
        best = None
        for step in steps:
            if (measurement := self._measure_slope(direction, derivative, step)) is None:
                continue
            measured, scale, _ = measurement
            slopes = []
            for part in (-1.0, -0.5, 0.0, 0.5, 1.0):
                moved = [x + part * step * u for x, u in zip(self.inputs, direction, strict=True)]
                slopes.append(self._find_slope_of_gradient(self.of(range(len(moved)), inputs=moved)[1], direction))
            varied = sum(abs(after - before) for before, after in pairwise(slopes))
            scale += 2 * varied / self._unit_bound
            bound = self._unit_bound * scale
            if bound > UNTOLD * max(abs(measured), abs(derivative), self._find_typical_slope(direction)):
                continue
            if best is None or abs(measured - derivative) / bound < best[2]:
                best = measured, scale, abs(measured - derivative) / bound
        return best

    @property
    def _unit_bound(self) -> float:
        """The bound of rounding for numbers of size one."""
        eps = self.subject.eps
        factor = FACTOR[torch.float64] if eps < 1e-12 else FACTOR[torch.float32]
        return factor * eps * math.sqrt(max(self.reduction, 1))

    def _measure_slope(self, direction: list[Tensor], derivative: float, h: float) -> tuple[float, float, float] | None:
        """The measured slope, the size that its rounding is relative to, and its distance from `said` in bounds."""
        weight = self.weight.double()
        values = {}
        with torch.no_grad():
            for step in (-1.0, -0.5, 0.0, 0.5, 1.0):
                moved = [x + step * h * u for x, u in zip(self.inputs, direction, strict=True)]
                values[step] = (weight * self.call(self.subject, *moved).double()).sum().item()
        coarse, fine = (values[1.0] - values[-1.0]) / (2 * h), (values[0.5] - values[-0.5]) / h
        right, left = (values[0.5] - values[0.0]) / (0.5 * h), (values[0.0] - values[-0.5]) / (0.5 * h)
        size = max(abs(fine), abs(derivative), self._find_typical_slope(direction))
        if not all(map(math.isfinite, values.values())) or abs(coarse - fine) > 0.05 * size:
            return None  # a jump or a kink nearby
        if abs(right - left) > 0.3 * size:
            return None
        measured = (4 * fine - coarse) / 3
        noise = float(self.output.double().abs().max()) * float(weight.norm())
        scale = noise / h + 2 * abs(coarse - fine) / self._unit_bound
        return measured, scale, abs(measured - derivative) / (self._unit_bound * scale + 1e-300)

    def _find_typical_slope(self, direction: list[Tensor]) -> float:
        return max(float(g.norm()) for g, u in zip(self.gradients, direction, strict=True) if u.any())

    def _observe_against_float64(self, double: Adapter, names: Sequence[str], together: bool) -> Iterator[Observation]:
        """In the subject's own precision: the gradient is that of float64, where the outputs are the same."""
        try:
            wide = CheckedGradient(
                double, self.call, [x.double() for x in self.inputs], self.weight.double(), self.reduction
            )
        except Exception:  # its backward does not run in float64; differences have to do
            return
        apart = float((wide.output - self.output.double()).abs().max())
        if not apart <= 1e3 * self.subject.eps * float(wide.output.abs().max()):
            return
        scale = wide.largest
        if not any(self.weight.stride()):
            # The sum of a normalised row does not change: its gradient cancels, but the roundings on the way do not.
            signs = torch.ones_like(wide.output).flatten()
            signs[::2] = -1
            other = CheckedGradient(double, self.call, wide.inputs, signs.reshape(wide.output.shape), self.reduction)
            scale = max(scale, other.largest)
        words = {"reduction": self.reduction, "changed": "the precision"}
        factor = FACTOR[torch.float64] if self.subject.eps < 1e-12 else FACTOR[torch.float32]
        nearby: list[float] | None = None
        for index, (expected, actual) in enumerate(zip(wide.gradients, self.gradients, strict=True)):
            name, room = names[0] if together else names[index], scale
            observation = expect_equal(expected, actual, scale=room, output=f"the gradient of the {name}", **words)
            if compare(observation, self.subject.eps, factor).ratio > 1:
                nearby = wide.vary(self.subject.eps) if nearby is None else nearby
                if 2 * nearby[index] > UNTOLD * scale:
                    self.skipped += 1
                    continue
                observation.scale = scale + 2 * nearby[index] / self._unit_bound
            self.compared += 1
            yield observation

    def vary(self, eps: float) -> list[float]:
        """How far each gradient moves when the inputs move by some roundings of `eps`, one way and the opposite one.

        Continuous gradients move by as many roundings. A kink as near as that shows on one of the two sides.
        """
        rng, most = Rng(0, "nearby"), [0.0] * len(self.inputs)
        for size in NEARBY:
            noise = [size * eps * x * rng.normal(*x.shape).to(x.dtype) for x in self.inputs]
            for sign in (-1.0, 1.0):
                moved = [x + sign * each for x, each in zip(self.inputs, noise, strict=True)]
                _, gradients = self.of(range(len(moved)), inputs=moved)
                pairs = zip(gradients, self.gradients, strict=True)
                most = [max(old, find_largest([new - at])) for old, (new, at) in zip(most, pairs, strict=True)]
        return most

    def alone(self, index: int, name: str) -> Iterator[Observation]:
        """One input requires a gradient, the others do not."""
        try:
            _, (gradient,) = self.of([index])
        except Exception as failure:
            words = f"cannot be computed if only the {name} requires one: {type(failure).__name__}"
            yield expect_true(False, words, output="the gradient", changed=f"a {name} that alone requires a gradient")
            return
        yield expect_equal(
            self.gradients[index],
            gradient,
            scale=self.largest,
            reduction=self.reduction,
            output=f"the gradient of the {name}",
            changed="whether the other inputs require gradients",
        )

    def again(self) -> Iterator[Observation]:
        """The same graph a second time."""
        try:
            _, gradients = self.of(range(len(self.inputs)), twice=True)
        except Exception:  # a graph may serve once only
            return
        words = {"output": "the gradient", "changed": "nothing: the same graph, backward a second time"}
        for first, second in zip(self.gradients, gradients, strict=True):
            yield expect_equal(first, second, scale=self.largest, reduction=self.reduction, **words)


def gradient_of(leaf: Tensor) -> Tensor:
    """The gradient of a leaf, zeros if it has none; one step for torch function modes that record."""
    if has_torch_function_unary(leaf):
        return handle_torch_function(gradient_of, (leaf,), leaf)
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def run_backward(subject: Adapter, output: Tensor, weight: Tensor, keep: bool = False) -> None:
    # The backward of a plain function meets the single-precision numbers it closes over as well.
    widen = subject.dtype == torch.float64 and not isinstance(subject.target, nn.Module)
    with precision.Float64Arguments() if widen else nullcontext():
        torch.autograd.backward(output, weight, retain_graph=keep)


def find_largest(tensors: Sequence[Tensor]) -> float:
    return max([float(each.abs().nan_to_num(0, 0, 0).max()) for each in tensors if each.numel()], default=0.0)
