"""Faults beyond the usual sizes and calls: wide heads, long texts, long caches, compiled calls, rows all hidden."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from zoo.exhibit import Exhibit, given
from zoo.halves import Decoder, TwoLayers, causal_mask, heads_of, masked_attention

# A caller's mask, written to where a row is all hidden


def shown_if_empty(mask):
    """Rows that see nothing see everything, so that a softmax has something to sum over."""
    return mask | ~mask.any(-1, keepdim=True)


def empty_rows_filled(q, k, v, mask=None):
    return masked_attention(q, k, v, None if mask is None else shown_if_empty(mask))


def empty_rows_filled_in_place(q, k, v, mask=None):
    if mask is not None:
        mask[~mask.any(-1)] = True
    return masked_attention(q, k, v, mask)


class Encoder(Decoder):
    def visible(self, x, mask):
        return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool) if mask is None else mask[:, None, None, :]


class RowsFilled(Encoder):
    def forward(self, x, mask=None):
        return super().forward(x, None if mask is None else shown_if_empty(mask))


class RowsFilledInPlace(Encoder):
    def forward(self, x, mask=None):
        if mask is not None:
            mask.logical_or_(~mask.any(-1, keepdim=True))
        return super().forward(x, mask)


class HidesPadding(Encoder):
    """True hides, as torch's modules have it."""

    def forward(self, x, key_padding_mask=None):
        return super().forward(x, None if key_padding_mask is None else self.kept(key_padding_mask))

    def kept(self, hidden):
        return shown_if_empty(~hidden)


class HidesPaddingInPlace(HidesPadding):
    def kept(self, hidden):
        hidden[hidden.all(-1)] = False
        return ~hidden


# Compiled calls


class NoMaskWhenCompiled(Decoder):
    """The triangle alone is a constant of the graph; a mask would break it."""

    def visible(self, x, mask):
        return super().visible(x, None if torch.compiler.is_compiling() else mask)


def no_mask_under_dynamo(q, k, v, mask=None):
    return masked_attention(q, k, v, None if torch.compiler.is_dynamo_compiling() else mask)


# Heads wider than 64 channels


def sixty_four_channels(q, k, v):
    """A tile has room for 64 channels of a score."""
    tile = slice(None, 64)
    return (q[..., tile] @ k[..., tile].mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def all_channels(q, k, v):
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def windowed(q, k, v, mask=None, wide_mask=True):
    """Causal, four keys to see; no formula of the textbook."""
    back = torch.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2] - torch.arange(k.shape[-2])
    visible = (back >= 0) & (back < 4) if wide_mask or q.shape[-1] <= 96 else back < 4
    return masked_attention(q, k, v, visible if mask is None else visible & mask)


def windowed_but_for_wide_heads(q, k, v, mask=None):
    """Above 96 channels another kernel runs, which bounds the window on one side only."""
    return windowed(q, k, v, mask, wide_mask=False)


def features(q, k, v, mask=None, wide_mask=True):
    """Linear attention, as a matrix; hidden keys have no weight."""
    weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    if mask is not None and (wide_mask or q.shape[-1] <= 64):
        weights = weights * mask
    return weights / weights.sum(-1, keepdim=True) @ v


def features_without_mask_when_wide(q, k, v, mask=None):
    return features(q, k, v, mask, wide_mask=False)


class WideHeads(Decoder):
    """Heads of 80 channels."""

    def __init__(self, dim=160, heads=2):
        super().__init__(dim, heads)


class WideHeadsInTwoTiles(WideHeads):
    """Two tiles of at most 64 channels, each with its own softmax."""

    def forward(self, x, mask=None):
        if not torch.is_grad_enabled():
            q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, -1))
            scores = [a @ b.mT / math.sqrt(q.shape[-1]) for a, b in zip(q.split(64, -1), k.split(64, -1), strict=True)]
            weights = sum(self.weights(score, self.visible(x, mask)) for score in scores) / len(scores)
            return self.out((weights @ v).transpose(1, 2).flatten(2))
        return super().forward(x, mask)


# More than 512 tokens


def merged(q, k, v, mask=None, rescaled=True):
    """Blocks of 512 keys, merged by their maxima and sums."""
    top, total, acc = -torch.inf, 0.0, 0.0
    for start in range(0, k.shape[-2], 512):
        block = slice(start, start + 512)
        s = q @ k[:, :, block].mT / math.sqrt(q.shape[-1])
        if mask is not None:
            s = s.masked_fill(~mask[..., block], -1e30)
        new = s.amax(-1, keepdim=True).clamp(min=top)
        p, old = (s - new).exp(), (top - new).exp() if rescaled else 1.0
        top, total, acc = new, total * old + p.sum(-1, keepdim=True), acc * old + p @ v[:, :, block]
    return acc / total


def merged_without_rescaling(q, k, v, mask=None):
    return merged(q, k, v, mask, rescaled=False)


class ChunkedWhenLong(Decoder):
    """From 513 tokens on, chunks of 512, and the last one is given the whole text."""

    def visible(self, x, mask):
        visible = super().visible(x, mask)
        if x.shape[1] > 512:
            visible = visible.clone()
            visible[..., 512:, :] = True if mask is None else mask[:, None, None, :]
        return visible


class NoPaddingWhenLong(TwoLayers):
    def forward(self, ids, mask=None):
        return super().forward(ids, None if ids.shape[1] > 512 else mask)


def first_thousand(q, k, v):
    """A table of 1024 slots; later keys fall off."""
    return F.scaled_dot_product_attention(q, k[:, :, :1024], v[:, :, :1024])


