"""What a decoder remembers of its past: bytes of a cache after so many tokens.

keys and values     item B L G (d + e)            for each token
a window            the same for 2 w + 1 tokens   however many there were, once there were more than w
linear attention    item B L G r (e + 1)          however many there were
another text        item B L H (d + e) T          once, for attention to an encoder's T tokens
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import sympy
from torch import nn

from regard.attention import Attention
from regard.cost_model.sizes import Sizes
from regard.cost_model.symbols import size_symbols
from regard.errors import CacheError
from regard.features import feature_map
from regard.layers import KVCache, MultiHeadAttention, TransformerBlock
from regard.models import GPT, Transformer

B, L, G, d, e, r, w, N, T = size_symbols("B L G d e r w N T")


@dataclass(frozen=True)
class Cached:
    """Formulas of a cache and the numbers of their letters.

    Attributes:
        per_token: bytes that one more token takes, after N tokens.
        total: bytes after N tokens.
    """

    per_token: sympy.Expr
    total: sympy.Expr
    values: dict[sympy.Symbol, Any]


@dataclass(frozen=True)
class _Layer:
    """One cache: of how many heads, how wide, and how far back it reaches; of sums if there are features."""

    kv_heads: int
    key: int
    value: int
    window: int | None = None
    features: int | None = None


NOTHING = Cached(sympy.Integer(0), sympy.Integer(0), {})


def cached(target: Any, asked: Sizes, item: int) -> Cached:
    """The cache of a target; nothing for what does not decode."""
    layers = _layers(target, asked)
    if not layers:
        return NOTHING
    counts = Counter(layers)
    values: dict[sympy.Symbol, Any] = {B: asked.batch}
    values |= {} if asked.tokens is None else {N: asked.tokens}
    per_token: Any = sympy.Integer(0)
    total: Any = sympy.Integer(0)
    for layer, count in counts.items():
        growth, whole, numbers = _of(layer, count, item)
        if len(counts) > 1:  # a letter has one number, and here it would have several
            settled = {letter: sympy.Integer(number) for letter, number in numbers.items()}
            growth, whole, numbers = growth.xreplace(settled), whole.xreplace(settled), {}
        per_token, total, values = per_token + growth, total + whole, values | numbers
    crosses = [block.cross for block in target.decoder if block.cross] if isinstance(target, Transformer) else []
    if crosses:
        widths = sum(cross.sizes.kv_heads * (cross.sizes.key + cross.sizes.value) for cross in crosses)
        total += item * B * widths * T
        values |= {T: asked.context_tokens or asked.tokens} if asked.context_tokens or asked.tokens else {}
    return Cached(per_token, total, values)


def _of(layer: _Layer, count: int, item: int) -> tuple[sympy.Expr, sympy.Expr, dict[sympy.Symbol, Any]]:
    numbers: dict[sympy.Symbol, Any] = {L: count, G: layer.kv_heads, d: layer.key}
    value = d if layer.value == layer.key else e
    numbers |= {} if value is d else {e: layer.value}
    if layer.features is not None:
        features = d if layer.features == layer.key else r
        numbers |= {} if features is d else {r: layer.features}
        return sympy.Integer(0), item * B * L * G * features * (value + 1), numbers
    one = item * B * L * G * (d + value)
    if layer.window is None:
        return one, one * N, numbers
    held = sympy.Piecewise((N, w >= N), (2 * w + 1, True))
    return sympy.Piecewise((one, w >= N), (0, True)), one * held, numbers | {w: layer.window}


def _layers(target: Any, asked: Sizes) -> list[_Layer]:
    if isinstance(target, Attention):
        return _of_description(target, asked)
    if isinstance(target, GPT):
        return [_of_attention(block.attention) for block in target.blocks]
    if isinstance(target, Transformer):
        return [_of_attention(block.attention) for block in target.decoder]
    if isinstance(target, MultiHeadAttention | TransformerBlock):
        attention = target.attention if isinstance(target, TransformerBlock) else target
        try:
            return [_of_attention(attention)]
        except CacheError:  # it has no past to keep
            return []
    return _of_stranger(target)


def _of_attention(attention: MultiHeadAttention) -> _Layer:
    sizes, cache = attention.sizes, attention.new_cache()
    if isinstance(cache, KVCache):
        return _Layer(sizes.kv_heads, sizes.key, sizes.value, cache.window)
    assert attention.attention.feature_map is not None
    width = feature_map(attention.attention.feature_map).width(sizes.key)
    return _Layer(sizes.kv_heads, sizes.key, sizes.value, features=width)


def _of_description(described: Attention, asked: Sizes) -> list[_Layer]:
    pattern = described.pattern
    if pattern is None or not pattern.supports_kv_cache or asked.dim is None:
        return []
    heads, dim = asked.kv_heads or asked.heads or 1, asked.dim
    value = asked.value_dim or dim
    if described.feature_map is not None and pattern.is_causal:
        return [_Layer(heads, dim, value, features=feature_map(described.feature_map).width(dim))]
    return [_Layer(heads, dim, value, pattern.reach if pattern.is_shift_invariant() else None)]


def _of_stranger(target: Any) -> list[_Layer]:
    """A decoder of the transformers library says what it is in its configuration."""
    config, writes = getattr(target, "config", None), getattr(target, "can_generate", None)
    if not isinstance(target, nn.Module) or config is None or not callable(writes) or not writes():
        return []
    if getattr(config, "is_encoder_decoder", False):
        return []
    found = [getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")]
    layers, heads, width = (size if isinstance(size, int) else 0 for size in found)
    if not layers or not heads:
        return []
    dim = getattr(config, "head_dim", None) or width // heads
    return [_Layer(getattr(config, "num_key_value_heads", None) or heads, dim, dim)] * layers
