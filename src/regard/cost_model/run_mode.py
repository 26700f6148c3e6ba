"""How a target is run: the step, the backend, the dtype."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

import torch

from regard.errors import CostError

# training is forward and backward; decode is one more token after those that are cached.
STEPS = ("forward", "backward", "training", "decode")


@dataclass(frozen=True)
class RunMode:
    """How a target is run.

    Attributes:
        step: `"forward"`, `"backward"`, `"training"` (both), or `"decode"`: one token after `tokens` in the KV cache.
        backend: whose work is counted. `None` is what the mathematics needs: the pairs of the pattern, and two
            products backward for each one forward. `"reference"` computes the whole attention matrix; `"native"` and
            `"blocked"` the tiles of their plan, and the scores again in backward; `"positional"` the row and column
            products of attention by position alone.
        dtype: of activations and parameters.
        stable: whether a softmax subtracts the maximum first, which takes another reduction.
        serial: whether sums are chains instead of trees.
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
                because=f"steps are {', '.join(STEPS)}",
                instead=f'step="{(get_close_matches(str(self.step), STEPS, 1) or STEPS)[0]}"',
            )
        if self.backend not in (None, "reference", "native", "blocked", "positional"):
            raise CostError(
                f"The work of backend {self.backend!r} has no formula.",
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

    @property
    def counts_hidden_pairs(self) -> bool:
        """Whether causal attention of torch counts as the whole square, as torch's own counter does."""
        return self.backend is not None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}
