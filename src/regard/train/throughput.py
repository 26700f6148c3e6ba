"""How fast a run is: tokens or images a second, and the share of the machine's peak."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

from regard.train.task import Task

STEPS = 50  # over which the throughput is averaged


class Throughput:
    """Units a second over the last steps.

    flops: floating-point operations of one unit, forward and backward; peak: of the machine, a second.
    """

    def __init__(self, flops: float | None = None, peak: float | None = None) -> None:
        self.flops, self.peak = flops, peak
        self._steps: deque[tuple[int, float]] = deque(maxlen=STEPS)

    def add(self, units: int, seconds: float) -> None:
        self._steps.append((units, seconds))

    @property
    def units_per_second(self) -> float | None:
        seconds = sum(each for _, each in self._steps)
        return sum(units for units, _ in self._steps) / seconds if seconds > 0 else None

    @property
    def peak_share(self) -> float | None:
        rate = self.units_per_second
        return None if rate is None or self.flops is None or not self.peak else rate * self.flops / self.peak


def measure_flops(task: Task, model: nn.Module, batch: Any) -> float:
    """Floating-point operations of one unit, forward and backward, counted on a micro-batch; gradients are dropped."""
    from regard.cost_model import flop_counter

    with torch.random.fork_rng(devices=[]), flop_counter(causal="triangle") as counter:
        sum(task.compute_terms(model, batch).values()).backward()  # pyright: ignore[reportAttributeAccessIssue]
    model.zero_grad(set_to_none=True)
    return counter.get_total_flops() / max(task.count_units(batch), 1)


def find_peak(dtype: torch.dtype) -> float:
    """The peak of this machine, floating-point operations a second."""
    from regard.cost_model.machine import this_machine

    return this_machine().peak_of(dtype)
