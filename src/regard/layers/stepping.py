"""A step of decoding without ceremony: what the operator would check and choose is known from the cache.

A token passes dozens of layers, and each small tensor operation costs as much as reading ten thousand weights. So the
common step (few queries, a causal pattern or a window, no bias) goes to the kernel directly. It is the kernel that
`attend` takes for it, with the same bits.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from regard.attention import Attention
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
    queries = query.shape[-2]
    if (
        queries > FEW
        or attention.bias is not None
        or attention.feature_map is not None
        or not _plain(attention.pattern)
        or query.dtype not in DTYPES
        or not query.is_cpu
        or missing() is not None
        or not unwatched(query, key, value)
    ):
        return None
    beta = 1 / math.sqrt(query.shape[-1]) if attention.beta is None else float(attention.beta)
    if beta == 0 or not math.isfinite(beta):
        return None
    left = attention.pattern.left if isinstance(attention.pattern, Window) else None
    start, stop = _seen(len(query), queries, key.shape[-2], left, real)
    return run_prepared(query, key, value, start, stop, beta)


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
