"""A pattern from any predicate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.errors import PatternError
from regard.patterns.base import Pattern
from regard.patterns.box import Lengths


def _is_broadcastable(shape: torch.Size, wanted: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, wanted) == wanted
    except RuntimeError:
        return False


@dataclass(frozen=True, repr=False)
class Where(Pattern):
    """Pairs for which `predicate(i, j)` is true; it takes broadcasting index tensors and returns booleans.

    A predicate is opaque, so planning evaluates every pair once (in tiles, never the whole matrix).
    Two `Where` are equal when their predicates are the same object: define the predicate once, outside the loop, so
    that its plan is cached.

        >>> Where(lambda i, j: (i + j) % 3 == 0).pairs(6)
        12
    """

    predicate: Callable[[Tensor, Tensor], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.predicate):
            raise PatternError(
                "Where needs a function of two index tensors.",
                asked=f"Where({self.predicate!r})",
                because=f"{type(self.predicate).__name__} cannot be called",
                instead="Where(lambda i, j: j <= i), say",
            )

    def __repr__(self) -> str:
        return f"Where({getattr(self.predicate, '__qualname__', self.predicate)})"

    @property
    def _needs_key_length(self) -> bool:
        return False

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        allowed = self.predicate(i, j)
        allowed = torch.as_tensor(allowed, device=i.device) if isinstance(allowed, bool | np.ndarray) else allowed
        shape = torch.broadcast_shapes(i.shape, j.shape)
        if (
            not isinstance(allowed, Tensor)
            or allowed.dtype != torch.bool
            or not _is_broadcastable(allowed.shape, shape)
        ):
            found = f"{allowed.dtype} of shape {tuple(allowed.shape)}" if isinstance(allowed, Tensor) else repr(allowed)
            raise PatternError(
                "A predicate did not return a boolean for each pair.",
                asked=f"predicate(i, j) for indices that broadcast to {tuple(shape)}",
                found=found,
                because="every pair needs its own True or False",
                instead="comparisons of the index tensors, joined by & | ~",
            )
        return allowed
