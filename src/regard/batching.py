"""Batching rules for `torch.vmap`: the mapped axis joins the batch axis, which every kernel has anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def merge_mapped_axis(size: int, dims: Sequence[int | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """`(mapped, batch, ...)` -> `(mapped * batch, ...)`; a tensor that is not mapped is repeated."""
    merged: list[Tensor | None] = []
    for dim, tensor in zip(dims, tensors, strict=True):
        if tensor is None:
            merged.append(None)
            continue
        moved = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        merged.append(moved.flatten(0, 1))
    return merged


def split_mapped_axis(size: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`(mapped * batch, ...)` -> `(mapped, batch, ...)`."""
    return tuple(tensor.unflatten(0, (size, -1)) for tensor in tensors)


def map_one_by_one(
    size: int, dims: Sequence[int | None], arguments: Sequence, call: Callable[..., Sequence[Tensor]]
) -> tuple[Tensor, ...]:
    """The mapped calls one after the other, for arguments that cannot share a batch."""
    results = []
    for number in range(size):
        sample = [
            argument.select(dim, number) if dim is not None and isinstance(argument, Tensor) else argument
            for dim, argument in zip(dims, arguments, strict=True)
        ]
        results.append(call(*sample))
    return tuple(torch.stack(column) for column in zip(*results, strict=True))
