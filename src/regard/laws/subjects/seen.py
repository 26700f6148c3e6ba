"""A mask as a pattern, so that Regard's own operators can be given one."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.errors import PatternError
from regard.patterns import Lengths, Padding, Pattern


class Seen(Pattern):
    """Pairs that a boolean mask `(row, query, key)` names; one row serves all."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask.clone()
        self._hash = hash((tuple(mask.shape), mask.numpy().tobytes()))

    def __repr__(self) -> str:
        return f"Seen({self.mask.tolist()})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seen) and torch.equal(self.mask, other.mask)

    def __hash__(self) -> int:
        return self._hash

    @property
    def rows(self) -> int | None:
        return None if len(self.mask) == 1 else len(self.mask)

    @property
    def _opaque(self) -> bool:
        return True

    @property
    def _needs_keys(self) -> bool:
        return True

    def _check(self, lengths: Lengths) -> None:
        if tuple(self.mask.shape[1:]) != tuple(lengths):
            raise PatternError(
                "A mask does not fit the sequence.",
                asked=f"a mask {tuple(self.mask.shape)}",
                found=f"{lengths.queries} queries and {lengths.keys} keys",
                because="every pair needs one answer",
                instead="a mask (row, query, key)",
            )

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        return self.mask[row, i - lengths.offset, j]


def seen(mask: Tensor, batch: int, queries: int) -> Pattern:
    """The pattern of a mask that broadcasts to `(batch, query, key)`: `Padding` where it is one."""
    if mask.shape[-2] == 1:
        rows = mask[:, 0].expand(batch, -1)
        for side in ("right", "left"):
            if is_padding(rows, side):
                return Padding(rows.sum(-1), side=side)
    return Seen(mask.expand(-1, queries, -1))


def is_padding(mask: Tensor, side: str) -> bool:
    """Whether in each row of `(batch, token)` all that is hidden lies on one side."""
    place, count = torch.arange(mask.shape[-1]), mask.sum(-1, keepdim=True)
    real = place < count if side == "right" else place >= mask.shape[-1] - count
    return torch.equal(mask, real)


def positions(mask: Tensor) -> Tensor:
    """Each token's place among the real ones of its row."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


__all__ = ["Seen", "is_padding", "positions", "seen"]
