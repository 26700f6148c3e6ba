"""Correct attention written plainly, as third-party code is: no law may report it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import pytest
import torch
from torch import Tensor, nn

from regard import Causal, Where, attend


def slow(*targets):
    """Targets of the slow tests only; similar ones always run."""
    return [pytest.param(target, marks=pytest.mark.slow) for target in targets]


def slow_rows(*rows):
    """As `slow`, for tests of several parameters."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def long(*values):
    """Values that not even continuous integration looks at, only `make slow`; their like is."""
    return [pytest.param(value, marks=[pytest.mark.slow, pytest.mark.long]) for value in values]


def slow_but(fast: Collection[str], names: Iterable[str]):
    """Names of which the fast tests look at some, one of each kind, and the long run at all."""
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in names]


def scores(query: Tensor, key: Tensor) -> Tensor:
    return query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])


def offsets(query: Tensor, key: Tensor) -> Tensor:
    """Query place minus key place, with the last query on the last key."""
    queries, keys = query.shape[-2], key.shape[-2]
    return torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)


def naive(query, key, value, mask=None):
    """A row that sees nothing becomes NaN."""
    found = scores(query, key)
    if mask is not None:
        found = found.masked_fill(~mask, -torch.inf)
    return found.softmax(-1) @ value


def total(found: Tensor, visible: Tensor, value: Tensor) -> Tensor:
    """Softmax that answers zeros for a row that sees nothing."""
    return found.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible, 0.0) @ value


def with_pattern(allowed, bias=None):
    """An operator with a pattern of its own, a function of query place minus key place."""

    def operator(query, key, value, mask=None):
        apart = offsets(query, key)
        found = scores(query, key)
        if bias is not None:
            found = found + bias(apart, query.shape[1])[None].to(found.dtype)
        visible = allowed(apart).expand(found.shape)
        return total(found, visible if mask is None else visible & mask, value)

    return operator


def alibi_bias(apart: Tensor, heads: int) -> Tensor:
    return -(2.0 ** -torch.arange(1, heads + 1))[:, None, None] * apart.abs()


full = with_pattern(lambda apart: apart > -(10**9))
causal = with_pattern(lambda apart: apart >= 0)
window = with_pattern(lambda apart: (apart >= 0) & (apart < 4))
both_ways_window = with_pattern(lambda apart: apart.abs() < 3)
alibi = with_pattern(lambda apart: apart >= 0, alibi_bias)
both_ways_alibi = with_pattern(lambda apart: apart > -(10**9), alibi_bias)


def rotated(x: Tensor, places: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = places[:, None] * 100.0 ** -(torch.arange(half) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


def rotary(query, key, value, mask=None):
    queries, keys = query.shape[-2], key.shape[-2]
    query = rotated(query, torch.arange(queries) + keys - queries)
    return causal(query, rotated(key, torch.arange(keys)), value, mask)


def blocks(query, key, value, mask=None):
    """Each token sees its own block of four, counted from the left edge."""
    queries, keys = query.shape[-2], key.shape[-2]
    places = torch.arange(queries) + keys - queries
    visible = places[:, None] // 4 == torch.arange(keys) // 4
    found = scores(query, key)
    return total(found, (visible if mask is None else visible & mask).expand(found.shape), value)


def robust(query, key, value, mask=None):
    """Hidden keys and values are never multiplied, not even by zero."""
    found = scores(query, key)
    if mask is None:
        return found.softmax(-1) @ value
    mask = mask.expand(found.shape)
    weights = torch.where(mask, found, -torch.inf).softmax(-1).masked_fill(~mask, 0.0)
    products = torch.where(mask[..., None], weights[..., None] * value[:, :, None], 0.0)
    return products.sum(-2)


def ours(query, key, value, mask=None):
    """Regard's own operator, one row of the batch at a time where a mask tells them apart."""
    return _ours(query, key, value, mask, None)


def ours_causal(query, key, value, mask=None):
    return _ours(query, key, value, mask, Causal())


def _ours(query, key, value, mask, pattern):
    if mask is None:
        return attend(query, key, value, pattern=pattern)
    queries, keys = query.shape[-2], key.shape[-2]
    mask = mask.expand(query.shape[0], query.shape[1], queries, keys)
    rows = []
    for row in range(query.shape[0]):
        heads = []
        for head in range(query.shape[1]):
            table = mask[row, head]
            first = keys - queries
            visible = Where(lambda i, j, table=table, first=first: table[(i - first).clamp(0, table.shape[0] - 1), j])
            part = (slice(row, row + 1), slice(head, head + 1))
            own = visible if pattern is None else pattern & visible
            heads.append(attend(query[part], key[part], value[part], pattern=own))
        rows.append(torch.cat(heads, 1))
    return torch.cat(rows)


class Layer(nn.Module):
    """Projections around an operator."""

    def __init__(self, operator=full, channels: int = 12, heads: int = 3, seed: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.operator = operator
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.inward, self.outward = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def split(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.inward(x).chunk(3, -1)]

    def forward(self, x, mask=None):
        output = self.operator(*self.split(x), None if mask is None else mask[:, None, None, :])
        return self.outward(output.transpose(1, 2).flatten(2))


class TorchAttention(nn.Module):
    """torch's own layer; True is a real token here."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.inner = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x, mask=None):
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if self.causal else None
        hidden = None if mask is None else ~mask
        return self.inner(x, x, x, key_padding_mask=hidden, attn_mask=later, need_weights=False)[0]


class TorchEncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.inner = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)

    def forward(self, x, mask=None):
        return self.inner(x, src_key_padding_mask=None if mask is None else ~mask)


class TorchEncoder(nn.Module):
    """Two of them. In evaluation it may pack real tokens into a nested tensor, and unpack them again."""

    def __init__(self, nested: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
            self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)

    def forward(self, x, mask=None):
        return self.inner(x, src_key_padding_mask=None if mask is None else ~mask)


class Words(nn.Module):
    """A tiny model with learned positions: GPT-like if causal, with places counted from the mask; else BERT-like."""

    def __init__(self, causal_model: bool = True, counted: bool | None = None, pooled: bool = False) -> None:
        super().__init__()
        self.counted = causal_model if counted is None else counted
        self.pooled = pooled
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.words, self.places = nn.Embedding(31, 12), nn.Embedding(64, 12)
            operator = causal if causal_model else full
            self.layers = nn.ModuleList(Layer(operator, seed=seed) for seed in (1, 2))
            self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 31)

    def forward(self, ids, mask=None):
        places = torch.arange(ids.shape[1]).expand_as(ids)
        if mask is not None and self.counted:
            places = (mask.long().cumsum(1) - 1).clamp(min=0)
        x = self.words(ids) + self.places(places)
        for layer in self.layers:
            x = x + layer(self.norm(x), mask)
        x = self.head(x)
        if not self.pooled:
            return x
        weight = torch.ones_like(x[..., :1]) if mask is None else mask[..., None].to(x.dtype)
        return (x * weight).sum(1) / weight.sum(1).clamp(min=1)
