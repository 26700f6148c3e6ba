"""`cost`: the question, and who answers it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from regard.attention import Attention
from regard.cost_model.asked import Asked, Counted
from regard.cost_model.cost import Cost
from regard.cost_model.setting import Setting
from regard.errors import CostError

if TYPE_CHECKING:
    from regard.cost_model.memory import Memory


def cost(
    target: Attention | nn.Module | Callable[..., Any],
    *,
    step: str = "forward",
    backend: str | None = None,
    dtype: torch.dtype | None = None,
    stable: bool = True,
    serial: bool = False,
    trace: bool | None = None,
    **sizes: Any,
) -> Cost:
    """What a description, a layer, a model or any module costs.

        >>> from regard import Attention, Causal, cost
        >>> cost(Attention(pattern=Causal()), tokens=1024, dim=64, heads=8).macs
        537,395,200 = B*H*N*d*(N + 1)

    Sizes are keywords: `batch=1, tokens, keys, context_tokens, image`, and for a description, which has none of its
    own, `heads, kv_heads, dim, value_dim`. What is not given stays a letter. What Regard has formulas for is answered
    by them, in letters for every size; any other module is followed with tensors that have shapes and no numbers, and
    its formulas have letters for the sizes of its input only.

    Args:
        step: `"forward"`, `"backward"`, `"training"` for both, or `"decode"`: one token after `tokens` cached ones.
        backend: whose work is counted; `None` is what the mathematics asks for. See `Setting`.
        dtype: in which numbers; those of the module if it has any.
        stable, serial: how depth is counted: with the maximum of a stable softmax; with sums as chains, not trees.
        trace: follow the module even if there is a formula for it, or never.
        inputs: tensors or shapes for a module whose input cannot be guessed.
    """
    unknown = [name for name in sizes if name not in {f.name for f in dataclasses.fields(Asked)}]
    if unknown:
        raise CostError(
            f"There is no size {unknown[0]!r}.",
            asked=f"cost(..., {unknown[0]}={sizes[unknown[0]]!r})",
            because=f"sizes are {', '.join(f.name for f in dataclasses.fields(Asked))}",
            instead="cost(layer, batch=8, tokens=512)",
        )
    asked = Asked(**sizes)
    setting = Setting(step, backend, dtype or _dtype_of(target), stable, serial)
    counted = _counted(target, asked, setting, trace)

    def again(**other: Any) -> Cost:
        kept = {"step": step, "backend": backend, "dtype": dtype, "stable": stable, "serial": serial, "trace": trace}
        return cost(target, **{**kept, **sizes, **other})

    def memory(made: Cost) -> Memory:
        from regard.cost_model.memory import memory_of

        return memory_of(made, target, asked)

    known = {"notes": counted.notes, "again": again, "memory": memory}
    return Cost(counted.name, counted.parts, counted.values, setting, **known)


def _counted(target: Any, asked: Asked, setting: Setting, trace: bool | None) -> Counted:
    from regard.cost_model.rules import check_sizes, rule_for
    from regard.cost_model.trace import follow

    check_sizes(target, asked)
    rule = None if trace else rule_for(target)
    if rule is not None:
        return rule(target, asked, setting)
    if callable(target) and trace is not False:
        return follow(target, asked, setting)
    raise CostError(
        f"Nobody knows what {type(target).__name__} costs.",
        asked=f"cost({target!r})",
        because="it is no description, no module and no function"
        if not callable(target)
        else "there is no formula for it, and trace=False forbids to follow it",
        instead="cost(Attention(...), tokens=..., dim=...), cost(layer), cost(model)",
    )


def _dtype_of(target: Any) -> torch.dtype:
    """The numbers a module is made of."""
    if isinstance(target, nn.Module):
        for parameter in target.parameters():
            if parameter.is_floating_point():
                return parameter.dtype
    return torch.float32