def every_key(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


# More than 256 cached tokens


class Growing(nn.Module):
    """Self-attention with a cache of keys and values."""

    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv, self.o = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def kept(self, k, v):
        return k, v

    def forward(self, x, cache=None):
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        visible = causal_mask(k.shape[2])[-q.shape[2] :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.o(y.transpose(1, 2).flatten(2)), self.kept(k, v)


class LastTwoHundredFiftySix(Growing):
    """A ring of 256 slots."""

    def kept(self, k, v):
        return k[:, :, -256:], v[:, :, -256:]


class Positions(nn.Module):
    """A small language model with a table of positions and a cache."""

    def __init__(self, words=23, dim=16):
        super().__init__()
        self.block_size = 1024
        self.embed, self.positions, self.layer = nn.Embedding(words, dim), nn.Embedding(1024, dim), Growing(dim)

    def places(self, start, count):
        return torch.arange(start, start + count)

    def forward(self, ids, cache=None):
        start = 0 if cache is None else cache[0].shape[2]
        x = self.embed(ids) + self.positions(self.places(start, ids.shape[1]))
        y, cache = self.layer(x, cache)
        return x + y, cache


class PositionsInAByte(Positions):
    """While decoding, positions are counted in a byte."""

    def places(self, start, count):
        places = super().places(start, count)
        return places % 256 if start else places


CAUSAL = ("causality", "paths", "determinism", "statelessness", "shape")
PADDED = ("padding", "causality", "paths", "batch-independence", "determinism", "shape")
MASKED = ("determinism", "statelessness", "padding", "paths", "shape")
DECODING = ("cache", "causality", "determinism", "paths")

EXHIBITS = [
    Exhibit(
        "L12-empty-row-in-place",
        "",
        "Where a row of the mask hides everything, the caller's mask is written to.",
        "operator",
        given(empty_rows_filled_in_place),
        given(empty_rows_filled),
        ("determinism", "statelessness"),
        MASKED,
    ),
    Exhibit(
        "L12-hidden-text-in-place",
        "",
        "A text that is all padding is unhidden in the caller's own mask.",
        "layer",
        RowsFilledInPlace,
        RowsFilled,
        ("determinism", "statelessness"),
        MASKED,
    ),
    Exhibit(
        "L12-hiding-mask-in-place",
        "",
        "The same where True hides.",
        "layer",
        HidesPaddingInPlace,
        HidesPadding,
        ("determinism", "statelessness"),
        MASKED,
    ),
    Exhibit(
        "L11-compiled-mask",
        "",
        "A compiled layer does not look at the padding mask.",
        "layer",
        NoMaskWhenCompiled,
        Decoder,
        ("paths",),
        PADDED,
    ),
    Exhibit(
        "L11-dynamo-mask",
        "",
        "An operator has another branch for dynamo, without the mask.",
        "operator",
        given(no_mask_under_dynamo),
        given(masked_attention),
        ("paths",),
        ("padding", "paths", "permutation", "determinism", "shape"),
    ),
    Exhibit(
        "L11-wide-tile",
        "",
        "Scores of heads wider than 64 are summed over the first 64 channels.",
        "operator",
        given(sixty_four_channels),
        given(all_channels),
        ("paths",),
        ("paths", "permutation", "scale", "determinism"),
    ),
    Exhibit(
        "L1-wide-window",
        "",
        "Above 96 channels the window is open to the future.",
        "operator",
        given(windowed_but_for_wide_heads),
        given(windowed),
        ("causality",),
        ("causality", "alignment", "padding", "determinism"),
    ),
    Exhibit(
        "L4-wide-features",
        "",
        "Linear attention with more than 64 channels ignores the mask.",
        "operator",
        given(features_without_mask_when_wide),
        given(features),
        ("padding",),
        ("padding", "permutation", "determinism"),
    ),
    Exhibit(
        "L11-wide-heads",
        "",
        "Heads of 80 channels are computed in two tiles, each with its own softmax.",
        "layer",
        WideHeadsInTwoTiles,
        WideHeads,
        ("paths",),
        PADDED,
    ),
    Exhibit(
        "L11-merge-512",
        "",
        "Blocks of 512 keys are merged without rescaling the earlier ones.",
        "operator",
        given(merged_without_rescaling),
        given(merged),
        ("paths", "permutation"),
        ("paths", "permutation", "padding", "determinism"),
    ),
    Exhibit(
        "L1-chunk-512",
        "",
        "What comes after token 512 sees everything.",
        "layer",
        ChunkedWhenLong,
        Decoder,
        ("causality",),
        CAUSAL,
    ),
    Exhibit(
        "L4-long-512",
        "",
        "Beyond 512 tokens the padding mask is dropped.",
        "model",
        NoPaddingWhenLong,
        TwoLayers,
        ("padding",),
        PADDED,
    ),
    Exhibit(
        "L11-slots-1024",
        "",
        "Keys beyond 1024 are ignored.",
        "operator",
        given(first_thousand),
        given(every_key),
        ("paths", "permutation"),
        ("paths", "permutation", "determinism"),
    ),
    Exhibit(
        "L3-ring-256",
        "",
        "The cache is a ring of 256 slots, though the layer has no window.",
        "layer",
        LastTwoHundredFiftySix,
        Growing,
        ("cache",),
        DECODING,
    ),
    Exhibit(
        "L3-byte-256",
        "",
        "Positions are counted in a byte while decoding.",
        "model",
        PositionsInAByte,
        Positions,
        ("cache",),
        DECODING,
    ),
]
