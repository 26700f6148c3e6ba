"""What `regard.use` asks of a layer: a pattern, a bias, a scale."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from regard.biases.base import Bias
from regard.patterns import Pattern

ATTRIBUTE = "_regard_override"


@dataclass(frozen=True, eq=False)
class Override:
    """A change of an attention layer.

    Attributes:
        pattern: joins the mask of the layer: both have to allow a pair.
        bias: is added to the scores.
        scale: replaces the scale of the layer.
        replace_mask: whether the pattern replaces the mask of the layer, of which padding alone is kept.
    """

    pattern: Pattern | None = None
    bias: Bias | Tensor | None = None
    scale: float | None = None
    replace_mask: bool = False


def find_override(module: nn.Module) -> Override | None:
    """The change of this layer, or `None`."""
    return module.__dict__.get(ATTRIBUTE)
