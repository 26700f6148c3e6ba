"""Heads mixed with tokens, with the batch, with each other."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from zoo.exhibit import Exhibit, given, report

# HD1: heads split off without a transpose


class FieldAttention(nn.Module):
    """Self-attention over the fields of a row, heads flattened into the batch."""

    def __init__(self, dim=16, num_heads=4):
        super().__init__()
        self.dim, self.num_heads = dim, num_heads
        self.W_q, self.W_k, self.W_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def split(self, x):
        b, t, _ = x.shape
        return x.view(b, t, self.num_heads, -1).transpose(1, 2).reshape(b * self.num_heads, t, -1)

    def join(self, x, b, t):
        return x.view(b, self.num_heads, t, -1).transpose(1, 2).reshape(b, t, -1)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.split(self.W_q(x)), self.split(self.W_k(x)), self.split(self.W_v(x))
        weights = torch.bmm(q, k.transpose(1, 2)).div(math.sqrt(q.shape[-1])).softmax(-1)
        return F.relu(x + self.join(torch.bmm(weights, v), b, t))


class FieldsInHeads(FieldAttention):
    def split(self, x):
        return x.view(x.shape[0] * self.num_heads, -1, self.dim // self.num_heads)

    def join(self, x, b, t):
        return x.view(b, -1, self.dim)


# HD3: which axis is the batch


class MattingBlock(nn.Module):
    batch_first = True

    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=self.batch_first)

    def forward(self, x):
        y = self.norm(x)
        return x + self.attn(y, y, y, need_weights=False)[0]


class MattingAcrossTheBatch(MattingBlock):
    batch_first = False


# GQ1, GQ2: which key head belongs to which query head


def grouped(q, k, v, mask=None):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def grouped_by_tiling(q, k, v, mask=None):
    groups = q.shape[1] // k.shape[1]
    k, v = k.tile(1, groups, 1, 1), v.tile(1, groups, 1, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def grouped_einsum(q, k, v, mask=None):
    b, h, t, d = q.shape
    q = q.view(b, k.shape[1], h // k.shape[1], t, d)
    scores = torch.einsum("bgrid,bgjd->bgrij", q, k) / math.sqrt(d)
    if mask is not None:
        scores = scores.masked_fill(
            ~mask.expand(b, h, *mask.shape[2:]).reshape(b, *q.shape[1:3], *mask.shape[2:]), -1e30
        )
    return torch.einsum("bgrij,bgjd->bgrid", scores.softmax(-1), v).reshape(b, h, t, -1)


def grouped_einsum_turned(q, k, v, mask=None):
    """The refactoring takes the group axis first: query heads 0, 1 meet key heads 0, 1."""
    b, h, t, d = q.shape
    q = q.view(b, h // k.shape[1], k.shape[1], t, d)
    scores = torch.einsum("brgid,bgjd->brgij", q, k) / math.sqrt(d)
    if mask is not None:
        scores = scores.masked_fill(
            ~mask.expand(b, h, *mask.shape[2:]).reshape(b, *q.shape[1:3], *mask.shape[2:]), -1e30
        )
    return torch.einsum("brgij,bgjd->brgid", scores.softmax(-1), v).reshape(b, h, t, -1)


def grouped_values_late(q, k, v, mask=None):
    """Keys are repeated group by group, values are tiled."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat(1, groups, 1, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


# LA2: the layout that the documents left out


def over_tokens(q, k, v):
    """(batch, token, head, dim), as the memory-efficient operator takes it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(-1)
    return (weights @ v).transpose(1, 2)


def over_heads(q, k, v):
    """The documented equivalent, which is for a single head."""
    weights = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(-1)
    return weights @ v


# SM3, and our own: the axis that sums to one


def over_keys(q, k, v):
    b, h, n, d = q.shape
    q, k, v = (x.reshape(b * h, -1, x.shape[-1]) for x in (q, k, v))
    weights = F.softmax(torch.bmm(q, k.transpose(1, 2)) / d**0.5, dim=-1)
    return torch.bmm(weights, v).view(b, h, n, -1)


def over_the_first_axis(q, k, v):
    b, h, n, d = q.shape
    q, k, v = (x.reshape(b * h, -1, x.shape[-1]) for x in (q, k, v))
    weights = F.softmax(torch.bmm(q, k.transpose(1, 2)) / d**0.5, dim=0)
    return torch.bmm(weights, v).view(b, h, n, -1)


def squeezed(q, k, v):
    """A batch of one loses its axis, and the softmax its keys."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).squeeze(0)
    weights = scores.softmax(3) if scores.dim() == 4 else scores.softmax(1)
    return (weights @ v.squeeze(0)).view(*q.shape[:-1], v.shape[-1])


