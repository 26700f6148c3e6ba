"""Attention of a subset of the queries."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from regard.attention import Attention
from regard.patterns import Mask


def restrict_to_queries(described: Attention, places: Tensor, query: Tensor, key: Tensor, first: int = 0) -> Attention:
    """The description for some queries `(*batch, head, place, dim)` over all keys.

    `places` are their absolute positions, and `first` is the position of the first query there is: with `n` queries
    and `m` keys it is `m - n`.
    """
    pattern, bias = described.pattern, described.bias
    if pattern is not None:
        lengths = pattern.lengths(key.shape[-2] - first, key.shape[-2])
        shown = pattern._evaluate_pairs(places[:, None], torch.arange(key.shape[-2], device=places.device), lengths)
        pattern = Mask(shown[:, None] if shown.ndim == 3 else shown)  # (row, place, key) has no heads
    if isinstance(bias, Tensor):
        bias = bias[..., places - first, :] if bias.ndim > 1 and bias.shape[-2] > 1 else bias
    elif bias is not None and bias.needs_content:
        keys = torch.arange(key.shape[-2], device=key.device)
        bias = bias.content_scores(places, keys, query, key.repeat_interleave(query.shape[-3] // key.shape[-3], -3))
    elif bias is not None:
        bias = bias.scores(places[:, None], torch.arange(key.shape[-2], device=key.device)).to(query.dtype)
    return dataclasses.replace(described, pattern=pattern, bias=bias)
