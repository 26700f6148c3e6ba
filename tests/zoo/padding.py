"""Padding that leaks: into a normaliser, a gate, a position, a length."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from zoo.exhibit import Exhibit, report


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


# PA1: linear attention whose normaliser counts the padding


class LinearAttention(nn.Module):
    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)

    def hide(self, k, v, mask):
        return k * mask, v * mask

    def forward(self, x, mask=None):
        q, k, v = (heads_of(part, self.heads) for part in self.to_qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if mask is not None:
            k, v = self.hide(k, v, mask[:, None, :, None].to(x.dtype))
        memory = torch.einsum("bhnd,bhne->bhde", k, v)
        total = torch.einsum("bhnd,bhd->bhn", q, k.sum(2))
        return (torch.einsum("bhnd,bhde->bhne", q, memory) / total[..., None]).transpose(1, 2).flatten(2)


class ValuesAloneHidden(LinearAttention):
    def hide(self, k, v, mask):
        return k, v * mask


# PA2: a gate that decays during padding


class GatedLinear(nn.Module):
    """A recurrent state that decays by a gate of each token."""

    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.q, self.k, self.v, self.gate = (nn.Linear(dim, dim) for _ in range(4))

    def gates(self, gate, mask):
        return torch.where(mask, gate, 1.0)

    def forward(self, x, mask=None):
        q, k, v, gate = (heads_of(f(x), self.heads) for f in (self.q, self.k, self.v, self.gate))
        gate = torch.sigmoid(gate)
        if mask is not None:
            real = mask[:, None, :, None]
            v, gate = v.masked_fill(~real, 0.0), self.gates(gate, real)
            k = k.masked_fill(~real, 0.0)
        state, rows = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=x.dtype), []
        for t in range(x.shape[1]):
            state = gate[:, :, t, :, None] * state + k[:, :, t, :, None] * v[:, :, t, None, :]
            rows.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], state))
        return torch.stack(rows, 1).flatten(2)


class GateRunsOn(GatedLinear):
    def gates(self, gate, mask):
        return gate


# PA4, PA5, PA6: where positions start counting


class PaddedGpt(nn.Module):
    """Learned positions, counted over real tokens."""

    def __init__(self, vocab=19, dim=16, heads=2, max_len=300):
        super().__init__()
        self.heads, self.max_len = heads, max_len
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def positions(self, mask):
        return (mask.long().cumsum(-1) - 1).clamp(min=0)

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        mask = mask.bool()
        x = self.wte(input_ids) + self.wpe(self.positions(mask))
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        tokens = x.shape[1]
        allowed = mask[:, None, None, :] & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.proj(x + y.transpose(1, 2).flatten(2)) @ self.wte.weight.T


class PositionsOfTheFirstRow(PaddedGpt):
    def positions(self, mask):
        return (mask[:1].long().cumsum(-1) - 1).clamp(min=0).expand_as(mask)


class PositionsFromThePad(PaddedGpt):
    def positions(self, mask):
        return torch.arange(mask.shape[1]).expand_as(mask)


class SinusoidLayer(nn.Module):
    """Sinusoids are added to queries and keys before a causal attention."""

    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def place(self, x, mask):
        if mask is None:
            return torch.arange(x.shape[1]).expand(x.shape[:2])
        return mask.long().cumsum(1) - 1

    def forward(self, x, mask=None):
        rate = 50.0 ** (-torch.arange(0, self.dim, 2) / self.dim)
        angle = self.place(x, mask)[..., None] * rate
        table = torch.cat([angle.sin(), angle.cos()], -1).to(x.dtype)
        q, k, v = self.q(x + table), self.k(x + table), self.v(x)
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(self.dim)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if mask is not None:
            hidden = hidden | ~mask[:, None, :]
        return torch.bmm(scores.masked_fill(hidden, -1e30).softmax(-1), v)


class SinusoidFromTheEdge(SinusoidLayer):
    def place(self, x, mask):
        return torch.arange(x.shape[1]).expand(x.shape[:2])


# PA7, PA10: the mask of the source


class SmallSeq2Seq(nn.Module):
    """An encoder over the tokens, and a decoder over the same tokens that attends to it."""

    def __init__(self, vocab=17, dim=16, heads=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.encoder = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def source_mask(self, mask):
        return mask

    def forward(self, ids, mask=None):
        x = self.embed(ids)
        hidden = None if mask is None else ~mask
        source, _ = self.encoder(x, x, x, key_padding_mask=hidden, need_weights=False)
        source = x + source
        y, _ = self.cross(x, source, source, key_padding_mask=self.source_mask(hidden), need_weights=False)
        return self.head(x + y)


class SourceMaskOverwritten(SmallSeq2Seq):
    def source_mask(self, mask):
        return None


class LengthAware(nn.Module):
    """Attention to a memory with heads flattened into the batch."""

    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.q, self.kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)

    def hidden(self, mask):
        return ~mask

    def forward(self, x, mask=None):
        b, t, c = x.shape
        k, v = self.kv(torch.tanh(x)).chunk(2, -1)
        q, k, v = (heads_of(part, self.heads).reshape(b * self.heads, t, -1) for part in (self.q(x), k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) * k.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(self.hidden(mask).repeat_interleave(self.heads, 0)[:, None, :], -1e30)
        return torch.bmm(scores.softmax(-1), v).view(b, self.heads, t, -1).transpose(1, 2).reshape(b, t, c)


class LengthOfTheLongest(LengthAware):
    def hidden(self, mask):
        longest = mask.shape[1] - mask.flip(1).long().argmax(1)  # up to the last real token
        return torch.arange(mask.shape[1])[None, :] >= longest.max().expand(mask.shape[0], 1)


class HeadsRepeatedWrongly(LengthAware):
    """The mask is tiled over heads while heads lie inside the batch."""

    def forward(self, x, mask=None):
        if mask is None:
            return super().forward(x)
        b, t, c = x.shape
        k, v = self.kv(torch.tanh(x)).chunk(2, -1)
        q, k, v = (heads_of(part, self.heads).reshape(b * self.heads, t, -1) for part in (self.q(x), k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) * k.shape[-1] ** -0.5
        scores = scores.masked_fill(~mask.repeat(self.heads, 1)[:, None, :], -1e30)
        return torch.bmm(scores.softmax(-1), v).view(b, self.heads, t, -1).transpose(1, 2).reshape(b, t, c)


# Our own: what the padding weighs in a pooled summary, and padding in one place only


class Summarised(nn.Module):
    """Every token also sees the mean of the real ones."""

    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def count(self, mask):
        return mask.sum(1, keepdim=True)

    def forward(self, x, mask=None):
        mask = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        total = x.masked_fill(~mask[..., None], 0.0).sum(1)
        mean = (total / self.count(mask).clamp(min=1).to(x.dtype))[:, None]
        k, v = self.k(torch.cat([mean, x], 1)), self.v(torch.cat([mean, x], 1))
        key_mask = F.pad(mask, (1, 0), value=True)[:, None, :]
        return F.scaled_dot_product_attention(self.q(x), k, v, attn_mask=key_mask)


class SummarisedOverAll(Summarised):
    def count(self, mask):
        return torch.full((mask.shape[0], 1), mask.shape[1])


CLAIMS = ("padding", "batch-independence", "determinism")

EXHIBITS = [
    Exhibit(
        "PA1",
        report("fla-org/flash-linear-attention/issues/1263"),
        "Padded values are hidden, padded keys stay in the normaliser.",
        "layer",
        ValuesAloneHidden,
        LinearAttention,
        ("padding",),
        (*CLAIMS, "gradients"),
    ),
    Exhibit(
        "PA2",
        report("fla-org/flash-linear-attention/issues/1272"),
        "The state goes on decaying by the gates of padded tokens.",
        "layer",
        GateRunsOn,
        GatedLinear,
        ("padding",),
        CLAIMS,
    ),
    Exhibit(
        "PA4",
        report("unslothai/unsloth/issues/3699"),
        "All rows of the batch get the positions of the first.",
        "model",
        PositionsOfTheFirstRow,
        PaddedGpt,
        ("padding",),
        (*CLAIMS, "causality"),
    ),
    Exhibit(
        "PA5",
        report("huggingface/transformers/issues/22161"),
        "Positions are counted from the pad on the left.",
        "layer",
        SinusoidFromTheEdge,
        SinusoidLayer,
        ("padding",),
        (*CLAIMS, "causality"),
    ),
    Exhibit(
        "PA6",
        report("ndif-team/nnsight/pull/673"),
        "No positions are supplied for a batch that is padded on the left.",
        "model",
        PositionsFromThePad,
        PaddedGpt,
        ("padding",),
        (*CLAIMS, "causality"),
        {"left": True},
    ),
    Exhibit(
        "PA7",
        report("huggingface/transformers/pull/47946"),
        "The mask of the source is overwritten by None before cross-attention.",
        "model",
        SourceMaskOverwritten,
        SmallSeq2Seq,
        ("padding",),
        CLAIMS,
    ),
    Exhibit(
        "PA10",
        report("NVIDIA/FasterTransformer/issues/270"),
        "Every row of the memory is taken to be as long as the longest.",
        "layer",
        LengthOfTheLongest,
        LengthAware,
        ("padding",),
        CLAIMS,
    ),
    Exhibit(
        "L4-tiled",
        "",
        "The mask is tiled over heads that lie inside the batch, so rows get each other's padding.",
        "layer",
        HeadsRepeatedWrongly,
        LengthAware,
        ("padding",),
        CLAIMS,
    ),
    Exhibit(
        "L4-mean",
        "",
        "A summary of the real tokens is divided by the padded length.",
        "layer",
        SummarisedOverAll,
        Summarised,
        ("padding",),
        CLAIMS,
    ),
]
