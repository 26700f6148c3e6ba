"""The operations of a training step and the peak of the machine, for `regard train`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from regard.cost_model import flop_counter
from regard.cost_model.machine import this_machine
from regard.train.task import Task


def count_flops(task: Task, model: nn.Module, batch: Any) -> float:
    """Floating-point operations of one token or image, forward and backward, counted on a micro-batch.

    The gradients are dropped.
    """
    with torch.random.fork_rng(devices=[]), flop_counter(causal="triangle") as counter:
        sum(task.compute_terms(model, batch).values()).backward()  # pyright: ignore[reportAttributeAccessIssue]
    model.zero_grad(set_to_none=True)
    return counter.get_total_flops() / max(task.count_units(batch), 1)


def measure_peak(task: Task, model: nn.Module, batch: Any) -> tuple[float, float]:
    """The operations of one token or image, and those of the machine in a second."""
    return count_flops(task, model, batch), this_machine().peak_of(next(model.parameters()).dtype)
