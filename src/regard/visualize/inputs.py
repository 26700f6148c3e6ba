"""What a model is shown: a tensor, an array or a list with or without a batch, or a dict of keywords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.layers.multihead import MultiHeadAttention


def read_inputs(model: nn.Module, inputs: tuple[Any, ...], words: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments with which a model is called: one input is read, several are those of the model itself.

    A single dict is the keywords of the call; a single tensor, array or list gets the axis of the batch if it has none.
    """
    if len(inputs) != 1:
        return inputs, dict(words)
    if isinstance(inputs[0], Mapping):
        return (), {str(name): value for name, value in inputs[0].items()} | dict(words)
    return (_add_batch(model, _read_tensor(inputs[0])),), dict(words)


def _read_tensor(input: Any) -> Tensor:
    try:
        found = torch.as_tensor(input)
    except (TypeError, ValueError, RuntimeError) as failure:
        raise InputError(
            "Expected a tensor, an array or a dict of tensors.",
            asked=f"a {type(input).__name__}",
            found=f"{type(failure).__name__}: {failure}",
            because="an input is a tensor, an array, or a dict of them",
            instead="an image (channel, row, column), or tokens; `regard show --image FILE` reads files",
        ) from failure
    if found.is_floating_point() and not bool(found.isfinite().all()):
        raise InputError(
            "The input is not finite.",
            asked=f"an input {tuple(found.shape)}",
            found=f"{int((~found.isfinite()).sum())} of {found.numel()} numbers are nan or infinite",
            because="the attention weights would not be finite either",
            instead="torch.nan_to_num(input), or the image as it was before",
        )
    return found


def _add_batch(model: nn.Module, input: Tensor) -> Tensor:
    if not input.is_floating_point():
        return input[None] if input.ndim == 1 else input
    reads_tokens = isinstance(
        model, MultiHeadAttention | nn.MultiheadAttention | nn.TransformerEncoder | nn.TransformerEncoderLayer
    )
    return input[None] if (input.ndim == 3 and not reads_tokens) or input.ndim == 2 else input
