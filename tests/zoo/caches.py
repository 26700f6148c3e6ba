"""Caches whose decoded output differs from that of the whole sequence."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from zoo.exhibit import Exhibit, report


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).flatten(2)


def lower_right(rows, columns):
    return torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)


def rotate(x, start):
    """Rotary positions from `start` on, halves rotated against each other."""
    half = x.shape[-1] // 2
    rate = 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (start + torch.arange(x.shape[-2], dtype=torch.float64))[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Cached(nn.Module):
    """Self-attention with a growing cache of `(key, value)`."""

    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def project(self, x):
        return [heads_of(f(x), self.heads) for f in (self.q, self.k, self.v)]


# CA8: the triangle is made together with the cache


class TrianglePerCall(Cached):
    def new_cache(self):
        return {}

    def mask(self, rows, columns, cache):
        return lower_right(rows, columns)

    def forward(self, x, cache=None):
        q, k, v = self.project(x)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache.update(k=k, v=v)
        mask = self.mask(q.shape[2], k.shape[2], cache)
        return self.o(merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


class TriangleWithTheCache(TrianglePerCall):
    def mask(self, rows, columns, cache):
        return None if cache is None else super().mask(rows, columns, cache)


# KV1: cross-attention beside rotary self-attention


class RotaryDecoder(nn.Module):
    """Rotary self-attention, then attention to a fixed memory without positions."""

    def __init__(self, dim=16, heads=2, source=5):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv, self.cross_q, self.cross_kv = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.register_buffer("encoded", torch.randn(source, dim))

    def cross_query(self, q, start):
        return q

    def forward(self, x, cache=None):
        past_k, past_v = cache if cache is not None else (None, None)
        start = 0 if past_k is None else past_k.shape[2]
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        q, k = rotate(q, start), rotate(k, start)
        if past_k is not None:
            k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        x = x + merged(F.scaled_dot_product_attention(q, k, v, attn_mask=lower_right(q.shape[2], k.shape[2])))
        q = self.cross_query(heads_of(self.cross_q(x), self.heads), start)
        mk, mv = (heads_of(part, self.heads) for part in self.cross_kv(self.encoded)[None].chunk(2, -1))
        mk, mv = mk.expand(x.shape[0], -1, -1, -1), mv.expand(x.shape[0], -1, -1, -1)
        return x + merged(F.scaled_dot_product_attention(q, mk, mv)), (k, v)


class RotatedAcross(RotaryDecoder):
    def cross_query(self, q, start):
        return rotate(q, start) if start else q  # the positions of the step are still lying about


# KV2, KV11, KV13: rotary positions and the cache


class Rotary(Cached):
    """Keys are cached as they are after rotation."""

    def forward(self, x, cache=None):
        q, k, v = self.project(x)
        start = 0 if cache is None else cache[0].shape[2]
        q, k = self.turned(q, k, start)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        k_seen = self.seen(k, start)
        y = self.attend(q, k_seen, v)
        return self.o(merged(y)), (k_seen, v)

    def turned(self, q, k, start):
        return rotate(q, start), rotate(k, start)

    def seen(self, k, start):
        return k

    def attend(self, q, k, v):
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~lower_right(q.shape[2], k.shape[2]), -torch.inf)
        return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


class RotatedAgain(Rotary):
    def seen(self, k, start):
        return rotate(k, 0) if start else k  # already rotated ones among them


class QueryAtZero(Rotary):
    def turned(self, q, k, start):
        return rotate(q, 0), rotate(k, start)


class UpperLeftSteps(Rotary):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)


# KV3: learned positions that start again with every piece


class SmallGpt(nn.Module):
    def __init__(self, vocab=23, dim=16, heads=4, max_len=300):
        super().__init__()
        self.heads = heads
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ln = nn.LayerNorm(dim)

    def start(self, past):
        return 0 if past is None else past[0].shape[2]

    def forward(self, ids, past_key_values=None, use_cache=True):
        place = self.start(past_key_values) + torch.arange(ids.shape[1])
        x = self.wte(ids) + self.wpe(place)
        q, k, v = (heads_of(part, self.heads) for part in self.c_attn(self.ln(x)).chunk(3, -1))
        if past_key_values is not None:
            k, v = torch.cat([past_key_values[0], k], 2), torch.cat([past_key_values[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=lower_right(q.shape[2], k.shape[2]))
        return (x + self.c_proj(merged(y))) @ self.wte.weight.T, (k, v)


class GptFromZero(SmallGpt):
    def start(self, past):
        return 0


# KV4: a cache of fixed size whose empty slots are seen


class StaticCache(Cached):
    slots = 192

    def forward(self, x, cache=None):
        q, k, v = self.project(x)
        b, h, t, d = q.shape
        if cache is None:
            room = (torch.zeros(b, h, self.slots, d, dtype=x.dtype), torch.zeros(b, h, self.slots, d, dtype=x.dtype), 0)
        else:
            room = (cache[0].clone(), cache[1].clone(), cache[2])
        keys, values, used = room
        if used + t > self.slots:
            raise ValueError(f"the cache has {self.slots} slots")
        keys[:, :, used : used + t], values[:, :, used : used + t] = k, v
        y = self.attend(q, keys, values, used)
        return self.o(merged(y)), (keys, values, used + t)

    def attend(self, q, keys, values, used):
        place = used + torch.arange(q.shape[2])
        mask = torch.arange(self.slots)[None, :] <= place[:, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


class EmptySlotsSeen(StaticCache):
    def attend(self, q, keys, values, used):
        if q.shape[2] == 1:  # "a single query needs no mask"
            return F.scaled_dot_product_attention(q, keys, values)
        return super().attend(q, keys, values, used)


# KV10: T5's bias of relative positions


class RelativeBias(Cached):
    def __init__(self, dim=16, heads=2, reach=12):
        super().__init__(dim, heads)
        self.reach = reach
        self.bias = nn.Embedding(2 * reach + 1, heads)
        nn.init.normal_(self.bias.weight)

    def places(self, rows, columns):
        return torch.arange(columns - rows, columns)[:, None], torch.arange(columns)[None, :]

    def forward(self, x, cache=None):
        q, k, v = self.project(x)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        i, j = self.places(q.shape[2], k.shape[2])
        bias = self.bias((j - i).clamp(-self.reach, self.reach) + self.reach).permute(2, 0, 1)
        scores = q @ k.mT + bias
        scores = scores.masked_fill(~lower_right(q.shape[2], k.shape[2]), -torch.inf)
        return self.o(merged(scores.softmax(-1) @ v)), (k, v)


class BiasFromZero(RelativeBias):
    def places(self, rows, columns):
        return torch.arange(rows)[:, None], torch.arange(columns)[None, :]


# KV6 and a window of our own: rolling caches


class RollingCache(Cached):
    """Each token sees itself and the five before it; the cache keeps no more than that."""

    window = 6

    def kept(self, k):
        return max(0, k.shape[2] - (self.window - 1))

    def allowed(self, rows, columns):
        i, j = torch.arange(columns - rows, columns)[:, None], torch.arange(columns)[None, :]
        return (j <= i) & (j > i - self.window)

    def forward(self, x, cache=None):
        q, k, v = self.project(x)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.allowed(q.shape[2], k.shape[2]))
        first = self.kept(k)
        return self.o(merged(y)), (k[:, :, first:], v[:, :, first:])


class MoreThanAdvertised(RollingCache):
    """A piece of several tokens finds more columns than the mask was made for; the mask is cut on the wrong side."""

    def allowed(self, rows, columns):
        mask = super().allowed(rows, columns)
        if 1 < rows < columns and columns > self.window:
            extra = columns - self.window
            mask = torch.cat([mask[:, extra:], mask.new_zeros(rows, extra)], 1)
        return mask


class OneTooFew(RollingCache):
    def kept(self, k):
        return max(0, k.shape[2] - (self.window - 2))


# KV14: a recurrent state that long pieces do not read


class LinearState(nn.Module):
    """Causal linear attention with a decay; the cache is the running sum of outer products."""

    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)

    def first(self, state, tokens):
        return state

    def forward(self, x, state=None):
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        k = k.softmax(-1)
        if state is None:
            state = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=x.dtype)
        memory, rows = self.first(state, x.shape[1]), []
        for t in range(x.shape[1]):
            memory = 0.9 * memory + k[:, :, t, :, None] * v[:, :, t, None, :]
            rows.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], memory))
        return merged(torch.stack(rows, 2)), memory


class ChunksStartAfresh(LinearState):
    def first(self, state, tokens):
        return state if tokens == 1 else torch.zeros_like(state)


CACHED = ("cache", "determinism")
BOTH = ("cache", "causality")

EXHIBITS = [
    Exhibit(
        "CA8",
        report("meta-pytorch/torchtune/issues/959"),
        "The triangle is made together with the cache, and without a cache there is none.",
        "layer",
        TriangleWithTheCache,
        TrianglePerCall,
        ("causality", "cache"),
        ("causality", "cache", "determinism"),
    ),
    Exhibit(
        "KV1",
        report("lucidrains/x-transformers/issues/311"),
        "With a cache the queries of cross-attention are rotated too.",
        "layer",
        RotatedAcross,
        RotaryDecoder,
        ("cache",),
        BOTH,
    ),
    Exhibit(
        "KV2",
        report("lucidrains/x-transformers/issues/219"),
        "Keys that were rotated before they were cached are rotated again.",
        "layer",
        RotatedAgain,
        Rotary,
        ("cache",),
        BOTH,
    ),
    Exhibit(
        "KV3",
        report("lucidrains/x-transformers/issues/322"),
        "Every piece is embedded as if it stood at the start.",
        "model",
        GptFromZero,
        SmallGpt,
        ("cache",),
        BOTH,
    ),
    Exhibit(
        "KV4",
        report("huggingface/transformers/pull/30437"),
        "A single query attends to the slots that nothing was written to.",
        "layer",
        EmptySlotsSeen,
        StaticCache,
        ("cache",),
        CACHED,
    ),
    Exhibit(
        "KV6",
        report("huggingface/transformers/pull/48280"),
        "The cache of a window hands out more columns than the mask was made for.",
        "layer",
        MoreThanAdvertised,
        RollingCache,
        ("cache",),
        BOTH,
    ),
    Exhibit(
        "KV10",
        report("huggingface/candle/pull/899"),
        "The bias of relative positions counts queries from zero, whatever is cached.",
        "layer",
        BiasFromZero,
        RelativeBias,
        ("cache",),
        BOTH,
    ),
    Exhibit(
        "KV11",
        report("RobertCsordas/moeut/pull/6"),
        "While decoding, queries are rotated as if each stood at position zero.",
        "layer",
        QueryAtZero,
        Rotary,
        ("cache",),
        BOTH,
    ),
    Exhibit(
        "KV13-causal",
        report("time-series-foundation-models/lag-llama/issues/81"),
        "is_causal is set while a cache is in use, and aligns the piece with the start.",
        "layer",
        UpperLeftSteps,
        Rotary,
        ("cache",),
        BOTH,
    ),
    Exhibit(
        "KV14",
        report("fla-org/flash-linear-attention/issues/285"),
        "A piece of more than one token does not read the state that it is given.",
        "layer",
        ChunksStartAfresh,
        LinearState,
        ("cache",),
        BOTH,
    ),
    Exhibit(
        "L3-rolling",
        "",
        "The rolling cache keeps one token too few, which shows only past the window.",
        "layer",
        OneTooFew,
        RollingCache,
        ("cache",),
        BOTH,
    ),
]
