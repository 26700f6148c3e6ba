"""The escape hatch: a pattern from any predicate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.errors import PatternError
from regard.patterns.base import Pattern
from regard.patterns.box import Lengths


def _fits(shape: torch.Size, wanted: torch.Size) -> bool:
    try:
        return torch.broadcast_shapes(shape, wanted) == wanted
    except RuntimeError:
        return False


@dataclass(frozen=True, repr=False)
class Where(Pattern):
    """Pairs for which `predicate(i, j)` is true; it gets index tensors that broadcast and answers elementwise.

    Nothing is known about a predicate, so planning has to look at every pair once (in tiles, never the whole square).
    Two `Where` are equal when their predicates are the same object: define the predicate once, outside the loop, so
    that its plan is found again.

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
    def _needs_keys(self) -> bool:
        return False

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        answer = self.predicate(i, j)
        answer = torch.as_tensor(answer, device=i.device) if isinstance(answer, bool | np.ndarray) else answer
        shape = torch.broadcast_shapes(i.shape, j.shape)
        if not isinstance(answer, Tensor) or answer.dtype != torch.bool or not _fits(answer.shape, shape):
            found = f"{answer.dtype} of shape {tuple(answer.shape)}" if isinstance(answer, Tensor) else repr(answer)
            raise PatternError(
                "A predicate did not answer elementwise.",
                asked=f"predicate(i, j) for indices that broadcast to {tuple(shape)}",
                found=found,
                because="every pair needs its own True or False",
                instead="comparisons of the index tensors, joined by & | ~",
            )
        return answer
