"""Initial values of a model's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.layers.multihead import MultiHeadAttention


@torch.no_grad()
def init_weights(
    model: nn.Module,
    init: Callable[[Tensor], Any],
    kinds: tuple[type[nn.Module], ...] = (nn.Linear,),
    *,
    projections: bool = False,
) -> None:
    """Initialise the weights of all modules of some kinds, and set the biases of linear layers to zero.

    init: fills a weight in place; projections: also the query, key and value matrices of attention.
    """
    for module in model.modules():
        if isinstance(module, kinds):
            init(module.weight)  # pyright: ignore[reportArgumentType]
        if projections and isinstance(module, MultiHeadAttention):
            for weight in module.projections.weights():
                init(weight)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def normal(weight: Tensor) -> Tensor:
    """BERT's and GPT-2's: normal with standard deviation 0.02."""
    return nn.init.normal_(weight, std=0.02)


def truncated_normal(weight: Tensor) -> Tensor:
    """The vision models': truncated normal with standard deviation 0.02."""
    return nn.init.trunc_normal_(weight, std=0.02)
