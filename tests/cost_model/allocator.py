"""What torch's CPU allocator really gives out: peaks of real runs, from the events that it reports to the profiler.

Every allocation and every release of `c10::GetCPUAllocator` is an event with its bytes, so that sums over them are
exact. Scratch that matrix libraries and our kernels take from the system is not seen, as it is not predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Allocated:
    """Bytes of a run: the most that was there at one time beside what was there before, and what is left of it."""

    peak: int
    left: int


def allocated(run: Callable[[], Any]) -> Allocated:
    """Run it, and tell what it allocated. What it returns is alive to the end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        made = run()
    results = watch.profiler.kineto_results if watch.profiler is not None else None
    assert results is not None
    events = sorted(
        (event for event in results.events() if event.name() == "[memory]"), key=lambda event: event.start_ns()
    )
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    del made
    return Allocated(peak, now)


def storage_bytes(tensors: Any) -> int:
    """Bytes of tensors, each storage once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(found.values())


def resident_bytes(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    return storage_bytes([*module.parameters(), *module.buffers(), *inputs])


def run_forward(module: nn.Module, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
    """A forward pass without gradients, in evaluation mode."""
    module.eval()

    def run() -> Any:
        with torch.no_grad():
            return module(*inputs)

    return run


def run_training(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[Callable[[], None], torch.optim.Optimizer]:
    """A step of training: forward, the mean of all outputs, backward, optimizer."""
    module.train()
    stepping = optimizer(module.parameters())

    def run() -> None:
        made = module(*inputs)
        loss = sum(each.mean() for each in tree_leaves(made) if isinstance(each, Tensor))
        del made
        assert isinstance(loss, Tensor)
        loss.backward()
        stepping.step()

    return run, stepping


def forward_peak(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """The peak of a forward pass, after one that filled the caches of patterns."""
    run = run_forward(module, inputs)
    run()
    return resident_bytes(module, inputs) + allocated(run).peak


def training_peak(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
) -> int:
    """The peak of the second step of training."""
    run, stepping = run_training(module, inputs, optimizer)
    run()
    module.zero_grad()
    peak = resident_bytes(module, inputs) + state_bytes(stepping) + allocated(run).peak
    module.zero_grad()
    return peak


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of everything that an optimizer keeps."""
    return sum(each.nbytes for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor))


def recompute(blocks: list[nn.Module]) -> None:
    """Recompute blocks in backward, as torch.utils.checkpoint does."""

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **named: checkpoint(forward, *args, use_reentrant=False, **named)

    for block in blocks:
        block.forward = wrapped(block.forward)  # type: ignore[method-assign]
