"""The weights of a layer that does not show them, read off while it runs.

Whatever a layer calls them, its weights are the numbers by which it sums the rows of its tokens: an operand with two
axes of `tokens`, one of which a product sums over. Every torch function that the layer calls passes by here, and that
product is recognised by its shapes. So the length should be unlike every other size: see `fair_lengths`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from regard.adapters import attention_products
from regard.adapters.rng import Rng

if TYPE_CHECKING:
    from regard.adapters.base import Adapter

MATMULS = ("matmul", "__matmul__", "bmm", "mm")
PLUS_MATMULS = ("baddbmm", "addmm", "addbmm")
DIVISIONS = ("div", "true_divide", "divide", "__truediv__", "mul", "multiply", "__mul__", "div_", "mul_")
SOFTMAXES = ("softmax", "_softmax", "softmax_")
# With these answered "no", torch's composite functions show what they call inside.
COMPOSITES = ("torch.nn.functional", "torch.functional")
OPENERS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@dataclass
class AttentionCall:
    """One attention as it was seen.

    Attributes:
        weights: `(batch, head, query, key)`, what multiplied the values.
        value: `(batch, head, key, dim)`, what was multiplied.
        query, key: `(batch, head, token, dim)`, the operands of the scores, if seen.
        scores: `(batch, head, query, key)`, what the softmax was given, if seen.
        scale: the factor of the scores where torch's own attention applied it.
        ordered: whether heads lay on one axis, so that their order is the layer's own.
    """

    weights: Tensor
    value: Tensor
    query: Tensor | None = None
    key: Tensor | None = None
    scores: Tensor | None = None
    scale: float | None = None
    ordered: bool = True
    result: Tensor | None = None
    lost: bool = False
    unsure: bool = False


@dataclass
class ObservedAttention:
    """What was seen in one run: attentions, and rows that were projected by a matrix, `(batch, token, dim)`."""

    calls: list[AttentionCall] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)


def weights(run: Callable[[], object], batch: int, tokens: int) -> list[Tensor]:
    """The weights `(batch, head, query, key)` by which values were summed, in the order of the layers."""
    return [call.weights for call in calls(run, batch, tokens)]


def calls(run: Callable[[], object], batch: int, tokens: int) -> list[AttentionCall]:
    """The attentions of a run, in the order of the layers."""
    return observe(run, batch, tokens).calls


def observe(run: Callable[[], object], batch: int, tokens: int) -> ObservedAttention:
    """Run once and tell what was seen."""
    with torch.no_grad(), _AttentionMode(batch, tokens) as mode:
        run()
    return ObservedAttention([call for call in mode.calls if not call.lost and not call.unsure], mode.rows)


def sizes(run: Callable[[], object]) -> set[int]:
    """The sizes of all axes that occur in a run."""
    with torch.no_grad(), _SizesMode() as mode:
        run()
    return mode.found


def fair_lengths(adapter: Adapter, batch: int, *wanted: int) -> list[int]:
    """Those of the wanted lengths that no other axis in the target has, nor the batch."""
    taken = _fixed_sizes(adapter)
    return [tokens for tokens in adapter.lengths(*wanted) if tokens not in taken and tokens not in (1, batch)]


def _fixed_sizes(adapter: Adapter) -> set[int]:
    """Sizes that occur at any length, and so are not lengths."""
    if adapter not in _FIXED:
        probes = adapter.lengths(5, 7)
        found = []
        for tokens in probes:
            x = adapter.draw(1, tokens, Rng(0, "sizes"))
            found.append(sizes(lambda x=x: adapter.run(x)))
        _FIXED[adapter] = set.intersection(*found) - (set(probes) if len(probes) == 1 else set())
    return _FIXED[adapter]


_FIXED: WeakKeyDictionary[Adapter, set[int]] = WeakKeyDictionary()


class _SizesMode(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _with_composites_open(self, func)(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            if type(leaf) is Tensor or isinstance(leaf, torch.nn.Parameter):
                self.found.update(leaf.shape)
        return out


class _AttentionMode(TorchFunctionMode):
    """A dispatch mode that handles every product, softmax and division."""

    def __init__(self, batch: int, tokens: int) -> None:
        super().__init__()
        self.batch, self.tokens = batch, tokens
        self.calls: list[AttentionCall] = []
        self.rows: list[Tensor] = []
        self.scores: list[tuple[Tensor, Tensor, bool]] = []  # query and key of products that give scores
        self.softmaxed: list[Tensor] = []
        self.summed: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        handle = self._handlers.get(name)
        if handle is None:
            return _with_composites_open(self, func)(*args, **kwargs)
        before = args[0] if args and isinstance(args[0], Tensor) else None
        shown = before.detach().clone() if name in ("div_", "mul_", "softmax_") and before is not None else None
        out = func(*args, **kwargs)
        with suppress(TypeError, ValueError, KeyError, IndexError, RuntimeError):  # what cannot be read is not seen
            handle(self, name, out, (shown, *args[1:]) if shown is not None else args, kwargs)
        return out

    def _on_product(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        left = args[0] if args else kwargs["input"]
        right = args[1] if len(args) > 1 else kwargs.get("other", kwargs.get("mat2"))
        self._record_product(attention_products.of_matmul(left, right, self.batch, self.tokens), out)

    def _on_added_product(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        left = args[1] if len(args) > 1 else kwargs.get("batch1", kwargs.get("mat1"))
        right = args[2] if len(args) > 2 else kwargs.get("batch2", kwargs.get("mat2"))
        self._record_product(attention_products.of_matmul(left, right, self.batch, self.tokens), out)

    def _on_reversed_product(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        self._record_product(attention_products.of_matmul(args[1], args[0], self.batch, self.tokens), out)

    def _on_einsum(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        if isinstance(args[0], str) and len(operands) == 2:
            self._on_division(name, out, operands, {})
            self._record_product(
                attention_products.of_einsum(args[0], operands[0], operands[1], self.batch, self.tokens), out
            )

    def _on_linear(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        self._on_rows(out)

    def _on_softmax(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        scores = args[0] if args else kwargs["input"]
        if sum(size == self.tokens for size in scores.shape) >= 2:
            self.softmaxed.append(scores.detach())

    def _record_product(self, product: attention_products.Product | None, out: Tensor) -> None:
        """Take up a product as scores, as a sum over values, or as a projection."""
        if product is None:
            return
        if product.kind == "rows":
            self._on_rows(out)
        elif product.kind == "scores":
            self.scores.append((product.left, product.right, product.ordered))
        elif self.scores or self.softmaxed:
            call = AttentionCall(product.left, product.right, ordered=product.ordered, result=out)
            self._complete_call(call)
            self.calls.append(call)
            if call.scores is None and any(
                attention_products.shares(product.left, whole) for whole in self.summed[-8:]
            ):
                self._mark_normalised_later(call)

    def _complete_call(self, call: AttentionCall) -> None:
        """Find the query, the key and the scores that belong to these weights: the last ones of their size."""
        shape = call.weights.shape
        for query, key, ordered in reversed(self.scores):
            if (*query.shape[:3], key.shape[2]) == tuple(shape):
                call.query, call.key, call.ordered = query, key, call.ordered and ordered
                break
        for scores in reversed(self.softmaxed):
            if scores.numel() == call.weights.numel() and scores.shape[-2:] == shape[-2:]:
                call.scores = attention_products.by_heads(scores, self.batch)[0]
                break
        self.scores, self.softmaxed = self.scores[-64:], self.softmaxed[-64:]

    def _on_sum(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        whole = args[0] if args else kwargs["input"]
        if tuple(whole.shape[-2:]) == (self.tokens, self.tokens):
            self.summed.append(whole)

    @staticmethod
    def _mark_normalised_later(call: AttentionCall) -> None:
        """Whether scores may be normalised later by operations that are not traced; they are then ignored."""
        if float((call.weights.sum(-1) - 1).abs().max()) > 1e-4:
            call.unsure = True

    def _on_fused_attention(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        """torch's own attention: the weights follow from its arguments."""
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        query, key, value = (given[each].detach() for each in names[:3])
        if query.shape[-2] != self.tokens or key.shape[-2] != self.tokens:
            return
        if given.get("enable_gqa") and key.shape[-3] != query.shape[-3]:
            group = query.shape[-3] // key.shape[-3]
            key, value = (tensor.repeat_interleave(group, -3) for tensor in (key, value))
        scale = given.get("scale")
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        scores = query @ key.transpose(-1, -2) * scale
        if given.get("is_causal"):
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        mask = given.get("attn_mask")
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        exact = torch.softmax(scores, -1)
        parts = [
            attention_products.by_heads(part.expand(*scores.shape[:-2], -1, -1), self.batch)[0]
            for part in (query, key, value)
        ]
        ordered = attention_products.by_heads(scores, self.batch)[1]
        call = AttentionCall(
            attention_products.by_heads(exact, self.batch)[0], parts[2], *parts[:2], ordered=ordered, scale=scale
        )
        call.scores = attention_products.by_heads(scores, self.batch)[0]
        self.calls.append(call)

    def _on_division(self, name: str, out: Tensor, args: Any, kwargs: Any) -> None:
        """Weights may be normalised after the sum: then they are those of the sum, divided by the same."""
        left, right = args[0], args[1] if len(args) > 1 else kwargs.get("other")
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            return
        if "mul" in name and attention_products.spread(left, right, self.tokens) is not None:
            self._record_product(attention_products.spread(left, right, self.tokens, self.batch), out)
        for call in self.calls[-8:]:
            if call.result is None:
                continue
            if call.scores is None and "div" in name and right.shape[-1] == 1 and self.tokens in right.shape:
                self._mark_normalised_later(call)
            for part, factor in ((left, right), (right, left)):
                if not attention_products.shares(part, call.result) or part.numel() == 1 or factor.numel() == 1:
                    continue
                if self.tokens not in factor.shape or factor.shape[-1] == part.shape[-1] == call.result.shape[-1] != 1:
                    continue  # a gate on features, no normaliser of rows
                inverse = name not in ("div", "true_divide", "divide", "__truediv__", "div_")
                self._divide_weights(call, part, factor if not inverse else 1 / factor)
                break

    def _divide_weights(self, call: AttentionCall, part: Tensor, divisor: Tensor) -> None:
        result = call.result
        assert result is not None
        same = part.ndim == result.ndim and part.shape[:-1] == result.shape[:-1] and part.shape[-2] == self.tokens
        if not same or divisor.shape[-1] != 1:
            call.lost = True  # normalised by operations that are not traced
            return
        rows, _ = attention_products.by_heads(divisor.expand(*result.shape[:-1], 1).detach(), self.batch)
        call.weights = call.weights / rows
        call.unsure = False

    def _on_rows(self, out: Tensor) -> None:
        out = out.detach()
        sizes = (self.batch, self.tokens)
        if out.ndim >= 3 and out.shape[:2] == sizes:
            self.rows.append(out.flatten(2))
        elif out.ndim >= 3 and out.shape[:2] == sizes[::-1]:
            self.rows.append(out.transpose(0, 1).flatten(2))
        elif out.ndim == 2 and out.shape[0] == self.batch * self.tokens:
            self.rows.append(out.unflatten(0, sizes))
        elif out.ndim == 4 and out.shape[0] == self.batch and out.shape[2] == self.tokens:
            self.rows.append(out.transpose(1, 2).flatten(2))

    _handlers: ClassVar[dict[str, Callable[..., None]]] = {
        **dict.fromkeys(MATMULS, _on_product),
        **dict.fromkeys(PLUS_MATMULS, _on_added_product),
        **dict.fromkeys(DIVISIONS, _on_division),
        **dict.fromkeys(SOFTMAXES, _on_softmax),
        "__rmatmul__": _on_reversed_product,
        "einsum": _on_einsum,
        "sum": _on_sum,
        "linear": _on_linear,
        "scaled_dot_product_attention": _on_fused_attention,
    }


def _with_composites_open(mode: TorchFunctionMode, func: Any) -> Callable[..., Any]:
    """The function with its inner calls visible to the mode, which torch's composite functions hide."""
    if not isinstance(func, types.FunctionType) or func.__module__ not in COMPOSITES:
        return func
    blind = dict.fromkeys(OPENERS, lambda *_: False)
    body = types.FunctionType(
        func.__code__, {**func.__globals__, **blind}, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__

    def shown(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return body(*args, **kwargs)

    return shown
