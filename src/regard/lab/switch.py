"""Heads switched off: their share of a layer's output is zero while the model runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.lab.layer_heads import LayerHeads

Off = tuple[str, int, int]  # attention, layer, head


@contextmanager
def heads_off(model: nn.Module, layers: Mapping[str, Sequence[LayerHeads]], off: Sequence[Off]) -> Iterator[None]:
    """The model without some heads: what they hand to the matrix that mixes the heads is zero.

    The output of a layer is the sum of what its heads contribute and a bias, so the summand of a head that is off is
    missing, and nothing else changes. A module that runs as several layers (shared weights) loses a head only where it
    runs as the named layer.
    """
    wanted: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # of a matrix: which run, head and heads
    runs: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for name, found in layers.items():
        for number, layer in enumerate(found):
            if layer.output is not None:
                runs[layer.output.untyped_storage().data_ptr()].append((name, number))
    for name, number, head in off:
        layer = _find_layer(layers, name, number, head)
        assert layer.output is not None
        matrix = layer.output.untyped_storage().data_ptr()
        wanted[matrix].append((runs[matrix].index((name, number)), head, layer.heads))
    hooks: list[Any] = []
    swapped: list[tuple[nn.Module, Tensor]] = []
    try:
        for module in model.modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, Tensor) or weight.ndim != 2:
                continue
            choices = wanted.pop(weight.untyped_storage().data_ptr(), None)
            if choices is None:
                continue
            if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
                # nn.MultiheadAttention reads this matrix without calling the module that holds it.
                swapped.append((module, weight))
                module.weight = nn.Parameter(_clear_columns(weight, choices), requires_grad=False)
            else:
                hooks.append(module.register_forward_pre_hook(_make_hook(choices)))
        assert not wanted, "a recorded matrix belongs to no module of the model"
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, weight in swapped:
            module.weight = weight


def _find_layer(layers: Mapping[str, Sequence[LayerHeads]], name: str, number: int, head: int) -> LayerHeads:
    found = layers.get(name, ())
    if not 0 <= number < len(found) or not 0 <= head < found[number].heads or found[number].output is None:
        raise InputError(
            "This head cannot be switched off.",
            asked=f"head {head} of layer {number} of {name[:40]!r}",
            found=", ".join(f"{each}: {len(those)} layers" for each, those in layers.items()),
            because="there is no such head"
            if not 0 <= number < len(found) or not 0 <= head < found[number].heads
            else "the matrix that mixes the heads of this layer is not known",
            instead="a head of the overview",
        )
    return found[number]


def _make_hook(choices: list[tuple[int, int, int]]) -> Any:
    calls = 0

    def hook(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        nonlocal calls
        chosen = [(head, heads) for run, head, heads in choices if run == calls]
        calls += 1
        if not chosen or not inputs or not isinstance(inputs[0], Tensor):
            return None
        mixed = inputs[0].clone()
        for head, heads in chosen:
            dim = mixed.shape[-1] // heads
            mixed[..., head * dim : (head + 1) * dim] = 0
        return (mixed, *inputs[1:])

    return hook


@torch.no_grad()
def _clear_columns(weight: Tensor, choices: list[tuple[int, int, int]]) -> Tensor:
    cleared = weight.detach().clone()
    for _, head, heads in choices:
        dim = cleared.shape[1] // heads
        cleared[:, head * dim : (head + 1) * dim] = 0
    return cleared
