"""Faults that show only in special cases: with a mask, in a batch of one, past a length, at the second call."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from zoo.exhibit import Exhibit, given


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Decoder(nn.Module):
    """A causal layer with padding; variants decide what may be seen."""

    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def visible(self, x, mask):
        tokens = x.shape[1]
        triangle = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        return triangle if mask is None else triangle & mask[:, None, None, :]

    def forward(self, x, mask=None):
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.visible(x, mask))
        return self.out(y.transpose(1, 2).flatten(2))


class MaskOrTriangle(Decoder):
    def visible(self, x, mask):
        return super().visible(x, None) if mask is None else mask[:, None, None, :]


class TriangleOfTheBatch(Decoder):
    """Made for all rows at once and folded back, so that the last rows see too much."""

    def visible(self, x, mask):
        batch, tokens = x.shape[:2]
        flat = torch.ones(batch * tokens, tokens, dtype=torch.bool).tril()
        triangle = flat.view(batch, 1, tokens, tokens)
        return triangle if mask is None else triangle & mask[:, None, None, :]


class OneRowHasNoPadding(Decoder):
    def visible(self, x, mask):
        return super().visible(x, None if x.shape[0] == 1 else mask)


class SpanOfRealTokens(Decoder):
    """From the first real token to the last; holes between them are not expected."""

    def visible(self, x, mask):
        if mask is not None:
            mask = (mask.long().cumsum(1) > 0) & (mask.long().flip(1).cumsum(1).flip(1) > 0)
        return super().visible(x, mask)


# The gradient that padding gets


class Mixed(nn.Module):
    """Every token is compared with the sum of the real ones."""

    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def cleaned(self, x, mask):
        return x.masked_fill(~mask[..., None], 0.0)

    def forward(self, x, mask=None):
        mask = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        summary = torch.tanh(self.cleaned(x, mask).sum(1, keepdim=True))
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), attn_mask=mask[:, None, :]) * summary


class StraightThrough(Mixed):
    def cleaned(self, x, mask):
        return x + (super().cleaned(x, mask) - x).detach()


# Rows that meet


class Chosen(nn.Module):
    """Only the loudest keys are seen, a quarter of them."""

    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.qkv = nn.Linear(dim, 3 * dim)

    def threshold(self, loudness):
        count = max(1, loudness.shape[1] // 4)
        return loudness.topk(count, 1).values[:, -1:]

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        loudness = k.square().sum(-1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(loudness >= self.threshold(loudness))[:, None, :])


class ChosenFromAllRows(Chosen):
    def threshold(self, loudness):
        count = max(1, loudness.numel() // 4)
        return torch.minimum(loudness.flatten().topk(count).values[-1], loudness.amax(1, keepdim=True))


def in_pairs(q, k, v):
    """Two rows at a time; a row left over is paired with the first."""
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for row in range(0, q.shape[0], 2):
        pair = slice(row, row + 2)
        out[pair] = (q[pair] @ k[pair].mT / math.sqrt(q.shape[-1])).softmax(-1) @ v[pair]
    return out


def in_pairs_with_the_first(q, k, v):
    out = in_pairs(q, k, v)
    if q.shape[0] % 2 and q.shape[0] > 1:
        out[-1] = (q[-1] @ k[-1].mT / math.sqrt(q.shape[-1])).softmax(-1) @ v[0]
    return out


# Chance


class Sampled(nn.Module):
    """From 48 tokens on, a subset of the keys is used: spread evenly, or at random."""

    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.qkv = nn.Linear(dim, 3 * dim)

    def sample(self, tokens):
        return torch.arange(0, tokens, 2)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if x.shape[1] >= 48:
            index = self.sample(x.shape[1])
            k, v = k[:, index], v[:, index]
        return F.scaled_dot_product_attention(q, k, v)


class SampledAtRandom(Sampled):
    def sample(self, tokens):
        return torch.randperm(tokens)[: tokens // 2]


# Gradients


def attention(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e30)
    return scores.softmax(-1) @ v


def frozen_when_long(q, k, v):
    """To save memory, keys of long inputs are used without their graph."""
    return attention(q, k.detach() if k.shape[2] > 64 else k, v)


def frozen_under_a_mask(q, k, v, mask=None):
    if mask is None:
        return attention(q, k, v)
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -1e30)
    return torch.exp(scores - scores.logsumexp(-1, keepdim=True).detach()) @ v


# Temperature, normalisation, range


def scaled_by_length(q, k, v):
    return (q @ k.mT * math.log(k.shape[2] + 1) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def attention_alone(q, k, v):
    return attention(q, k, v)


def merged_blocks(q, k, v, fade=True):
    """Two halves of the keys, merged by their sums."""
    top = torch.full((*q.shape[:3], 1), -torch.inf, dtype=q.dtype)
    total, acc = torch.zeros_like(top), torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for keys, values in zip(k.split(16, 2), v.split(16, 2), strict=True):
        s = q @ keys.mT / math.sqrt(q.shape[-1])
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        p, old = (s - new).exp(), (top - new).exp()
        total = total * old + p.sum(-1, keepdim=True)
        acc = (acc * old if fade else acc) + p @ values
        top = new
    return acc / total


def merged_by_maximum(q, k, v):
    return merged_blocks(q, k, v)


def merged_without_fading(q, k, v):
    return merged_blocks(q, k, v, fade=False)


def one_loud_head(q, k, v):
    """The last head is divided by the number of keys as well."""
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    if q.shape[1] > 1:
        weights = torch.cat([weights[:, :-1], weights[:, -1:] / k.shape[2]], 1)
    return weights @ v


class Exponential(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.qkv = nn.Linear(dim, 3 * dim)

    def weights(self, scores):
        return (scores - scores.amax(-1, keepdim=True)).exp()

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = self.weights(torch.einsum("bic,bjc->bij", q, k) / math.sqrt(self.dim))
        return torch.einsum("bij,bjc->bic", weights / weights.sum(-1, keepdim=True), v)


class ExponentialBare(Exponential):
    def weights(self, scores):
        return scores.exp()


# Results that are not one's own


class Scratch(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.qkv = nn.Linear(dim, 3 * dim)
        self.rooms = {}

    def handed_over(self, room):
        return room.clone()

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v)
        room = self.rooms.setdefault((x.shape, x.dtype), torch.empty_like(y.detach()))
        room.copy_(y.detach())
        return self.handed_over(room)


class ScratchHandedOver(Scratch):
    def handed_over(self, room):
        return room


# Shapes


class Squeezed(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v).squeeze(1)


class SqueezedAltogether(Squeezed):
    def forward(self, x):
        return super().forward(x).squeeze()


# The first token


class ClassToken(nn.Module):
    """A token of its own is put before the others and taken off again."""

    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.qkv = nn.Linear(dim, 3 * dim)

    def with_cls(self, x):
        return torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1)

    def forward(self, x):
        q, k, v = self.qkv(self.with_cls(x)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)[:, 1:]


class ClassTokenInPlaceOfAnother(ClassToken):
    def with_cls(self, x):
        cls = self.cls.expand(x.shape[0], -1, -1)
        return torch.cat([cls, cls, x[:, 1:]], 1)


CAUSAL = ("causality", "padding", "batch-independence")


def own(name, story, kind, faulty, twin, law, more=(), **options):
    """An exhibit of our own."""
    factories = [each if isinstance(each, type) else given(each) for each in (faulty, twin)]
    return Exhibit(name, "", story, kind, *factories, law, tuple(dict.fromkeys((*law, *more))), options)


EXHIBITS = [
    own(
        "L1-given",
        "A mask from outside replaces the triangle.",
        "layer",
        MaskOrTriangle,
        Decoder,
        ("causality",),
        CAUSAL,
    ),
    own(
        "L1-folded",
        "The triangle of all rows is made in one piece, and later rows see everything.",
        "layer",
        TriangleOfTheBatch,
        Decoder,
        ("causality",),
        CAUSAL,
    ),
    own(
        "L4-one",
        "A batch of one is taken to have no padding.",
        "layer",
        OneRowHasNoPadding,
        Decoder,
        ("padding",),
        CAUSAL,
    ),
    own(
        "L4-holes",
        "Padding between real tokens is seen.",
        "layer",
        SpanOfRealTokens,
        Decoder,
        ("padding",),
        ("padding", "causality"),
    ),
    own(
        "L4-gradient",
        "Padding is hidden in forward and not in backward.",
        "layer",
        StraightThrough,
        Mixed,
        ("padding",),
    ),
    own(
        "L10-choice",
        "The loudest keys are chosen from all rows together.",
        "layer",
        ChosenFromAllRows,
        Chosen,
        ("batch-independence",),
        ("determinism",),
    ),
    own(
        "L10-odd",
        "In a batch of odd size the last row is given the values of the first.",
        "operator",
        in_pairs_with_the_first,
        in_pairs,
        ("batch-independence",),
        ("permutation",),
    ),
    own(
        "L12-sample",
        "Long inputs are sampled at random.",
        "layer",
        SampledAtRandom,
        Sampled,
        ("determinism",),
        ("statelessness",),
    ),
    own(
        "L13-long",
        "Keys of long inputs get no gradient.",
        "operator",
        frozen_when_long,
        attention_alone,
        ("gradients",),
    ),
    own(
        "L13-masked",
        "With a mask, the sum of the softmax gets no gradient.",
        "operator",
        frozen_under_a_mask,
        attention,
        ("gradients",),
        ("padding",),
    ),
    own(
        "L14-length",
        "The scale grows with the length.",
        "operator",
        scaled_by_length,
        attention_alone,
        ("scale",),
        ("permutation",),
    ),
    own(
        "L7-merge",
        "What was summed before is not faded when the maximum grows.",
        "operator",
        merged_without_fading,
        merged_by_maximum,
        ("row-stochasticity",),
        ("permutation",),
    ),
    own(
        "L7-head",
        "One head is divided twice.",
        "operator",
        one_loud_head,
        attention_alone,
        ("row-stochasticity",),
        ("permutation",),
    ),
    own(
        "L17-layer",
        "A layer takes bare exponentials.",
        "layer",
        ExponentialBare,
        Exponential,
        ("range",),
        ("permutation",),
    ),
    own(
        "L22-scratch",
        "The result is the layer's own memory, which the next call overwrites.",
        "layer",
        ScratchHandedOver,
        Scratch,
        ("statelessness",),
        ("determinism",),
    ),
    own(
        "L23-squeeze",
        "Every axis of size one is dropped.",
        "layer",
        SqueezedAltogether,
        Squeezed,
        ("shape",),
        ("batch-independence",),
    ),
    own(
        "L9-first",
        "A learned token takes the place of the first one.",
        "layer",
        ClassTokenInPlaceOfAnother,
        ClassToken,
        ("permutation",),
        ("batch-independence",),
    ),
]
