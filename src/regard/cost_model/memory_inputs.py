"""Inputs of a run, as shapes: tensors on the device `meta`, which have no numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.adapters.fake_copies import TracedTarget
from regard.attention import Attention
from regard.cost_model.sizes import Sizes
from regard.cost_model.symbols import MEANINGS
from regard.cost_model.trace.inputs import make_example_inputs
from regard.errors import CostError

Inputs = tuple[tuple, dict[str, Any]]


def inputs_for(target: Any, asked: Sizes, dtype: torch.dtype) -> Inputs:
    """What a target is given in a run of these sizes: positional and named."""
    if isinstance(target, Attention) and asked.inputs is None:
        return _described(asked, dtype), {}
    inputs = make_example_inputs(TracedTarget(target, dtype), asked)
    for letter in inputs.symbols:
        if letter not in inputs.known:
            raise _missing(MEANINGS[letter][0])
    with torch.device("meta"):
        return inputs.make(inputs.sizes, dtype)


def _described(asked: Sizes, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Query, key and value."""
    if asked.dim is None or asked.tokens is None:
        raise _missing("dim" if asked.dim is None else "tokens")
    heads, keys = asked.heads or 1, asked.keys or asked.tokens
    kv_heads, value_dim = asked.kv_heads or heads, asked.value_dim or asked.dim
    shapes = (heads, asked.tokens, asked.dim), (kv_heads, keys, asked.dim), (kv_heads, keys, value_dim)
    made = (torch.empty(asked.batch, *shape, dtype=dtype, device="meta") for shape in shapes)
    return tuple(each.requires_grad_() for each in made)


def _missing(size: str) -> CostError:
    return CostError(
        "A run has no size yet.",
        asked="what it needs in memory",
        because=f"nothing says how large {size} is",
        instead=f"cost(..., {size}=16).memory",
    )
