"""L19: the operations counted at run time are those declared."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from regard.adapters.base import Adapter
from regard.adapters.dispatch_mode import HigherOrderDispatchMode
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.law import Case, Law, Observation, expect_true

# Methods by which a target declares its cost, and the operations of one unit.
COST_METHODS = {"flops": 1, "count_flops": 1, "macs": 2}
aten = torch.ops.aten


class CostLaw(Law):
    id = "L19"
    slug = "cost"
    title = "Cost law"
    headline = "the operations counted are not those declared."
    statement = (
        "Operations counted at run time equal the declared ones, grow with the declared power of the sequence length "
        "and linearly with the batch size, and do not depend on the values."
    )
    equation = "count(T) = a + bT + cT²,  c = 0 if growth = 1,  count = declared count"
    catches = "a window computed as full attention, a count that omits queries times keys, work that mixes the batch"
    smallest = {"batch": 1}
    kinds = ("kind",)
    minimum = 3

    def applies(self, subject: Adapter) -> str | None:
        counter = count_operations(subject, 2, subject.lengths(17)[0])
        if counter.unknown:
            return f"its operation {counter.unknown} declares no cost"
        if counter.products + counter.outer == 0:
            return "no product was seen while it ran, so there is nothing to count"
        return super().applies(subject)

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        yield {"batch": 1, "tokens": subject.lengths(23)[0], "kind": "declared"}
        yield {"batch": 3, "tokens": subject.lengths(37)[0], "kind": "declared"}
        yield {"batch": 1, "tokens": 0, "kind": "growth"}
        yield {"batch": 1, "tokens": subject.lengths(23)[0], "kind": "batch"}
        yield {"batch": 2, "tokens": subject.lengths(23)[0], "kind": "content"}
        if isinstance(subject, OperatorAdapter):
            yield {"batch": 1, "tokens": subject.lengths(23)[0], "kind": "heads"}
        if not fast:
            for tokens in subject.lengths(64, 131):
                yield {"batch": 2, "tokens": tokens, "kind": "declared"}

    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        if subject.dtype != subject.native:
            return  # precision costs no operations
        batch, tokens, kind = int(case["batch"]), int(case["tokens"]), case["kind"]
        if kind == "growth":
            yield from self._observe_growth(subject)
        elif kind == "declared":
            declared_count = find_declared_count(subject)
            if declared_count is not None:
                measured, declared = count_operations(subject, batch, tokens).products, declared_count(batch, tokens)
                fact = measured == declared
                yield expect_true(
                    fact, f"is {measured:,}, and it declares {declared:,.0f}", output="the count", changed="nothing"
                )
        elif kind == "batch":
            one, two, three = (
                count_operations(subject, rows, tokens).products for rows in (batch, batch + 1, batch + 2)
            )
            words = f"is {one:,}, {two:,}, {three:,} for {batch}, {batch + 1}, {batch + 2} rows: no straight line"
            yield expect_true(one + three == 2 * two, words, output="the count", changed="the batch")
        elif kind == "content":
            one, two = (count_operations(subject, batch, tokens, seed).products for seed in (0, 1))
            yield expect_true(
                one == two, f"is {one:,} for one input and {two:,} for another", output="the count", changed="x"
            )
        elif kind == "heads":
            yield from self._observe_heads(subject, batch, tokens)

    def _observe_heads(self, subject: Adapter, batch: int, tokens: int) -> Iterator[Observation]:
        assert isinstance(subject, OperatorAdapter)
        if subject.kv_heads != subject.heads:
            return
        counts = []
        for heads in (2, 4, 6):
            inputs = subject.tensors(Rng(0, "heads"), batch, tokens, tokens, heads=heads)
            try:
                with Counter() as counter, torch.no_grad():
                    subject.attend(*inputs)
            except Exception:  # its heads are fixed
                return
            counts.append(counter.products)
        one, two, three = counts
        words = f"is {one:,}, {two:,}, {three:,} for 2, 4, 6 heads: no straight line"
        yield expect_true(one + three == 2 * two, words, output="the count", changed="the heads")

    def _observe_growth(self, subject: Adapter) -> Iterator[Observation]:
        lengths = find_spaced_lengths(subject)
        if lengths is None:
            return
        every = [count_operations(subject, 1, tokens) for tokens in lengths]
        power = subject.conventions.growth
        words: dict[str, Any] = {"output": "the count", "changed": f"the length: {', '.join(map(str, lengths))}"}
        totals = [each.products + each.outer for each in every]
        counts = f"is {', '.join(f'{total:,}' for total in totals)}"
        # Promise or not: never more than the square, which is all that pairs of tokens need.
        worst = max(totals[3] / (4 * totals[1]), totals[2] / (2.25 * totals[1])) if totals[1] else 0.0
        if power is None or power <= 2:
            yield expect_true(worst <= 1.001, f"{counts}: more than the square of the length", **words)
        if power == 1:
            fact = not is_quadratic(totals)
            yield expect_true(fact, f"{counts}: the square of the length, and it declares the length itself", **words)
        elif power == 2:
            fact = is_quadratic(totals) or totals[3] > 3.5 * totals[1] > 0
            yield expect_true(fact, f"{counts}: not the square of the length that it declares", **words)
        elif power is not None and totals[1]:
            found = math.log2(totals[3] / totals[1])
            fact = abs(found - power) < 0.25
            yield expect_true(
                fact, f"{counts}: the length to the power of {found:.2f}, and it declares {power}", **words
            )

    def measure(self, subject: Adapter) -> str | None:
        lengths = find_spaced_lengths(subject)
        if lengths is None:
            return None
        few, many = (count_operations(subject, 1, tokens).products for tokens in (lengths[0], lengths[3]))
        if not few or not many:
            return None
        power = math.log(many / few) / math.log(lengths[3] / lengths[0])
        return f"grows with tokens^{power:.2f}: {many:,} operations for {lengths[3]} tokens"


class Counter(HigherOrderDispatchMode):
    """Counts the operations of products, a multiply-add as two.

    Attributes:
        products: those of matrix products, convolutions and attention.
        outer: those of elementwise products that are larger than either factor: how products are written without them.
        unknown: a custom operation that declares no count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.outer = 0
        self.unknown = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            self.unknown = str(func)
            return self.call(func, args, kwargs)
        packet = func._overloadpacket
        if packet in HIDING or (packet not in flop_registry and packet not in COUNTS):
            # What is made of other operations is taken apart, so that these are seen.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        result = func(*args, **kwargs)
        if packet in COUNTS:
            self.products += int(COUNTS[packet](*args, **kwargs))
        elif packet in flop_registry:
            self.products += int(flop_registry[packet](*args, **kwargs, out_val=result))
        elif packet is aten.mul:
            sizes = [leaf.numel() for leaf in args if isinstance(leaf, Tensor)]
            if len(sizes) == 2 and result.numel() > max(sizes):
                self.outer += 2 * result.numel()
        elif (packet in HIDING or func.namespace not in PLAIN) and any(map(_is_float_tensor, tree_leaves(result))):
            self.unknown = str(packet)
        return result


