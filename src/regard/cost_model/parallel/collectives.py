"""What a device sends in a training step: every collective with its bytes.

With K devices, and rings, as NCCL and gloo use them for large tensors:

    all-reduce        2 (K - 1) / K of the tensor        gradients (ddp), activations (tensor)
    all-gather          (K - 1) / K of what is gathered  parameters (fsdp)
    reduce-scatter      (K - 1) / K of the tensor        gradients (fsdp)
    ring attention    keys and values that others need, twice; gradients of those that it received, once;
                      in the hard limit keys alone once more before, to find the best score

Gloo computes a reduce-scatter by an all-reduce, which sends twice as much; what is told here is the reduce-scatter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import sympy
from torch import nn

from regard.attention import Attention
from regard.cost_model.cost import Cost
from regard.cost_model.parallel.ring_traffic import RingTokens, find_ring_tokens
from regard.cost_model.parallel.sharding import Units
from regard.cost_model.parallel.strategy import Strategy
from regard.cost_model.sizes import Sizes
from regard.cost_model.symbols import size_symbols
from regard.distributed.sequence_layout import SequenceLayout
from regard.errors import CostError
from regard.features import feature_map
from regard.layers import MultiHeadAttention
from regard.patterns import Full

B, N, D, L, H, G, d, e, K, c = size_symbols("B N D L H G d e K c")
BUCKET = 25 << 20  # bytes of gradients that DDP reduces at once; the last ones have nothing to overlap with
ZERO = sympy.Integer(0)


@dataclass(frozen=True)
class Collective:
    """What a device sends in a step for one purpose; formulas are in bytes.

    Attributes:
        name: what is sent, and when.
        kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"send"` or `"gather sums"`.
        during: `"forward"` or `"backward"`.
        payload: the tensors that are reduced or gathered; of sends, what is sent.
        sent: by the device that sends most.
        alone: the part of `sent` for which there is nothing to compute meanwhile.
        calls: how many collectives or messages these are; None where it depends on the size of buckets.
        by_device: what each device of a group that shares a sequence sends, in bytes, where they differ.
    """

    name: str
    kind: str
    during: str
    payload: Any
    sent: Any
    alone: Any = ZERO
    calls: Any = None
    by_device: tuple[int, ...] = ()

    @property
    def is_attention(self) -> bool:
        """Whether it is ring attention's, which overlaps with attention only."""
        return self.kind in ("send", "gather sums")


def list_gradient_reduction(gradients: sympy.Expr) -> list[Collective]:
    """The all-reduce of DDP."""
    share = 2 * (K - 1) / K
    last = sympy.Min(gradients, BUCKET, evaluate=False)
    return [Collective("gradients", "all-reduce", "backward", gradients, share * gradients, share * last)]


def list_sharded(units: Units, item: int, gathered_item: int) -> list[Collective]:
    """Of FSDP2: every block is gathered twice, the root once, since it keeps its parameters until its backward."""
    share, count = (K - 1) / K, units.count
    reduced = max(item, gathered_item)
    collectives = []
    for name, during, payload, alone, size in (
        ("parameters", "forward", units.total, units.root + units.block, gathered_item),
        ("parameters again", "backward", units.blocks, units.block, gathered_item),
        ("gradients", "backward", units.total, units.root + units.block, reduced),
    ):
        kind = "reduce-scatter" if name == "gradients" else "all-gather"
        calls = count if name == "parameters again" else count + 1
        parts = [sympy.expand(size * amount) for amount in (payload, payload, alone)]
        collectives.append(Collective(name, kind, during, parts[0], share * parts[1], share * parts[2], calls))
    return collectives


def list_tensor_reduction(item: int) -> list[Collective]:
    """Two all-reduces of the activations in every block, forward and again backward (Megatron)."""
    payload = 2 * item * B * D * L * N
    sent = 2 * (K - 1) / K * payload
    return [
        Collective("activations", "all-reduce", "forward", payload, sent, sent, 2 * L),
        Collective("gradients of activations", "all-reduce", "backward", payload, sent, sent, 2 * L),
    ]


# Ring attention


@dataclass(frozen=True)
class RingLayers:
    """Attentions of one pattern and one size, and what travels for them.

    Attributes:
        kv_heads, key, value: heads of keys and values, and their head dims.
        width: numbers of a key and a value together, in all heads; `key_width` of a key alone.
        count: how many layers there are; `layers` is its number.
    """

    attention: Attention
    tokens: RingTokens
    kv_heads: int
    key: int
    value: int
    layers: int
    width: sympy.Expr
    key_width: sympy.Expr
    count: sympy.Expr
    values: dict[sympy.Symbol, Any]

    @property
    def is_hard(self) -> bool:
        return self.attention.scale is not None and math.isinf(self.attention.scale)


def list_ring_layers(target: Any, cost: Cost, sizes: Sizes, strategy: Strategy) -> list[RingLayers]:
    """The attentions of a model, those of one kind together."""
    if sizes.tokens is None:
        raise CostError(
            "A sequence without a length cannot be cut.",
            asked=f"{strategy.shared_by} devices that share a sequence",
            because="which keys travel depends on the number of tokens",
            instead="cost(..., tokens=65_536)",
        )
    layout = SequenceLayout(sizes.tokens, strategy.shared_by, strategy.layout)
    counts: dict[tuple, int] = {}
    described: dict[tuple, Attention] = {}
    for attention, kv_heads, key, value in _list_attentions(target, sizes):
        hard = attention.scale is not None and math.isinf(attention.scale)
        kind = (attention.pattern, repr(attention.feature_map), hard, kv_heads, key, value)
        counts[kind] = counts.get(kind, 0) + 1
        described[kind] = attention
    found = []
    for kind, count in counts.items():
        pattern, _, _, kv_heads, key, value = kind
        tokens = find_ring_tokens(Full() if pattern is None else pattern, layout)
        key_width, width, values = _find_width(kv_heads, key, value, cost)
        alike = len(counts) == 1 and cost.values.get(L) == count
        layers = L if alike else sympy.Integer(count)
        numbers = values | tokens.values
        found.append(
            RingLayers(described[kind], tokens, kv_heads, key, value, count, width, key_width, layers, numbers)
        )
    return found


def _list_attentions(target: Any, sizes: Sizes) -> list[tuple[Attention, int, int, int]]:
    if isinstance(target, Attention):
        if sizes.dim is None:
            raise CostError(
                "An attention has no head dim yet.",
                asked="bytes of its keys",
                because="nothing says how large dim is",
                instead="cost(..., dim=64)",
            )
        kv_heads = _count_key_heads(target, sizes.heads or 1, sizes.kv_heads or sizes.heads or 1)
        return [(target, kv_heads, sizes.dim, sizes.value_dim or sizes.dim)]
    modules = target.modules() if isinstance(target, nn.Module) else ()
    found = [each for each in modules if isinstance(each, MultiHeadAttention)]
    if not found:
        raise CostError(
            f"{type(target).__name__} has no attention whose sequences could be cut.",
            asked="several devices that share a sequence",
            because="only MultiHeadAttention is known to run over several devices",
            instead='strategy="ddp" or "fsdp" without context',
        )
    return [
        (
            each.attention,
            _count_key_heads(each.attention, each.sizes.heads, each.sizes.kv_heads),
            each.sizes.key,
            each.sizes.value,
        )
        for each in found
    ]


def _count_key_heads(attention: Attention, heads: int, kv_heads: int) -> int:
    """How many heads of keys travel: where heads see different keys, every head has its own."""
    return kv_heads if attention.pattern is None or attention.pattern.heads is None else heads


def _find_width(
    kv_heads: int, key: int, value: int, cost: Cost
) -> tuple[sympy.Expr, sympy.Expr, dict[sympy.Symbol, Any]]:
    """Numbers of a key, and of a key and a value, in the letters of the model's own formulas where it has them."""
    known = cost.values
    if all(letter in known for letter in (D, H)) and key == value and key * known[H] == known[D]:
        if G not in known and kv_heads == known[H]:
            return D, 2 * D, {}
        if known.get(G) == kv_heads:
            return D * G / H, 2 * D * G / H, {}
    numbers = {G: kv_heads, d: key} | ({} if value == key else {e: value})
    if any(letter in known and known[letter] != number for letter, number in numbers.items()):
        return sympy.Integer(kv_heads * key), sympy.Integer(kv_heads * (key + value)), {}
    return G * d, G * (2 * d if value == key else d + e), numbers


def list_ring(layers: list[RingLayers], item: int, wide: int, batch: int, strategy: Strategy) -> list[Collective]:
    """Keys and values forward, again backward (and once more if blocks are recomputed), and gradients back."""
    found: dict[str, Collective] = {}

    def add(name: str, kind: str, during: str, sent: Any, alone: Any, calls: Any, by_device: list[int]) -> None:
        before = found.get(name, Collective(name, kind, during, ZERO, ZERO, ZERO, ZERO, (0,) * len(by_device)))
        devices = tuple(a + b for a, b in zip(before.by_device, by_device, strict=True))
        sums = before.sent + sent, before.alone + alone, before.calls + calls
        found[name] = Collective(name, kind, during, sums[0], *sums, devices)

    for each in layers:
        if each.attention.feature_map is not None:
            _add_sums(add, each, wide, batch, strategy)
            continue
        token, tokens = B * each.width * each.count, each.tokens
        number = batch * each.kv_heads * (each.key + each.value) * each.layers
        keys = item * token * tokens.most
        calls, sent = each.count * tokens.steps, [item * number * count for count in tokens.sent]
        if each.is_hard:
            alone = item * B * each.key_width * each.count * tokens.most
            first = [count * each.key // (each.key + each.value) for count in sent]
            add("keys", "send", "forward", alone, ZERO, calls, first)
            if strategy.recompute:
                add("keys again", "send", "backward", alone, ZERO, calls, first)
        add("keys and values", "send", "forward", keys, ZERO, calls, sent)
        again = 2 if strategy.recompute else 1
        backward = [again * count for count in sent]
        add("keys and values again", "send", "backward", again * keys, ZERO, again * calls, backward)
        grads = wide * token * tokens.most_received
        back = [wide * number * count for count in tokens.received]
        add("gradients of keys and values", "send", "backward", grads, wide * token * tokens.piece, calls, back)
    return list(found.values())


def _add_sums(add: Any, layers: RingLayers, wide: int, batch: int, strategy: Strategy) -> None:
    """Linear attention gathers one sum for each chunk of keys, and backward their gradients.

    A sum of phi(k) [v, 1]^T has a row for each feature of a key, and a column for each channel of a value and one more.
    """
    chosen, size = layers.attention.feature_map, strategy.shared_by
    assert chosen is not None
    chunks = 2 if strategy.layout == "zigzag" else 1
    numbers = wide * chunks * layers.kv_heads * feature_map(chosen).width(layers.key) * (layers.value + 1)
    forward = numbers * B * layers.count * (c - 1)
    sent = numbers * batch * layers.layers * (size - 1)
    add("sums of keys and values", "gather sums", "forward", forward, forward, layers.count, [sent] * size)
    if strategy.recompute:
        add("sums again", "gather sums", "backward", forward, forward, layers.count, [sent] * size)
    add("gradients of sums", "gather sums", "backward", forward * c, forward * c, layers.count, [sent * size] * size)
