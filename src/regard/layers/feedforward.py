"""The part of a block that looks at one token at a time."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn import functional

from regard.errors import ConfigError
from regard.kernels.watched import unwatched
from regard.layers.linear import BENDS, Linear, is_bare, linear

PLAIN: dict[str, Callable[[Tensor], Tensor]] = BENDS | {"silu": functional.silu}
GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "reglu": functional.relu,
}


class FeedForward(nn.Module):
    """Two linear layers and a bend between them, the same for every token.

        output = bend(x W1 + b1) W2 + b2                     relu, gelu, gelu_tanh, silu
        output = (bend(x Wg + bg) * (x Wu + bu)) W2 + b2     swiglu, geglu, reglu

    `gelu` is exact, `gelu_tanh` GPT-2's approximation. The two matrices of a gated one lie in one, gate first.

    Sources: Vaswani et al. (2017), section 3.3; Shazeer, GLU Variants Improve Transformer (2020), equation 6.

        >>> from regard.layers import FeedForward
        >>> FeedForward(4, 16)(torch.randn(2, 3, 4)).shape
        torch.Size([2, 3, 4])
    """

    def __init__(
        self, dim: int, hidden: int, activation: str = "gelu", *, bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if activation not in PLAIN and activation not in GATED:
            raise ConfigError(
                f"There is no activation {activation!r}.",
                asked=f"FeedForward(activation={activation!r})",
                because=f"known are {', '.join(PLAIN)} and, gated, {', '.join(GATED)}",
                instead='activation="gelu"',
            )
        self.activation, self.gated = activation, activation in GATED
        self.bend = GATED[activation] if self.gated else PLAIN[activation]
        self.inner = Linear(dim, hidden * 2 if self.gated else hidden, bias=bias)
        self.outer = Linear(hidden, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, up = self.inner(x).chunk(2, -1)
            return self.outer(self.dropout(self.bend(gate) * up))
        if is_scripting():  # such a compiler reads only the branch it takes
            return self.outer(self.dropout(self.bend(self.inner(x))))
        else:
            return self.outer(self.dropout(self._bent(x)))

    def _bent(self, x: Tensor) -> Tensor:
        """The bent channels, in one step where nobody waits for what is before the bend."""
        if unwatched(x) and self.bend is BENDS.get(self.activation) and is_bare(self.inner):
            return linear(x, self.inner.weight, self.inner.bias, self.activation)
        return self.bend(self.inner(x))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


# Over channels: (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al., 2016), and
# x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019).
NORMS: dict[str, type[nn.LayerNorm] | type[nn.RMSNorm]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}

__all__ = ["GATED", "NORMS", "PLAIN", "FeedForward"]
