"""Plain attention operators and a layer, for tests of laws."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def naive(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(Q Kᵀ / sqrt(d)) V; a row that sees nothing yields zeros."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ value


def causal(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same, and the last query sits on the last key."""
    queries, keys = query.shape[-2], key.shape[-2]
    triangle = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return naive(query, key, value, triangle if mask is None else triangle & mask)


def fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask)


class Layer(nn.Module):
    """Multi-head attention over tokens; `mask` is True for real tokens."""

    def __init__(self, channels: int = 12, heads: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def split(self, x: Tensor) -> list[Tensor]:
        return [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]

    def weights(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        scores = query @ key.mT / query.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.dropout(scores.softmax(-1))

    def merge(self, mixed: Tensor) -> Tensor:
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.split(x)
        return self.merge(self.weights(query, key, mask) @ value)
