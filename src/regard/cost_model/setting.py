"""How a thing is run whose cost is asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from regard.errors import CostError

# training is forward and backward; decode is one more token after those that are cached.
STEPS = ("forward", "backward", "training", "decode")


@dataclass(frozen=True)
class Setting:
    """How a thing is run.

    Attributes:
        step: `"forward"`, `"backward"`, `"training"` (both), or `"decode"`: one token more, after `tokens` in a cache.
        backend: whose work is counted. `None` is what the mathematics asks for: the pairs of the pattern, and two
            products backward for each one forward. `"reference"` visits the whole square; `"native"` and `"blocked"`
            visit the blocks of the plan, and compute scores once more on the way back; `"positional"` sums along rows
            and columns, for heads that look by position alone.
        dtype: in which numbers.
        stable: whether a softmax subtracts the largest score first, which takes another reduction.
        serial: whether sums are added one after the other instead of as trees.
    """

    step: str = "forward"
    backend: str | None = None
    dtype: torch.dtype = torch.float32
    stable: bool = True
    serial: bool = False

    def __post_init__(self) -> None:
        if self.step not in STEPS:
            raise CostError(
                f"There is no step {self.step!r}.",
                asked=f"step={self.step!r}",
                because=f"what runs is {', '.join(STEPS)}",
                instead='step="forward"',
            )
        if self.backend not in (None, "reference", "native", "blocked", "positional"):
            raise CostError(
                f"Nobody has counted the work of backend {self.backend!r}.",
                asked=f"backend={self.backend!r}",
                because="known are None (the mathematics), reference, native, blocked and positional",
                instead="backend=None",
            )

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize

    @property
    def wide(self) -> int:
        """Bytes of a number in which sums are taken: half precision is widened to float32."""
        return max(self.item, 4)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}