def not_squeezed(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(3) @ v


# Our own: batch and permutation


class BatchStatistics(nn.Module):
    """Queries and keys are brought to a common size first."""

    def __init__(self, dim=16):
        super().__init__()
        self.qk, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def size(self, y):
        return y.abs().amax(-1, keepdim=True)

    def forward(self, x, mask=None):
        y = self.qk(x)
        y = y / self.size(y)
        mask = None if mask is None else mask[:, None, :]
        return F.scaled_dot_product_attention(y, y, self.v(x), attn_mask=mask)


class SizeOfTheBatch(BatchStatistics):
    def size(self, y):
        return y.abs().max()  # a scale for the whole tensor, as for a quantised one


class SortedKeys(nn.Module):
    """Keys are taken in an order of their own; values should go with them."""

    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def order(self, k, v):
        index = k.norm(dim=-1).argsort(-1)[..., None].expand_as(k)
        return k.gather(2, index), v.gather(2, index)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        k, v = self.order(k, v)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class ValuesStay(SortedKeys):
    def order(self, k, v):
        head = slice(0, 1)  # the first head only
        sorted_k, sorted_v = super().order(k, v)
        return sorted_k, torch.cat([v[:, head], sorted_v[:, 1:]], 1)


PLAIN = ("permutation", "batch-independence", "determinism")

EXHIBITS = [
    Exhibit(
        "HD1",
        report("reczoo/FuxiCTR/issues/30"),
        "Heads are split off by a view without a transpose, which mixes tokens with heads.",
        "layer",
        FieldsInHeads,
        FieldAttention,
        ("permutation",),
        PLAIN,
    ),
    Exhibit(
        "HD3",
        report("aipixel/AEMatter/issues/3"),
        "Batch-first tensors go into a module that takes the first axis for tokens.",
        "layer",
        MattingAcrossTheBatch,
        MattingBlock,
        ("batch-independence",),
        PLAIN,
    ),
    Exhibit(
        "GQ1",
        report("onnx/onnx/pull/7274"),
        "Key heads are tiled where they should be repeated.",
        "operator",
        given(grouped_by_tiling),
        given(grouped),
        ("head-groups",),
        ("head-groups", "permutation", "determinism"),
    ),
    Exhibit(
        "GQ2",
        report("apple/axlearn/pull/842"),
        "A refactoring with einsum puts the axis of groups before that of key heads.",
        "operator",
        given(grouped_einsum_turned),
        given(grouped_einsum),
        ("head-groups",),
        ("head-groups", "permutation"),
    ),
    Exhibit(
        "L16-values",
        "",
        "Keys are repeated by group and values are tiled.",
        "operator",
        given(grouped_values_late),
        given(grouped),
        ("head-groups",),
        ("head-groups", "permutation"),
    ),
    Exhibit(
        "LA2",
        report("facebookresearch/xformers/issues/922"),
        "The documented equivalent of an operator attends over heads in the layout that it really has.",
        "operator",
        given(over_heads),
        given(over_tokens),
        ("permutation",),
        PLAIN,
        {"layout": "tokens"},
    ),
    Exhibit(
        "SM3",
        report("PetrochukM/PyTorch-NLP/issues/2"),
        "The softmax runs over the batch, so that a batch of one has all weights one.",
        "operator",
        given(over_the_first_axis),
        given(over_keys),
        ("row-stochasticity", "batch-independence"),
        ("row-stochasticity", "batch-independence", "permutation"),
    ),
    Exhibit(
        "L7-squeeze",
        "",
        "A squeeze drops the axis of a batch of one, and the softmax runs over the queries.",
        "operator",
        given(squeezed),
        given(not_squeezed),
        ("row-stochasticity",),
        ("row-stochasticity", "batch-independence"),
    ),
    Exhibit(
        "L10-scale",
        "",
        "Queries and keys are divided by the largest number of the whole batch.",
        "layer",
        SizeOfTheBatch,
        BatchStatistics,
        ("batch-independence",),
        (*PLAIN, "padding"),
    ),
    Exhibit(
        "L9-values",
        "",
        "Keys are sorted, and in one head the values are not.",
        "layer",
        ValuesStay,
        SortedKeys,
        ("permutation",),
        PLAIN,
    ),
]
