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
class CacheFormulas:
    """Formulas of a cache and the numbers of their symbols.

    Attributes:
        per_token: bytes that one more token takes, after N tokens.
        total: bytes after N tokens.
    """

    per_token: sympy.Expr
    total: sympy.Expr
    values: dict[sympy.Symbol, Any]


@dataclass(frozen=True)
class _LayerCache:
    """One cache: of how many heads, how wide, and how far back it reaches; of sums if there are features."""

    kv_heads: int
    key: int
    value: int
    window: int | None = None
    features: int | None = None


NOTHING = CacheFormulas(sympy.Integer(0), sympy.Integer(0), {})


def find_cache_formulas(target: Any, sizes: Sizes, item: int) -> CacheFormulas:
    """The cache of a target; nothing for what does not decode."""
    layers = _list_layers(target, sizes)
    if not layers:
        return NOTHING
    counts = Counter(layers)
    values: dict[sympy.Symbol, Any] = {B: sizes.batch}
    values |= {} if sizes.tokens is None else {N: sizes.tokens}
    per_token: Any = sympy.Integer(0)
    total: Any = sympy.Integer(0)
    for layer, count in counts.items():
        growth, whole, numbers = _find_formulas(layer, count, item)
        if len(counts) > 1:  # a symbol has one number, and here it would have several
            fix_differing = {symbol: sympy.Integer(number) for symbol, number in numbers.items()}
            growth, whole, numbers = growth.xreplace(fix_differing), whole.xreplace(fix_differing), {}
        per_token, total, values = per_token + growth, total + whole, values | numbers
    crosses = [block.cross for block in target.decoder if block.cross] if isinstance(target, Transformer) else []
    if crosses:
        widths = sum(cross.sizes.kv_heads * (cross.sizes.key + cross.sizes.value) for cross in crosses)
        total += item * B * widths * T
        values |= {T: sizes.context_tokens or sizes.tokens} if sizes.context_tokens or sizes.tokens else {}
    return CacheFormulas(per_token, total, values)


def _find_formulas(layer: _LayerCache, count: int, item: int) -> tuple[sympy.Expr, sympy.Expr, dict[sympy.Symbol, Any]]:
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


def _list_layers(target: Any, sizes: Sizes) -> list[_LayerCache]:
    if isinstance(target, Attention):
        return _list_described(target, sizes)
    if isinstance(target, GPT):
        return [_describe_attention(block.attention) for block in target.blocks]
    if isinstance(target, Transformer):
        return [_describe_attention(block.attention) for block in target.decoder]
    if isinstance(target, MultiHeadAttention | TransformerBlock):
        attention = target.attention if isinstance(target, TransformerBlock) else target
        try:
            return [_describe_attention(attention)]
        except CacheError:  # it has no past to keep
            return []
    return _list_third_party(target)


def _describe_attention(attention: MultiHeadAttention) -> _LayerCache:
    sizes, cache = attention.sizes, attention.new_cache()
    if isinstance(cache, KVCache):
        return _LayerCache(sizes.kv_heads, sizes.key, sizes.value, cache.window)
    assert attention.attention.feature_map is not None
    width = feature_map(attention.attention.feature_map).width(sizes.key)
    return _LayerCache(sizes.kv_heads, sizes.key, sizes.value, features=width)


def _list_described(described: Attention, sizes: Sizes) -> list[_LayerCache]:
    pattern = described.pattern
    if pattern is None or not pattern.supports_kv_cache or sizes.dim is None:
        return []
    heads, dim = sizes.kv_heads or sizes.heads or 1, sizes.dim
    value = sizes.value_dim or dim
    if described.feature_map is not None and pattern.is_causal:
        return [_LayerCache(heads, dim, value, features=feature_map(described.feature_map).width(dim))]
    return [_LayerCache(heads, dim, value, pattern.reach if pattern.is_shift_invariant() else None)]


def _list_third_party(target: Any) -> list[_LayerCache]:
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
    return [_LayerCache(getattr(config, "num_key_value_heads", None) or heads, dim, dim)] * layers
