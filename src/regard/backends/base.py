"""What an attention asks of a backend, and how a backend answers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.biases.base import Bias
from regard.features import FeatureMap
from regard.patterns import Full, Lengths, Pattern
from regard.plan import Plan


@dataclass(frozen=True, eq=False)
class Request:
    """One attention, checked and in one shape: what every backend gets.

    Attributes:
        query: `(batch, head, query, dim)`.
        key: `(batch, kv_head, key, dim)`; query head `h` uses key head `h // group`.
        value: `(batch, kv_head, key, value_dim)`.
        beta: inverse temperature of the content score.
        bias: a positional bias, a tensor that broadcasts to `(batch, head, query, key)`, or nothing.
        feature_map: features whose inner product replaces `exp`, or nothing.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pattern: Pattern
    beta: float
    bias: Bias | Tensor | None = None
    feature_map: FeatureMap | None = None

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.query.shape[2], self.key.shape[2])

    @property
    def hard(self) -> bool:
        return math.isinf(self.beta)

    @property
    def uniform(self) -> bool:
        """Every visible key has the same weight: content is switched off and no bias speaks."""
        return self.beta == 0 and self.bias is None

    @property
    def dense(self) -> bool:
        return isinstance(self.pattern, Full)

    @property
    def needs_gradient(self) -> bool:
        tensors = [self.query, self.key, self.value, *bias_tensors(self.bias)]
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    def describe(self) -> str:
        """What was asked, in two lines."""
        words = [f"pattern {_short(repr(self.pattern))}", f"beta {self.beta:g}"]
        if self.bias is not None:
            words.append("bias " + ("tensor" if isinstance(self.bias, Tensor) else type(self.bias).__name__))
        if self.feature_map is not None:
            words.append(f"feature map {self.feature_map!r}")
        shapes = f"query {tuple(self.query.shape)}  key {tuple(self.key.shape)}  value {tuple(self.value.shape)}"
        return " | ".join(words) + f"\n{shapes}  {str(self.query.dtype)[6:]} on {self.query.device.type}"


def _short(text: str, width: int = 90) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def bias_tensors(bias: Bias | Tensor | None) -> tuple[Tensor, ...]:
    """The tensors of a bias that can be learned."""
    if bias is None:
        return ()
    return (bias,) if isinstance(bias, Tensor) else tuple(bias.parameters())


class Backend(ABC):
    """A way to compute attention. It says in one place what it cannot do, and why."""

    name: str

    @abstractmethod
    def refuse(self, request: Request) -> str | None:
        """Why this backend cannot run the request, or `None` if it can."""

    def reluctance(self, request: Request) -> str | None:
        """Why `auto` should pass over this backend although it could run the request, or `None`."""
        return None

    def merit(self, request: Request) -> str | None:
        """What was measured that puts this backend before the others for such a request, or `None`."""
        return None

    def plan(self, request: Request) -> Plan | None:
        """The plan it follows, or `None` if it follows none."""
        return None

    def macs(self, request: Request) -> int | None:
        """Multiply-adds forward, or `None` for those of all visible pairs."""
        return None

    @abstractmethod
    def run(self, request: Request) -> Tensor:
        """The output `(batch, head, query, value_dim)` of a request that was not refused."""


def accumulation_dtype(request: Request) -> torch.dtype:
    """Half-precision inputs are computed in float32."""
    widest = torch.promote_types(request.query.dtype, request.value.dtype)
    return widest if widest in (torch.float32, torch.float64) else torch.float32
