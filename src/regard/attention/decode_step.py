"""Decode fast path: skips validation and backend selection.

A token passes dozens of layers, and each small tensor operation costs as much as reading ten thousand weights. So a
decode step whose queries see intervals of the KV cache goes to the kernel directly: the kernel that `attend` takes for
it, with the same bits. Other patterns and biases would be planned anew for every length, which takes longer than the
step; a few queries have few scores, so these are computed densely.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.attention.description import Attention
from regard.biases import Bias
from regard.caching import lru_cache_bytes, lru_cache_small
from regard.kernels.decode import MAX_QUERIES, run_prepared
from regard.kernels.eager import is_plain_eager
from regard.kernels.key_intervals import find_key_intervals
from regard.kernels.library import missing
from regard.patterns import Lengths, Pattern

DTYPES = (torch.float32, torch.float64)
STEPS_AT_ONCE = 8  # for which the intervals of one query are computed


def decode_step(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, real_lengths: tuple[int, ...] | None = None
) -> Tensor | None:
    """The attention of the newest tokens over a KV cache, or `None` where `attend` has to be called.

    Tensors are `(batch, head, token, dim)`, as `KVCache.append` returns them. `real_lengths` is how many of the last
    keys of each row are its tokens, where rows are padded on the left.
    """
    queries, keys, scale = query.shape[-2], key.shape[-2], attention.scale
    if queries > MAX_QUERIES or attention.feature_map is not None or attention.pattern is None:
        return None
    if attention.pattern.heads is not None:
        return None
    if query.dtype not in DTYPES or not query.is_cpu or len(query) != len(key) or missing() is not None:
        return None
    if not is_plain_eager(query, key, value):
        return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return None
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if scale == 0 or not math.isfinite(scale):
        return None
    if attention.bias is None:
        intervals = find_intervals(attention.pattern, len(query), queries, keys, real_lengths)
        if intervals is not None:
            return run_prepared(query, key, value, *intervals, scale)
    if attention.pattern.rows is not None:
        return None
    return _attend_densely(query, key, value, attention, scale, real_lengths)


def _attend_densely(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: Attention,
    scale: float,
    real_lengths: tuple[int, ...] | None,
) -> Tensor | None:
    """The definition over few rows of scores; `None` for a bias it cannot score, or if something is not finite."""
    bias, pattern = attention.bias, attention.pattern
    if bias is not None and not (isinstance(bias, Bias) and bias.relative):
        return None
    assert pattern is not None
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # (batch, kv_head, group * query, dim)
    scores = (grouped @ key.mT * scale).view(len(query), heads, queries, keys)
    # An infinite key may make a score of minus infinity, which the output does not show.
    is_finite = math.isfinite(float(scores.sum()))
    if bias is not None:
        position = torch.arange(keys)
        scores = scores + bias.scores(position[keys - queries :, None], position).to(scores.dtype)
    scores = scores.masked_fill(_make_mask(pattern, queries, keys, real_lengths), -math.inf)
    weights = scores.softmax(-1).view(len(query), key.shape[1], -1, keys)
    output = (weights @ value).view(len(query), heads, queries, value.shape[3])
    return output if is_finite and math.isfinite(float(output.sum())) else None


# Cached, since all layers of a model share pattern and lengths at each step.


@lru_cache_small(maxsize=64)
def find_intervals(
    pattern: Pattern, batch: int, queries: int, keys: int, real_lengths: tuple[int, ...] | None
) -> tuple[Tensor, Tensor] | None:
    """Start and stop of the keys that each query sees, `(batch, query)`, or `None` where they are no intervals."""
    if pattern.rows not in (None, batch):
        return None
    first, last = keys - queries, keys
    if queries == 1 and pattern.fixed_length is None and pattern.is_shift_invariant() and pattern.supports_kv_cache:
        # The visible keys do not depend on later tokens: one cached result covers the next steps too.
        first -= first % STEPS_AT_ONCE
        last = first + STEPS_AT_ONCE
    intervals = find_key_intervals(pattern, Lengths(last - first, last))
    if intervals is None:
        return None
    intervals = [edge[:, keys - queries - first : keys - first] for edge in intervals]
    with torch.inference_mode(False):  # what is cached outlives the caller's mode
        start, stop = (edge.expand(batch, queries).contiguous() for edge in intervals)
        if real_lengths is not None:
            start = torch.maximum(start, keys - torch.tensor(real_lengths)[:, None])
        return start, stop


@lru_cache_bytes(lambda mask: mask.nbytes)
def _make_mask(pattern: Pattern, queries: int, keys: int, real_lengths: tuple[int, ...] | None) -> Tensor:
    """Which keys few queries do not see, `(query, key)` or `(batch, 1, query, key)`."""
    mask = ~pattern.matrix(queries, keys)
    if real_lengths is not None:
        before = torch.arange(keys) < keys - torch.tensor(real_lengths)[:, None]
        mask = mask | before[:, None, None]
    return mask
