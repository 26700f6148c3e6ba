"""A formula held against a real run, for modules that read images or grids."""

from __future__ import annotations

from typing import Any

import torch
from cost_model.counting import count, kept_bytes
from torch import Tensor, nn

from regard.cost_model import cost


def assert_formulas_hold(module: nn.Module, x: Tensor, image: tuple[int, int], **kwargs: Any) -> None:
    """Parameters, products both ways, exponentials and what is kept are those of a run on the reference backend."""
    sizes = {"batch": len(x), "image": image, "backend": "reference"}
    forward = cost(module, **sizes)
    assert forward.parameters == sum(parameter.numel() for parameter in module.parameters())
    run = count(module, x, **kwargs)
    assert forward.macs == run.macs
    assert forward.exponentials == run.exponentials
    assert cost(module, step="backward", **sizes).macs == count(module, x, backward=True, **kwargs).macs
    assert forward.activation_bytes == kept_bytes(module, x, **kwargs)
    assert forward.normalised == normalised(module, x, **kwargs)


def normalised(module: nn.Module, x: Tensor, **kwargs: Any) -> int:
    """Numbers that the norms of a run read."""
    total = 0

    def read(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal total
        total += inputs[0].numel()

    hooks = [norm.register_forward_pre_hook(read) for norm in module.modules() if isinstance(norm, nn.LayerNorm)]
    with torch.no_grad():
        module(x, **kwargs)
    for hook in hooks:
        hook.remove()
    return total
