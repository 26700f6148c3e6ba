"""A mask as a pattern, so that Regard's own operators can be given one."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.patterns import Mask, Padding, Pattern


def pattern_of_mask(mask: Tensor, batch: int, queries: int) -> Pattern:
    """The pattern of a mask that broadcasts to `(batch, query, key)`: `Padding` where it is one."""
    if mask.shape[-2] == 1:
        rows = mask[:, 0].expand(batch, -1)
        for side in ("right", "left"):
            if is_padding(rows, side):
                return Padding(rows.sum(-1), side=side)
    return Mask(mask[:, None])


def is_padding(mask: Tensor, side: str) -> bool:
    """Whether in each row of `(batch, token)` all that is hidden lies on one side."""
    place, count = torch.arange(mask.shape[-1]), mask.sum(-1, keepdim=True)
    real = place < count if side == "right" else place >= mask.shape[-1] - count
    return torch.equal(mask, real)


def count_positions(mask: Tensor) -> Tensor:
    """Each token's place among the real ones of its row."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


__all__ = ["count_positions", "is_padding", "pattern_of_mask"]
