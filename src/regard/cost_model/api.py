"""`cost`: the parameters, FLOPs, bytes and memory of an attention, a layer or a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from regard.attention import Attention
from regard.cost_model.cost import Cost
from regard.cost_model.parallel.strategy import OPTIONS
from regard.cost_model.run_mode import RunMode
from regard.cost_model.sizes import Breakdown, Sizes
from regard.errors import CostError

if TYPE_CHECKING:
    from regard.cost_model.memory import Memory
    from regard.cost_model.parallel import ParallelCost

Target = Attention | nn.Module | Callable[..., Any]


@overload
def cost(target: Target, *, devices: int, **options: Any) -> ParallelCost: ...


@overload
def cost(
    target: Target,
    *,
    step: str | None = None,
    backend: str | None = None,
    dtype: torch.dtype | None = None,
    stable: bool = True,
    serial: bool = False,
    **sizes: Any,
) -> Cost: ...


def cost(
    target: Target,
    *,
    step: str | None = None,
    backend: str | None = None,
    dtype: torch.dtype | None = None,
    stable: bool = True,
    serial: bool = False,
    devices: int | None = None,
    **sizes: Any,
) -> Cost | ParallelCost:
    """The cost of a description, a layer, a model, any module or function.

        >>> from regard import Attention, Causal, cost
        >>> cost(Attention(pattern=Causal()), tokens=1024, dim=64, heads=8).macs
        537,395,200 = B*H*N*d*(N + 1)

    Sizes are keywords: `batch=1, tokens, keys, context_tokens, image`, and for a description, which has none of its
    own, `heads, kv_heads, dim, value_dim`. What is not given stays a symbol. A module is traced with fake tensors;
    nothing is allocated or computed. Its formulas have symbols for the sizes of the input, and for those of its
    configuration (width, heads, layers, ...) where the module can be built again at other sizes.

    With `devices=8` it is the cost of a training step on so many: a `ParallelCost` of bytes sent, memory of a device,
    and time. `strategy="ddp"`, `"fsdp"`, `"context"` or `"tensor"`, and `context=`, `layout=`, `recompute=`,
    `param_dtype=`, `link_gbps=`, `device_tflops=` say how: see `Strategy`. `batch` is then that of a device, or of the
    devices that share its sequences.

    Args:
        step: `"forward"` (the default on one device), `"backward"`, `"training"` for both, or `"decode"`: one token
            after `tokens` cached ones.
        backend: whose work is counted; `None` is what the mathematics needs. See `RunMode`.
        dtype: of activations and parameters; by default that of the module.
        stable, serial: how depth is counted: with the maximum of a stable softmax; with sums as chains, not trees.
        inputs: tensors or shapes for a module whose inputs cannot be inferred.
    """
    if devices is not None:
        options = {"backend": backend, "dtype": dtype, "stable": stable, "serial": serial}
        return _cost_on_devices(target, devices, step, options, sizes)
    step = "forward" if step is None else step
    unknown = [name for name in sizes if name not in {f.name for f in dataclasses.fields(Sizes)}]
    if unknown:
        raise CostError(
            f"There is no size {unknown[0]!r}.",
            asked=f"cost(..., {unknown[0]}={sizes[unknown[0]]!r})",
            because=f"sizes are {', '.join(f.name for f in dataclasses.fields(Sizes))}"
            + (f", and {unknown[0]} is an option of a step on several devices" if unknown[0] in OPTIONS else ""),
            instead=f"cost(..., devices=8, {unknown[0]}={sizes[unknown[0]]!r})"
            if unknown[0] in OPTIONS
            else "cost(layer, batch=8, tokens=512)",
        )
    given_sizes = Sizes(**sizes)
    mode = RunMode(step, backend, dtype or _find_dtype(target), stable, serial)
    breakdown = _count(target, given_sizes, mode)

    def recompute(**other: Any) -> Cost:
        same = {"step": step, "backend": backend, "dtype": dtype, "stable": stable, "serial": serial}
        return cost(target, **{**same, **sizes, **other})

    def memory(made: Cost) -> Memory:
        from regard.cost_model.memory import memory_of

        return memory_of(made, target, given_sizes)

    known = {"notes": breakdown.notes, "recompute": recompute, "memory": memory}
    return Cost(breakdown.name, breakdown.parts, breakdown.values, mode, **known)


def _cost_on_devices(
    target: Any, devices: int, step: str | None, options: dict[str, Any], sizes: dict[str, Any]
) -> ParallelCost:
    from regard.cost_model.parallel import cost_parallel
    from regard.cost_model.parallel.strategy import Strategy

    strategy = Strategy(devices, **{name: sizes[name] for name in OPTIONS if name in sizes})
    if step not in (None, "training"):
        raise CostError(
            f"A {step} step on several devices is not counted.",
            asked=f"step={step!r} with devices={devices}",
            because="what is sent is that of a training step: forward, backward and the sum of the gradients",
            instead='step="training", or the default',
        )
    sizes = {name: value for name, value in sizes.items() if name not in OPTIONS}
    dtype = options["dtype"] or _find_dtype(target)
    computed = strategy.param_dtype or dtype
    made = cost(target, step="training", **options | {"dtype": computed}, **sizes)
    return cost_parallel(made, target, Sizes(**sizes), strategy, dtype.itemsize)


def _count(target: Any, given_sizes: Sizes, mode: RunMode) -> Breakdown:
    from regard.cost_model.attention.attention import count_description
    from regard.cost_model.trace import trace_cost

    if isinstance(target, Attention):
        return count_description(target, given_sizes, mode)
    if not callable(target):
        raise CostError(
            f"{type(target).__name__} is neither an Attention nor a module.",
            asked=f"cost({target!r})",
            because="only a description, a module or a function has a cost",
            instead="cost(Attention(pattern=...), tokens=..., dim=...), cost(layer), cost(model)",
        )
    _check_sizes(target, given_sizes)
    return trace_cost(target, given_sizes, mode)


def _check_sizes(target: Any, given_sizes: Sizes) -> None:
    """Refuse a size that a module has itself."""
    name = type(target).__name__
    for size in ("heads", "kv_heads", "dim", "value_dim"):
        if isinstance(target, nn.Module) and getattr(given_sizes, size) is not None:
            raise CostError(
                f"{name} has sizes of its own.",
                asked=f"{size}={getattr(given_sizes, size)}",
                because=f"{size} is for a description, such as Attention(...), which has none",
                instead=f"a {name} of that size, and cost(...) without {size}",
            )


def _find_dtype(target: Any) -> torch.dtype:
    """The dtype of a module's parameters."""
    if isinstance(target, nn.Module):
        for parameter in target.parameters():
            if parameter.is_floating_point():
                return parameter.dtype
    return torch.float32
