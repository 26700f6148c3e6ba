"""What `regard.use` asks of a layer: a pattern, a bias, a scale; kept on the module, where readers find it too."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from regard.biases.base import Bias
from regard.patterns import Pattern

ATTRIBUTE = "_regard_override"  # on a module: a list of overrides, the newest last


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

    @property
    def is_empty(self) -> bool:
        """Whether the layer computes what it did before, by our kernels."""
        return self.pattern is None and self.bias is None and self.scale is None


def find_override(module: nn.Module) -> Override | None:
    """The change of this layer, or `None`: of several the newest."""
    changes = [override for override in module.__dict__.get(ATTRIBUTE, ()) if not override.is_empty]
    return changes[-1] if changes else None
