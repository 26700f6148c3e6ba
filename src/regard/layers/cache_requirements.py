"""What an attention requires of a KV cache: which cache keeps all keys that later queries see, and where none does."""

from __future__ import annotations

from torch import Tensor

from regard.attention import Attention
from regard.biases import TransformerXL
from regard.biases.base import Bias
from regard.errors import CacheError


def find_window(attention: Attention) -> int | None:
    """How many tokens before the newest a cache has to keep; `None` for all of them.

    Dropping old tokens also needs a pattern and a bias that depend on distances only.
    """
    check_has_past(attention)
    pattern = attention.pattern
    assert pattern is not None
    return pattern.reach if pattern.is_shift_invariant() and is_shift_invariant(attention.bias) else None


def check_has_past(attention: Attention) -> None:
    if attention.pattern is None or not attention.pattern.supports_kv_cache:
        raise CacheError(
            "This attention cannot be cached.",
            asked=f"a cache for pattern {attention.pattern!r}",
            because="old queries would have to see new keys, or other ones than before",
            instead="Causal() & ..., or IncrementalAttention, which also updates old outputs",
        )


def check_window(attention: Attention, window: int | None, cache: object) -> None:
    """Refuse a cache with which decoding would not give the outputs of the whole sequence."""
    pattern = attention.pattern
    if pattern is None or not pattern.supports_kv_cache:
        because = "old queries would have to see new keys, or other ones than before"
    elif window is None:
        return
    elif (far := pattern.reach) is None or far > window:
        because = f"a query sees {'all' if far is None else far} tokens before it, and {window} are kept"
    elif not pattern.is_shift_invariant() or not is_shift_invariant(attention.bias):
        because = "tokens are dropped, and then the pattern or the bias cannot count from the first one"
    else:
        return
    raise CacheError(
        "This attention cannot be continued from this cache.",
        asked=f"{cache} for pattern {pattern!r} and bias {attention.bias!r}",
        because=because,
        instead="KVCache(), which keeps all tokens, or no cache"
        if window is not None
        else "layer.new_cache(), or no cache",
    )


def check_padded_rows(attention: Attention) -> None:
    """Refuse rows of unequal length for an attention that depends on absolute positions."""
    pattern = attention.pattern
    if fits_padded_rows(attention):
        return
    raise CacheError(
        "Rows of unequal length need an attention that depends on distances only.",
        asked=f"padding on the left with pattern {pattern!r} and bias {attention.bias!r}",
        because="a padded row begins at another position, and the pattern or the bias counts from the first one",
        instead="rows of equal length, or patterns made of Causal, Window and Strided",
    )


def fits_padded_rows(attention: Attention) -> bool:
    """Whether rows may begin at any position: in a packed row, or in one that is padded on the left."""
    pattern = attention.pattern
    return (pattern is None or pattern._supports_left_padding) and is_shift_invariant(attention.bias)


def is_shift_invariant(bias: Bias | Tensor | None) -> bool:
    """Whether the bias stays the same when all positions are shifted."""
    if bias is None or isinstance(bias, Tensor):
        return bias is None
    return (bias.relative or type(bias) is TransformerXL) and getattr(bias, "grid", None) is None
