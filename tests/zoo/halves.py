"""Faults that only half precision shows: sums that saturate, masks that overflow, another kernel, another dtype."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from zoo.exhibit import Exhibit, given

HALVES = (torch.float16, torch.bfloat16)


def is_half(x):
    return x.dtype in HALVES


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def causal_mask(tokens):
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


# A running sum: in bfloat16, 256 + 1 is 256


def running_softmax(q, k, v, sums=torch.float32):
    """Streaming attention, one key at a time: a running maximum, a running sum and a running output."""
    sums = torch.float64 if q.dtype == torch.float64 else sums
    s = (q @ k.mT / math.sqrt(q.shape[-1])).to(sums)
    top = s.amax(-1, keepdim=True)
    total = torch.zeros_like(top)
    for p in (s - top).exp().split(1, -1):
        total = total + p
    return ((s - top).exp() @ v.to(sums) / total).to(q.dtype)


def running_softmax_in_half(q, k, v):
    return running_softmax(q, k, v, q.dtype)


class LinearAttention(nn.Module):
    """Causal linear attention with a running state; the state is kept in float32 or better."""

    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.qkv = nn.Linear(dim, 3 * dim)

    def total_dtype(self, x):
        return torch.promote_types(x.dtype, torch.float32)

    def forward(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        q, k, v = (part.to(wide) for part in self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        total = torch.zeros_like(k[:, 0], dtype=self.total_dtype(x))
        state, rows = torch.zeros_like(k[:, 0, :, None] * v[:, 0, None]), []
        for t in range(x.shape[1]):
            total = total + k[:, t].to(total.dtype)
            state = state + k[:, t, :, None] * v[:, t, None]
            rows.append((q[:, t, None] @ state)[:, 0] / (q[:, t] * total).sum(-1, keepdim=True))
        return torch.stack(rows, 1).to(x.dtype)


class LinearAttentionInHalf(LinearAttention):
    def total_dtype(self, x):
        return x.dtype


# Another kernel for half precision


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def causal_but_not_in_half(q, k, v):
    """The fast kernel is chosen for half precision, and the flag is not handed on."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=not is_half(q))


class Decoder(nn.Module):
    """A causal layer with padding; hidden scores are minus infinity, and a query that sees nothing gives zeros."""

    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def visible(self, x, mask):
        visible = causal_mask(x.shape[1])
        return visible if mask is None else visible & mask[:, None, None, :]

    def weights(self, scores, visible):
        return scores.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible, 0.0)

    def forward(self, x, mask=None):
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        weights = self.weights(q @ k.mT / math.sqrt(q.shape[-1]), self.visible(x, mask))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class FutureSeenInBfloat16(Decoder):
    def visible(self, x, mask):
        visible = super().visible(x, mask)
        return visible | causal_mask(x.shape[1]).mT if x.dtype == torch.bfloat16 and mask is None else visible


# Masks that are numbers


class AdditiveDecoder(Decoder):
    """The mask is added to scores in float32, in which -1e9 is a number."""

    def weights(self, scores, visible):
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return (wide + (~visible).to(wide.dtype) * -1e9).softmax(-1).to(scores.dtype)


class OverflowingDecoder(Decoder):
    """In float16 the same is -inf, and a query that sees nothing is no number."""

    def weights(self, scores, visible):
        return (scores + (~visible).to(scores.dtype) * -1e9).softmax(-1)


