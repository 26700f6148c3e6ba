"""Masks that are missing, inverted, misaligned or too weak."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from zoo.exhibit import Exhibit, given, report

from regard.patterns import Causal

# CA1: an encoder with a switch that makes it a decoder


class SmallBert(nn.Module):
    """Embeddings, one block, a language-model head."""

    def __init__(self, vocab=29, dim=16, heads=4, max_len=320, is_decoder=True):
        super().__init__()
        self.is_decoder, self.heads = is_decoder, heads
        self.word = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(max_len, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def attention_mask(self, mask, batch, tokens):
        allowed = torch.ones(batch, 1, tokens, tokens, dtype=torch.bool) if mask is None else mask[:, None, None, :]
        if self.is_decoder:
            allowed = allowed & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        return allowed

    def forward(self, input_ids, attention_mask=None):
        batch, tokens = input_ids.shape
        x = self.word(input_ids) + self.position.weight[:tokens]
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        allowed = self.attention_mask(attention_mask, batch, tokens)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, -1)
        return self.head(self.norm(x + self.out(y)))


class BidirectionalBert(SmallBert):
    def attention_mask(self, mask, batch, tokens):
        # create_bidirectional_mask(...), whatever is_decoder says
        return torch.ones(batch, 1, tokens, tokens, dtype=torch.bool) if mask is None else mask[:, None, None, :]


# CA2: the causal mask is dropped when no other mask is given


class DynamicMaskAttention(nn.Module):
    """A learned bonus for each key, computed from its value, is added to the scores."""

    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.dt = nn.Linear(dim, heads)
        self.o = nn.Linear(dim, dim)

    def causal(self, mask, tokens, like):
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        bias = torch.zeros(tokens, tokens, dtype=like).masked_fill(future, torch.finfo(like).min)
        if mask is not None:
            bias = bias + torch.zeros(mask.shape, dtype=like).masked_fill(~mask, -1e30)[:, None, None, :]
        return bias.clamp(min=torch.finfo(like).min)

    def forward(self, x, mask=None):
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        bonus = -F.softplus(self.dt(v.transpose(1, 2).reshape(b, t, c))).transpose(1, 2)[:, :, None, :]
        bias = bonus + self.causal(mask, t, x.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.o(y.transpose(1, 2).reshape(b, t, c))


class DynamicMaskWithoutTriangle(DynamicMaskAttention):
    def causal(self, mask, tokens, like):
        if mask is None:  # "sdpa will take is_causal", but a mask is passed below, so it does not
            return torch.zeros((), dtype=like)
        return super().causal(mask, tokens, like)


# CA7: True means attend in one function and hide in the other


def sdpa_on_the_future(q, k, v):
    t = q.shape[-2]
    mask = torch.triu(torch.ones(t, t), diagonal=1).bool()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def sdpa_on_the_past(q, k, v):
    t = q.shape[-2]
    mask = torch.triu(torch.ones(t, t), diagonal=1).bool()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~mask)


# AL1: which corner of the rectangle the triangle starts in


def upper_left(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[-2] > 0)


def lower_right(q, k, v):
    rows, columns = q.shape[-2], k.shape[-2]
    mask = torch.ones(rows, columns, dtype=torch.bool).tril(diagonal=columns - rows)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def aligned_but_for_one(q, k, v):
    """A single query is taken to be a decoding step, which sees everything; a few are put one key too early."""
    rows, columns = q.shape[-2], k.shape[-2]
    shift = columns - rows - (1 if 1 < rows < columns else 0)
    mask = torch.ones(rows, columns, dtype=torch.bool).tril(diagonal=shift)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


# Causality, by blocks


def _online(q, k, v, block, hidden):
    """Softmax block by block with a running maximum; `hidden(i, j)` says which pairs are not seen."""
    b, h, n, d = q.shape
    out = torch.zeros(b, h, n, v.shape[-1], dtype=q.dtype)
    for r in range(0, n, block):
        qi = q[:, :, r : r + block] * d**-0.5
        top = torch.full((*qi.shape[:-1], 1), -torch.inf, dtype=q.dtype)
        total = torch.zeros_like(top)
        acc = torch.zeros((*qi.shape[:-1], v.shape[-1]), dtype=q.dtype)
        for c in range(0, min(r + block, k.shape[2]), block):
            s = torch.einsum("bhid,bhjd->bhij", qi, k[:, :, c : c + block])
            i = r + torch.arange(qi.shape[2])[:, None]
            j = c + torch.arange(s.shape[-1])[None, :]
            s = s.masked_fill(hidden(i, j, r, c), -torch.inf)
            new = torch.maximum(top, s.amax(-1, keepdim=True))
            shift = new.masked_fill(new == -torch.inf, 0.0)
            p = (s - shift).exp()
            fade = (top - shift).exp()
            total = total * fade + p.sum(-1, keepdim=True)
            acc = acc * fade + torch.einsum("bhij,bhjd->bhid", p, v[:, :, c : c + block])
            top = new
        out[:, :, r : r + block] = acc / total
    return out


def blockwise_causal(q, k, v):
    return _online(q, k, v, 32, lambda i, j, r, c: j > i)


def blockwise_causal_by_blocks(q, k, v):
    """Blocks after the diagonal are skipped, and nothing is hidden inside the one on it but its last column."""
    return _online(q, k, v, 32, lambda i, j, r, c: (j > i) & ((r == 0) | (j % 32 == 31)))


class LongCausal(nn.Module):
    """Short inputs take one product, long ones go through in two halves of the keys."""

    edge = 0

    def __init__(self, dim=16):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        t = x.shape[1]
        scores = torch.einsum("btc,bsc->bts", q, k) * q.shape[-1] ** -0.5
        place = torch.arange(t)
        if t <= 64:
            scores = scores.masked_fill(place[None, :] > place[:, None], -torch.inf)
            return scores.softmax(-1) @ v
        near = scores.masked_fill(place[None, :] > place[:, None] + self.edge, -torch.inf)
        return torch.einsum("bts,bsc->btc", near.softmax(-1), v)


class LongLeak(LongCausal):
    edge = 1


class CentredCausal(nn.Module):
    """Causal attention after taking off the mean: of what was seen so far, or of everything."""

    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def mean(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None].to(x.dtype)

    def forward(self, x):
        q, k, v = (x - self.mean(x)).matmul(self.qkv.weight.T).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class CentredOnAll(CentredCausal):
    def mean(self, x):
        return x.mean(1, keepdim=True)


# Masks that are too weak, and what they let through


def hidden_by_minus_inf(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if mask is None:
        return scores.softmax(-1) @ v
    empty = ~mask.any(-1, keepdim=True)
    weights = scores.masked_fill(~mask, -torch.inf).masked_fill(empty, 0.0).softmax(-1).masked_fill(~mask, 0.0)
    # Zero times NaN is NaN, so such values reach only the queries that see them.
    bad = ~v.isfinite()
    reached = (weights > 0).to(v.dtype) @ bad.to(v.dtype) > 0
    return (weights @ v.masked_fill(bad, 0.0)).masked_fill(reached, torch.nan)


def hidden_by_ten_thousand(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores + (1.0 - mask.to(scores.dtype)) * -10000.0
    return scores.softmax(-1) @ v


def hidden_by_multiplying(q, k, v, mask=None):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if mask is None:
        return scores.softmax(-1) @ v
    keep = mask.to(scores.dtype)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)) * keep
    return (weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)) @ v


CAUSAL = ("causality", "batch-independence", "determinism")

EXHIBITS = [
    Exhibit(
        "CA1",
        report("huggingface/transformers/issues/48745"),
        "The mask of an encoder is made even when the model is a decoder.",
        "model",
        BidirectionalBert,
        SmallBert,
        ("causality",),
        (*CAUSAL, "statelessness"),
    ),
    Exhibit(
        "CA2",
        report("huggingface/transformers/pull/48770"),
        "Without a mask from outside the layer makes one of its own that has no triangle.",
        "layer",
        DynamicMaskWithoutTriangle,
        DynamicMaskAttention,
        ("causality",),
        (*CAUSAL, "padding"),
    ),
    Exhibit(
        "CA7",
        report("rasbt/LLMs-from-scratch/issues/1061"),
        "An upper triangle is handed to a function in which True means attend.",
        "operator",
        given(sdpa_on_the_future),
        given(sdpa_on_the_past),
        ("causality", "support"),
        (*CAUSAL, "support"),
        {"pattern": Causal()},
    ),
    Exhibit(
        "AL1",
        report("pytorch/pytorch/issues/103082"),
        "The triangle starts in the upper left corner, so a decoding step sees the first key only.",
        "operator",
        given(upper_left),
        given(lower_right),
        ("alignment",),
        ("alignment", "causality", "determinism"),
        {"pattern": Causal()},
    ),
    Exhibit(
        "L2-few",
        "",
        "One query is aligned with the last key, two or more are one key early.",
        "operator",
        given(aligned_but_for_one),
        given(lower_right),
        ("alignment",),
        ("alignment", "causality"),
    ),
    Exhibit(
        "L1-block",
        "",
        "Blocks after the diagonal are skipped, but inside the blocks on it the future is seen.",
        "operator",
        given(blockwise_causal_by_blocks),
        given(blockwise_causal),
        ("causality",),
        CAUSAL,
    ),
    Exhibit(
        "L1-long",
        "",
        "The path for more than 64 tokens is off by one.",
        "layer",
        LongLeak,
        LongCausal,
        ("causality",),
        CAUSAL,
    ),
    Exhibit(
        "L1-mean",
        "",
        "The mean that is taken off beforehand is that of the whole sequence.",
        "layer",
        CentredOnAll,
        CentredCausal,
        ("causality",),
        CAUSAL,
    ),
    Exhibit(
        "L5-weak",
        "",
        "Masked scores are lowered by ten thousand, which a large key outbids.",
        "operator",
        given(hidden_by_ten_thousand),
        given(hidden_by_minus_inf),
        ("masked-values",),
        ("masked-values", "padding", "empty-rows"),
    ),
    Exhibit(
        "L5-after",
        "",
        "The maximum is taken over masked keys too, and zero times what is no number is no number.",
        "operator",
        given(hidden_by_multiplying),
        given(hidden_by_minus_inf),
        ("masked-values",),
        ("masked-values", "padding"),
    ),
]
