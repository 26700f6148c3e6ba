"""The position-wise feed-forward layer, and the norms of a block."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn import functional

from regard.errors import ConfigError
from regard.kernels.eager import is_plain_eager
from regard.layers.linear import ACTIVATIONS, Linear, can_fuse_residual, is_plain_linear, is_plain_module, linear

PLAIN: dict[str, Callable[[Tensor], Tensor]] = ACTIVATIONS | {"silu": functional.silu}
GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,
    "reglu": functional.relu,
}


class FeedForward(nn.Module):
    """Two linear layers and an activation between them, the same for every token.

        output = act(x W1 + b1) W2 + b2                     relu, gelu, gelu_tanh, silu
        output = (act(x Wg + bg) * (x Wu + bu)) W2 + b2     swiglu, geglu, reglu

    `gelu` is exact, `gelu_tanh` GPT-2's approximation. The two matrices of a gated one lie in one, gate first.

    Sources: Vaswani et al. (2017), section 3.3; Shazeer, GLU Variants Improve Transformer (2020), equation 6.

        >>> from regard.layers import FeedForward
        >>> FeedForward(4, 16)(torch.randn(2, 3, 4)).shape
        torch.Size([2, 3, 4])

    Args:
        dim: channels of the tokens.
        hidden_dim: channels between the two layers.
        activation: one of the names above.
        bias: whether the linear layers have a bias.
        dropout: on the hidden channels, while training.
    """

    def __init__(
        self, dim: int, hidden_dim: int, activation: str = "gelu", *, bias: bool = True, dropout: float = 0.0
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
        self.activation_fn = self.find_activation(activation)
        self.inner = Linear(dim, hidden_dim * 2 if self.gated else hidden_dim, bias=bias)
        self.outer = Linear(hidden_dim, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, up = self.inner(x).chunk(2, -1)
            return self.outer(self.dropout(self.activation_fn(gate) * up))
        if is_scripting():  # torch.jit.script compiles only the branch it takes
            return self.outer(self.dropout(self.activation_fn(self.inner(x))))
        else:
            return self.outer(self.dropout(self._expand(x)))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`, in one pass over the result where that is possible."""
        drops = (self.training and self.dropout.p > 0) or not is_plain_module(self.dropout, nn.Dropout)
        if drops or not can_fuse_residual(self, FeedForward, self.outer, residual, x):
            return residual + self(x)
        if self.gated:
            gate, up = self.inner(x).chunk(2, -1)
            hidden = self.activation_fn(gate) * up
        else:
            hidden = self._expand(x)
        return linear(hidden, self.outer.weight, self.outer.bias, residual=residual)

    def _expand(self, x: Tensor) -> Tensor:
        """The hidden channels after the activation, which gemm fuses where no gradient is needed."""
        if is_plain_eager(x) and self.activation_fn is ACTIVATIONS.get(self.activation) and is_plain_linear(self.inner):
            return linear(x, self.inner.weight, self.inner.bias, self.activation)
        return self.activation_fn(self.inner(x))

    @staticmethod
    def find_activation(name: str) -> Callable[[Tensor], Tensor]:
        """The function of an activation's name."""
        return GATED[name] if name in GATED else PLAIN[name]

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


# Over channels: (x - mean) / sqrt(variance + eps) * weight + bias (Ba et al., 2016), and
# x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019).
NORMS: dict[str, type[nn.LayerNorm] | type[nn.RMSNorm]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}

__all__ = ["GATED", "NORMS", "PLAIN", "FeedForward"]
