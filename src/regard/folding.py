"""vmap over tiles: the mapped axis joins the batch, which every backend has anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def fold(size: int, dims: Sequence[int | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """`(mapped, batch, ...)` -> `(mapped * batch, ...)`; a tensor that is not mapped is repeated."""
    folded: list[Tensor | None] = []
    for dim, tensor in zip(dims, tensors, strict=True):
        if tensor is None:
            folded.append(None)
            continue
        moved = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        folded.append(moved.flatten(0, 1))
    return folded


def unfold(size: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(tensor.unflatten(0, (size, -1)) for tensor in tensors)


def one_by_one(
    size: int, dims: Sequence[int | None], arguments: Sequence, call: Callable[..., Sequence[Tensor]]
) -> tuple[Tensor, ...]:
    """The mapped calls one after the other, for what cannot share a batch."""
    results = []
    for number in range(size):
        mine = [
            argument.select(dim, number) if dim is not None and isinstance(argument, Tensor) else argument
            for dim, argument in zip(dims, arguments, strict=True)
        ]
        results.append(call(*mine))
    return tuple(torch.stack(column) for column in zip(*results, strict=True))
