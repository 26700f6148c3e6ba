"""The operations of a training step and the peak of the machine, for the progress bar of `regard train`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from regard.cost_model import flop_counter
from regard.cost_model.machine import this_machine
from regard.train.task import Task


def measure_peak(task: Task, model: nn.Module, batch: Any) -> tuple[float, float]:
    """Floating-point operations of one token or image, forward and backward, and those of the machine in a second.

    They are counted on a micro-batch, whose gradients are dropped.
    """
    with torch.random.fork_rng(devices=[]), flop_counter(causal="triangle") as counter:
        sum(task.compute_terms(model, batch).values()).backward()  # pyright: ignore[reportAttributeAccessIssue]
    model.zero_grad(set_to_none=True)
    peak = this_machine().peak_of(next(model.parameters()).dtype)
    return counter.get_total_flops() / max(task.count_units(batch), 1), peak
