"""The order in memory of an attention's outputs and gradients: that of its inputs.

A projection writes the heads of a token side by side, `(batch, token, head, dim)`, and attention reads views of it. Its
output in the same order is read in place by the projection after it, and gradients of query, key and value that lie
side by side in one matrix are read in place by the backward of the projection before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.kernels.library import empty_output


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return empty_output(*shape, dtype=dtype)


def _is_token_major(tensor: Tensor) -> bool:
    return tensor.shape[1] > 1 and tensor.stride(3) == 1 and tensor.stride(1) < tensor.stride(2)


def allocate_output(query: Tensor, dim: int, dtype: torch.dtype, allocate: Callable[..., Any] = _allocate) -> Tensor:
    """Memory for the output `(batch, head, query, dim)`, in the order of the query."""
    batch, heads, queries, _ = query.shape
    if _is_token_major(query):
        return allocate((batch, queries, heads, dim), dtype=dtype).transpose(1, 2)
    return allocate((batch, heads, queries, dim), dtype=dtype)


def allocate_grads(
    query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype, allocate: Callable[..., Any] = _allocate
) -> list[Tensor]:
    """Memory for the gradients: side by side if query, key and value are token-major and equally long."""
    inputs = (query, key, value)
    if not _is_token_major(query) or query.shape[2] != key.shape[2]:
        return [allocate(tuple(tensor.shape), dtype=dtype) for tensor in inputs]
    widths = [tensor.shape[1] * tensor.shape[3] for tensor in inputs]
    joint = allocate((query.shape[0], query.shape[2], sum(widths)), dtype=dtype)
    return [
        part.unflatten(-1, (tensor.shape[1], tensor.shape[3])).transpose(1, 2)
        for part, tensor in zip(joint.split(widths, dim=-1), inputs, strict=True)
    ]
