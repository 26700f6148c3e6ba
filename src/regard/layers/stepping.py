"""A step of decoding without ceremony: what the operator would check and choose is known from the cache.

A token passes dozens of layers, and each small tensor operation costs as much as reading ten thousand weights. So the
common step (few queries, a causal pattern or a window, no bias) goes to the kernel directly. It is the kernel that
`attend` takes for it, with the same bits. Other patterns and biases would be planned anew for every length, which
takes longer than the step; few queries have few scores, so these are formed as they are.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from regard.attention import Attention
from regard.biases import Bias
from regard.kernels.decode import run_prepared
from regard.kernels.library import missing
from regard.kernels.watched import unwatched
from regard.patterns import Causal, Pattern, Window

FEW = 4  # queries for which `attend` reads a cache row by row
DTYPES = (torch.float32, torch.float64)


def step_output(
    query: Tensor, key: Tensor, value: Tensor, real: tuple[int, ...] | None, attention: Attention
) -> Tensor | None:
    """The attention of the newest tokens over a cache, or `None` where only `attend` knows how.

    `real`: how many of the last keys of each row are its tokens, where rows differ.
    """
    queries, beta = query.shape[-2], attention.beta
    if queries > FEW or attention.feature_map is not None or query.dtype not in DTYPES or not query.is_cpu:
        return None
    if not unwatched(query, key, value) or missing() is not None or len(query) != len(key):
        return None
    if torch.is_grad_enabled() and query.requires_grad:
        return None
    beta = 1 / math.sqrt(query.shape[-1]) if beta is None else float(beta)
    if beta == 0 or not math.isfinite(beta):
        return None
    if attention.bias is None and _plain(attention.pattern):
        left = attention.pattern.left if isinstance(attention.pattern, Window) else None
        start, stop = _seen(len(query), queries, key.shape[-2], left, real)
        return run_prepared(query, key, value, start, stop, beta)
    return _by_scores(query, key, value, real, attention, beta)


def _by_scores(
    query: Tensor, key: Tensor, value: Tensor, real: tuple[int, ...] | None, attention: Attention, beta: float
) -> Tensor | None:
    """The definition over few rows of scores; `None` for what it does not know, or if something is not finite."""
    bias, pattern = attention.bias, attention.pattern
    if (
        pattern is None
        or pattern.rows is not None
        or (bias is not None and not (isinstance(bias, Bias) and bias.relative))
    ):
        return None
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    grouped = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # heads that share keys stand below one another
    scores = (grouped @ key.mT * beta).view(len(query), heads, queries, keys)
    if bias is not None:
        position = torch.arange(keys)
        scores = scores + bias.scores(position[keys - queries :, None], position).to(scores.dtype)
    scores = scores.masked_fill(_hidden(pattern, queries, keys, real), -math.inf)
    weights = scores.softmax(-1).view(len(query), key.shape[1], -1, keys)
    output = (weights @ value).view(len(query), heads, queries, value.shape[3])
    return output if math.isfinite(float(output.sum())) else None


@functools.lru_cache(maxsize=8)
def _hidden(pattern: Pattern, queries: int, keys: int, real: tuple[int, ...] | None) -> Tensor:
    """What few queries do not see, `(query, key)` or `(row, 1, query, key)`: made once for all layers."""
    with torch.inference_mode(False):
        hidden = ~pattern.matrix(queries, keys)
        if real is not None:
            before = torch.arange(keys) < keys - torch.tensor(real)[:, None]
            hidden = hidden | before[:, None, None]
        return hidden


def _plain(pattern: Pattern | None) -> bool:
    if isinstance(pattern, Window):
        return pattern.right == 0 and pattern.step == 1
    return isinstance(pattern, Causal)


@functools.lru_cache(maxsize=64)
def _seen(rows: int, queries: int, keys: int, left: int | None, real: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
    """Start and stop of the keys that each query sees, `(row, query)`: made once for all layers."""
    with torch.inference_mode(False):  # what is remembered outlives the caller's mode
        stop = torch.arange(keys - queries + 1, keys + 1).expand(rows, queries).contiguous()
        start = torch.zeros_like(stop) if left is None else (stop - 1 - left).clamp(min=0)
        if real is not None:
            start = torch.maximum(start, keys - torch.tensor(real)[:, None])
        return start, stop.clamp(min=0)
