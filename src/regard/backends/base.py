"""The interface of backends: a validated request, and what a backend does with it."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.biases.base import Bias
from regard.dropout import Dropout
from regard.features import FeatureMap
from regard.patterns import Lengths, Pattern
from regard.planner import Plan


@dataclass(frozen=True, eq=False)
class Request:
    """One validated attention in canonical shapes, the argument of every backend.

    Attributes:
        query: `(batch, head, query, dim)`.
        key: `(batch, kv_head, key, dim)`; query head `h` uses key head `h // group`.
        value: `(batch, kv_head, key, value_dim)`.
        scale: inverse temperature of the content score.
        bias: a positional bias, a tensor that broadcasts to `(batch, head, query, key)`, or nothing.
        feature_map: features whose inner product replaces `exp`, or nothing.
        dropout: of the attention weights, or nothing.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pattern: Pattern
    scale: float
    bias: Bias | Tensor | None = None
    feature_map: FeatureMap | None = None
    dropout: Dropout | None = None

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
        return math.isinf(self.scale)

    @property
    def uniform(self) -> bool:
        """Every visible key has the same weight: `scale=0` and no bias."""
        return self.scale == 0 and self.bias is None

    @property
    def reads_content(self) -> bool:
        """Whether queries and keys enter the scores: at `scale=0` only a bias may read them."""
        return self.scale != 0 or (isinstance(self.bias, Bias) and self.bias.needs_content)

    @property
    def dense(self) -> bool:
        return self.pattern.is_full

    def by_row(self, tensor: Tensor) -> Tensor:
        """A tensor whose first axis counts the rows of the pattern, repeated for the batch where that is longer.

        A pattern that differs between heads only has its heads folded into rows, and each batch row has all of them.
        """
        rows = tensor.shape[0]
        return tensor if rows in (1, self.batch) else tensor.repeat(self.batch // rows, *(1,) * (tensor.ndim - 1))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that may require a gradient: query, key, value and the tensors of the bias."""
        return (self.query, self.key, self.value, *bias_tensors(self.bias))

    @property
    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    def keep_graph(self, output: Tensor) -> Tensor:
        """The output of a backend, in the graph of every input that requires a gradient.

        Where a size is zero, nothing is visible or the limits of `scale` do not read an input, its gradient is zero;
        without this, there would be none, and `backward` would raise.
        """
        needs_grad = self.query.requires_grad or self.key.requires_grad or self.value.requires_grad
        if not (needs_grad or self.bias is not None) or not torch.is_grad_enabled():
            return output
        reads_all = self.scale != 0 and not self.hard and 0 not in self.query.shape and 0 not in self.value.shape
        return output if reads_all and output.requires_grad else join_graph(output, *self.tensors)

    def describe(self) -> str:
        """A two-line description for errors."""
        words = [f"pattern {_short(repr(self.pattern))}", f"scale {self.scale:g}"]
        if self.bias is not None:
            words.append("bias " + ("tensor" if isinstance(self.bias, Tensor) else type(self.bias).__name__))
        if self.feature_map is not None:
            words.append(f"feature map {self.feature_map!r}")
        if self.dropout is not None:
            words.append(f"dropout {self.dropout.probability:g}")
        shapes = f"query {tuple(self.query.shape)}  key {tuple(self.key.shape)}  value {tuple(self.value.shape)}"
        return " | ".join(words) + f"\n{shapes}  {str(self.query.dtype)[6:]} on {self.query.device.type}"


def _short(text: str, width: int = 90) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def bias_tensors(bias: Bias | Tensor | None) -> tuple[Tensor, ...]:
    """The tensors of a bias that can be learned."""
    if bias is None:
        return ()
    return (bias,) if isinstance(bias, Tensor) else tuple(bias.parameters())


def join_graph(output: Tensor, *inputs: Tensor | None) -> Tensor:
    """The same numbers, bit by bit, and a gradient of zero for every input that requires one."""
    # An empty slice reads no value, so that no NaN propagates; subtracting zero keeps the sign of a zero.
    for tensor in inputs:
        if tensor is not None and tensor.requires_grad:
            output = output - (tensor[..., :0] if tensor.ndim else tensor[None][:0]).sum().to(output.dtype)
    return output


class Backend(ABC):
    """An implementation of attention. `refuse` says in one place what it cannot do, and why."""

    name: str

    @abstractmethod
    def refuse(self, request: Request) -> str | None:
        """Why this backend cannot run the request, or `None` if it can."""

    def reluctance(self, request: Request) -> str | None:
        """Why `auto` should pass over this backend although it could run the request, or `None`."""
        return None

    def merit(self, request: Request) -> str | None:
        """The measurement that puts this backend before the others for such a request, or `None`."""
        return None

    def plan(self, request: Request) -> Plan | None:
        """The plan it follows, or `None` if it follows none."""
        return None

    def macs(self, request: Request) -> int | None:
        """Multiply-adds forward, or `None` for those of all visible pairs."""
        return None

    def is_opaque(self, request: Request) -> bool:
        """Whether `torch.compile` must break the graph around it: a plan is Python."""
        return False

    @abstractmethod
    def run(self, request: Request) -> Tensor:
        """The output `(batch, head, query, value_dim)` of a request that was not refused."""

    def __call__(self, request: Request) -> Tensor:
        """The same, in the graph of every input that requires a gradient."""
        if torch.compiler.is_compiling():
            if self.is_opaque(request):
                return _run_outside_graph(self, request)
        elif (observer := attention_observer.get()) is not None:
            return observer(request, lambda: request.keep_graph(self.run(request)))
        return request.keep_graph(self.run(request))


# Sees every attention as one request, whichever operations compute it; it must return what the run returns.
Observer = Callable[[Request, Callable[[], Any]], Any]
attention_observer: ContextVar[Observer | None] = ContextVar("attention_observer", default=None)


@contextlib.contextmanager
def observe_attention(observer: Observer) -> Iterator[None]:
    """Hand every attention that runs inside the context to `observer(request, run)`."""
    token = attention_observer.set(observer)
    try:
        yield
    finally:
        attention_observer.reset(token)


def _run_eagerly(backend: Backend, request: Request) -> Tensor:
    return request.keep_graph(backend.run(request))


def _run_outside_graph(backend: Backend, request: Request) -> Tensor:
    """`_run_eagerly` after a graph break. Dynamo is loaded by then; importing it here would take seconds."""
    return torch.compiler.disable(_run_eagerly)(backend, request)  # type: ignore[return-value]


def accumulation_dtype(request: Request) -> torch.dtype:
    """Half-precision inputs are computed in float32."""
    widest = torch.promote_types(request.query.dtype, request.value.dtype)
    return widest if widest in (torch.float32, torch.float64) else torch.float32