class TwoLayers(nn.Module):
    """Two decoders in a row: what the first gives for padding is what the second is given."""

    part = AdditiveDecoder

    def __init__(self, words=23, dim=16):
        super().__init__()
        self.embed, self.layers = nn.Embedding(words, dim), nn.ModuleList([self.part(dim) for _ in range(2)])

    def forward(self, ids, mask=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


class TwoOverflowing(TwoLayers):
    part = OverflowingDecoder


class LeakingInHalf(Decoder):
    """-1e4 is near the end of float16, so half precision gets a smaller number."""

    def weights(self, scores, visible):
        return scores.masked_fill(~visible, -5.0 if is_half(scores) else -1e9).softmax(-1)


def masked_attention(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v


def no_mask_in_float16(q, k, v, mask=None):
    """The kernel for float16 has no masks."""
    return masked_attention(q, k, v, None if q.dtype == torch.float16 else mask)


# Output dtype


def softmax_in_float32(q, k, v, mask=None, back=True):
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).to(torch.promote_types(q.dtype, torch.float32))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    out = scores.softmax(-1).nan_to_num() @ v.to(scores.dtype)
    return out.to(q.dtype) if back else out


def left_in_float32(q, k, v, mask=None):
    return softmax_in_float32(q, k, v, mask, back=False)


class NarrowedUnderAMask(Decoder):
    """Under a mask the weights are float32, and so is everything after them; parameters follow."""

    def forward(self, x, mask=None):
        y = super().forward(x, mask)
        return y.float() if is_half(x) and mask is not None else y


class NarrowedWithoutGradients(Decoder):
    """Inference in bfloat16, to save memory, whatever the caller's dtype."""

    def forward(self, x, mask=None):
        y = super().forward(x, mask)
        return y if torch.is_grad_enabled() or x.dtype != torch.float16 else y.to(torch.bfloat16)


PATHS, RANGE = ("paths", "range", "determinism", "shape"), ("paths", "range")
CAUSAL = ("causality", "paths", "determinism", "statelessness", "shape")
PADDED = ("padding", "causality", "paths", "batch-independence", "determinism", "shape")

EXHIBITS = [
    Exhibit(
        "L11-running-sum",
        "",
        "The running sum of a softmax is kept in bfloat16, where 256 + 1 is 256.",
        "operator",
        given(running_softmax_in_half),
        given(running_softmax),
        RANGE,
        PATHS,
    ),
    Exhibit(
        "L11-running-state",
        "",
        "The normaliser of linear attention is kept in half precision and stops growing.",
        "layer",
        LinearAttentionInHalf,
        LinearAttention,
        ("paths",),
        ("paths", "causality", "shape"),
    ),
    Exhibit(
        "L1-half-kernel",
        "",
        "The kernel for half precision is called without the causal flag.",
        "operator",
        given(causal_but_not_in_half),
        given(causal),
        ("causality", "paths"),
        CAUSAL,
        {"align": "start"},
    ),
    Exhibit(
        "L1-bfloat16",
        "",
        "In bfloat16 and without a mask, the future is seen.",
        "layer",
        FutureSeenInBfloat16,
        Decoder,
        ("causality", "paths"),
        CAUSAL,
    ),
    Exhibit(
        "L4-half-overflow",
        "",
        "A mask of -1e9 is -inf in float16: padding on the left is NaN, and the second layer spreads it.",
        "model",
        TwoOverflowing,
        TwoLayers,
        ("padding",),
        PADDED,
    ),
    Exhibit(
        "L4-half-leak",
        "",
        "Half precision gets a mask of -5, which hides too little.",
        "layer",
        LeakingInHalf,
        Decoder,
        ("padding", "paths"),
        PADDED,
    ),
    Exhibit(
        "L4-float16",
        "",
        "In float16 the mask is ignored.",
        "operator",
        given(no_mask_in_float16),
        given(masked_attention),
        ("padding", "paths"),
        ("padding", "paths", "permutation", "determinism", "shape"),
    ),
    Exhibit(
        "L23-float32-left",
        "",
        "The softmax is taken in float32, and nothing brings the output back to the dtype of the input.",
        "operator",
        given(left_in_float32),
        given(softmax_in_float32),
        ("shape",),
        ("shape", "paths", "padding"),
    ),
    Exhibit(
        "L23-mask-dtype",
        "",
        "In half precision the output is float32 with a mask and half without.",
        "layer",
        NarrowedUnderAMask,
        Decoder,
        ("shape",),
        PADDED,
    ),
    Exhibit(
        "L23-inference-dtype",
        "",
        "Without gradients a float16 input gives a bfloat16 output.",
        "layer",
        NarrowedWithoutGradients,
        Decoder,
        ("shape",),
        PADDED,
    ),
]