def _is_float_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _count_attention_flops(query: Tensor, key: Tensor, value: Tensor, *more: Any, **other: Any) -> int:
    """Scores and their sums over values: 2 B H Q K (D + V)."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


COUNTS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _count_attention_flops,
    aten._scaled_dot_product_fused_attention_overrideable: _count_attention_flops,
    aten.mv: lambda matrix, vector: 2 * matrix.numel(),
    aten.addmv: lambda bias, matrix, vector, **more: 2 * matrix.numel(),
    aten.dot: lambda one, other: 2 * one.numel(),
    aten.addbmm: lambda bias, one, other, **more: 2 * one.numel() * other.shape[-1],
    aten.addr: lambda bias, one, other, **more: 2 * one.numel() * other.numel(),
}
# Operations of torch itself, all of whose products are counted.
PLAIN = ("aten", "prims", "prim", "profiler")
# Whole layers in one operation, whose products cannot be counted.
HIDING = (aten._native_multi_head_attention, aten._transformer_encoder_layer_fwd, aten._cdist_forward)


@contextmanager
def _disable_fast_path() -> Iterator[None]:
    """Without torch's fast path for whole layers, which hides the products."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@torch.no_grad()
def count_operations(subject: Adapter, batch: int, tokens: int, seed: int = 0) -> Counter:
    """The operations of one run."""
    x = subject.draw(batch, tokens, Rng(seed, "cost"))
    with _disable_fast_path(), Counter() as counter:
        subject.run(x)
    return counter


def find_declared_count(subject: Adapter) -> Callable[[int, int], float] | None:
    """The declared cost of one run, as a function of batch size and tokens."""
    for holder in (subject, subject.target):
        for name, worth in COST_METHODS.items():
            method: Any = getattr(holder, name, None)
            if not callable(method):
                continue
            try:
                needed = len(inspect.signature(method).parameters)
            except (TypeError, ValueError):
                continue
            if needed in (1, 2):
                return _read_declared_count(method, worth, alone=needed == 1)
    return None


def find_spaced_lengths(subject: Adapter) -> list[int] | None:
    """Four lengths at equal distances, above every usual window and multiples of every usual block."""
    for step in (256, 128, 64, 32, 16, 8):
        lengths = [step * times for times in (1, 2, 3, 4)]
        if subject.lengths(*lengths) == lengths:
            return lengths
    return None


def is_quadratic(counts: list[int]) -> bool:
    """Whether counts at equal distances have the same second difference throughout, as a square has."""
    first, second = counts[0] - 2 * counts[1] + counts[2], counts[1] - 2 * counts[2] + counts[3]
    return first > 0 and second > 0 and 0.8 < second / first < 1.25


def _read_declared_count(method: Any, worth: int, alone: bool) -> Callable[[int, int], float]:
    if alone:
        return lambda batch, tokens: worth * batch * method(tokens)
    return lambda batch, tokens: worth * method(batch, tokens)
