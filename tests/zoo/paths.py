"""Two code paths that should agree and do not."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from zoo.exhibit import Exhibit, given, report


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


# CA3: the way that shows weights relies on a triangle of the way that does not


class LlamaAttention(nn.Module):
    def __init__(self, dim=16, heads=4):
        super().__init__()
        self.hidden_size, self.heads = dim, heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def triangle(self, tokens):
        return torch.ones(tokens, tokens, dtype=torch.bool).tril()

    def forward(self, x, output_attentions=False):
        q, k, v = (heads_of(f(x), self.heads) for f in (self.q_proj, self.k_proj, self.v_proj))
        if not output_attentions:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o_proj(y.transpose(1, 2).flatten(2)), None
        mask = self.triangle(x.shape[1])
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


class LlamaWithoutTriangle(LlamaAttention):
    def triangle(self, tokens):
        return None  # dropped by the sdpa path, which uses is_causal


# NA2: a head that may see nothing, with weights and without


class WeightsOnRequest(nn.Module):
    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.embed_dim, self.heads = dim, heads
        self.in_proj = nn.Linear(dim, 3 * dim)

    def softmax(self, scores):
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)

    def forward(self, x, mask=None, need_weights=False):
        q, k, v = (heads_of(part, self.heads) for part in self.in_proj(x).chunk(3, -1))
        allowed = None if mask is None else mask[:, None, None, :]
        if not need_weights:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2).flatten(2)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        weights = self.softmax(scores)
        return (weights @ v).transpose(1, 2).flatten(2), weights


class NoNumberWithWeights(WeightsOnRequest):
    def softmax(self, scores):
        return scores.softmax(-1)


# NA8: a path that makes zeros of what is no number


class Propagating(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.dim, self.fused = dim, True
        self.qkv = nn.Linear(dim, 3 * dim)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.fused:
            return self.attend(q, k, v)
        return (torch.bmm(q, k.mT) / math.sqrt(self.dim)).softmax(-1) @ v


class Swallowing(Propagating):
    def attend(self, q, k, v):
        scores = q @ k.mT / math.sqrt(self.dim)
        top = scores.amax(-1, keepdim=True)
        weights = torch.where(top > -torch.inf, torch.exp(scores - top), 0.0)
        total = weights.sum(-1, keepdim=True)
        return torch.where(total > 0, (weights / total) @ v, torch.zeros_like(v))


# PA8: an evaluation path of its own


class Encoder(nn.Module):
    """torch's encoder layer inside, batch first, True marks padding."""

    def __init__(self, dim=16, heads=2):
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x, mask=None):
        return self.encoder(x, src_key_padding_mask=None if mask is None else ~mask)


class EncoderWithNesting(Encoder):
    """In evaluation the rows are packed by their lengths, as if all padding were on the right."""

    def forward(self, x, mask=None):
        if self.training or mask is None:
            return super().forward(x, mask)
        counts = mask.sum(1).tolist()
        rows = [self.encoder(x[i : i + 1, :count]) if count else x[i : i + 1, :0] for i, count in enumerate(counts)]
        return torch.cat([F.pad(row, (0, 0, 0, x.shape[1] - row.shape[1])) for row in rows])


# PA12: the same mask read in two ways


class TwoReaders(nn.Module):
    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.dim, self.heads, self.use_flash = dim, heads, True
        self.qkv = nn.Linear(dim, 3 * dim)

    def fused(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None, None, :])

    def forward(self, x, mask=None):
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        if self.use_flash:
            return self.fused(q, k, v, mask).transpose(1, 2).flatten(2)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], -1e30)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class TwoReadings(TwoReaders):
    def fused(self, q, k, v, mask):
        if mask is not None:
            lengths = mask.sum(-1)
            mask = torch.arange(k.shape[2])[None, :] < lengths[:, None]
        return super().fused(q, k, v, mask)


# PA14, and our own: a mask of numbers


def both_masks(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ v


def only_boolean_masks(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


# LA1, and our own: inputs that are not contiguous


def any_layout(q, k, v):
    b, h, n, d = q.shape
    q, k, v = (x.reshape(b * h, x.shape[2], x.shape[3]) for x in (q, k, v))
    return torch.baddbmm(torch.zeros((), dtype=q.dtype), q, k.mT, alpha=d**-0.5).softmax(-1).bmm(v).view(b, h, n, -1)


def _packed(x):
    b, h, n, d = x.shape
    return torch.as_strided(x, (b * h, n, d), (n * d, d, 1))


def one_layout(q, k, v):
    """The kernel takes a pointer and works out the strides by itself."""
    b, h, n, d = q.shape
    q, k, v = _packed(q), _packed(k), _packed(v)
    return torch.baddbmm(torch.zeros((), dtype=q.dtype), q, k.mT, alpha=d**-0.5).softmax(-1).bmm(v).view(b, h, n, -1)


# LA4: a mask that is cut wrongly on the way to the second block


def _in_blocks(q, k, v, mask, cut, block=64):
    scores = []
    for c in range(0, k.shape[2], block):
        s = q @ k[:, :, c : c + block].mT / math.sqrt(q.shape[-1])
        if mask is not None:
            s = s.masked_fill(~cut(mask, c, s.shape[-1]), -torch.inf)
        scores.append(s)
    return torch.cat(scores, -1).softmax(-1) @ v


def long_masks(q, k, v, mask=None, flash=True):
    if flash:
        return _in_blocks(q, k, v, mask, lambda m, c, width: m[..., c : c + width])
    return both_masks(q, k, v, mask)


def long_masks_cut(q, k, v, mask=None, flash=True):
    if flash:
        return _in_blocks(q, k, v, mask, lambda m, c, width: m[..., :width])
    return both_masks(q, k, v, mask)


# PO4: two conventions of rotation


class TwoRotations(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.dim, self.fused = dim, False
        self.qk, self.v = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def angles(self, x):
        rate = 100.0 ** (-torch.arange(0, self.dim, 2) / self.dim)
        angle = torch.arange(x.shape[1])[:, None] * rate
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    def interleaved(self, x):
        cos, sin = self.angles(x)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def halves(self, x):
        cos, sin = self.angles(x)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def fast_rotation(self, x):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.complex(*self.angles(x))).flatten(-2)

    def forward(self, x):
        q, k = self.qk(x).chunk(2, -1)
        turn = self.fast_rotation if self.fused else self.interleaved
        return F.scaled_dot_product_attention(turn(q), turn(k), self.v(x), is_causal=True)


class ConvertedRotations(TwoRotations):
    def fast_rotation(self, x):
        return self.halves(x)


# PO7: the wrong place of a tuple


class BiasedLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x, bias, output_attentions):
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT + bias).softmax(-1)
        outputs = (x + (weights @ v).transpose(1, 2).flatten(2),)
        return (*outputs, weights, bias) if output_attentions else (*outputs, bias)


class SharedBias(nn.Module):
    """The first layer computes the bias of positions, the second takes it over."""

    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.dim = dim
        self.bias = nn.Parameter(torch.randn(heads, 9))
        self.layers = nn.ModuleList(BiasedLayer(dim, heads) for _ in range(2))

    def place(self, output_attentions):
        return 2 if output_attentions else 1

    def forward(self, x, output_attentions=False):
        token = torch.arange(x.shape[1])
        bias = self.bias[:, (token[None, :] - token[:, None]).clamp(-4, 4) + 4]
        for layer in self.layers:
            outputs = layer(x, bias, output_attentions)
            x, bias = outputs[0], outputs[self.place(output_attentions)]
        return x


class WeightsForBias(SharedBias):
    def place(self, output_attentions):
        return 1


# Our own: dropout that is made up for twice, dropout that never ends


class Dropping(nn.Module):
    def __init__(self, dim=16, p=0.2):
        super().__init__()
        self.dim = dim
        self.qkv, self.drop = nn.Linear(dim, 3 * dim), nn.Dropout(p)

    def dropped(self, weights):
        return self.drop(weights)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.dropped((q @ k.mT / math.sqrt(self.dim)).softmax(-1)) @ v


class ScaledTwice(Dropping):
    def dropped(self, weights):
        return self.drop(weights) if self.training else weights * (1 - self.drop.p)


class AlwaysDropping(Dropping):
    def dropped(self, weights):
        return F.dropout(weights, self.drop.p)


class SdpaDropping(Dropping):
    """dropout_p of SDPA knows nothing of evaluation mode."""

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.drop.p)


SAME = ("paths", "determinism")

EXHIBITS = [
    Exhibit(
        "CA3",
        report("huggingface/transformers/pull/30652"),
        "Asking for the weights takes a path whose triangle was dropped for the other one.",
        "layer",
        LlamaWithoutTriangle,
        LlamaAttention,
        ("paths",),
        ("paths", "causality", "determinism"),
    ),
    Exhibit(
        "NA2",
        report("pytorch/pytorch/issues/160064"),
        "A row that is all padding is zero without weights and no number with them.",
        "layer",
        NoNumberWithWeights,
        WeightsOnRequest,
        ("empty-rows",),
        ("empty-rows", "padding", "paths"),
    ),
    Exhibit(
        "NA8",
        report("pytorch/pytorch/issues/141128"),
        "One path makes zeros of inputs that are no numbers.",
        "layer",
        Swallowing,
        Propagating,
        ("paths",),
        SAME,
    ),
    Exhibit(
        "PA8",
        report("pytorch/pytorch/issues/86120"),
        "In evaluation the rows are packed by their lengths, wherever their padding is.",
        "layer",
        EncoderWithNesting,
        Encoder,
        ("padding", "paths"),
        ("padding", *SAME),
    ),
    Exhibit(
        "PA12",
        report("NVIDIA/TransformerEngine/issues/614"),
        "One path reads the mask, the other the number of its entries.",
        "layer",
        TwoReadings,
        TwoReaders,
        ("padding", "paths"),
        ("padding", *SAME),
    ),
    Exhibit(
        "PA14",
        report("mlverse/torch/issues/1205"),
        "A mask of numbers is accepted and ignored.",
        "operator",
        given(only_boolean_masks),
        given(both_masks),
        ("paths",),
        ("paths", "padding"),
    ),
    Exhibit(
        "LA1",
        report("pytorch/pytorch/issues/112577"),
        "Inputs that are not contiguous are read as if they were.",
        "operator",
        given(one_layout),
        given(any_layout),
        ("paths",),
        (*SAME, "batch-independence"),
    ),
    Exhibit(
        "LA4",
        report("pytorch/pytorch/issues/162588"),
        "From the second block of keys on the mask of the first is used.",
        "operator",
        given(long_masks_cut),
        given(long_masks),
        ("paths", "padding"),
        ("paths", "padding"),
    ),
    Exhibit(
        "PO4",
        report("huggingface/nanotron/pull/427"),
        "One path rotates neighbours, the other halves.",
        "layer",
        ConvertedRotations,
        TwoRotations,
        ("paths",),
        (*SAME, "causality"),
    ),
    Exhibit(
        "PO7",
        report("huggingface/transformers/pull/4499"),
        "With weights in the tuple, the next layer takes them for the bias of positions.",
        "layer",
        WeightsForBias,
        SharedBias,
        ("paths",),
        SAME,
    ),
    Exhibit(
        "L11-dropout",
        "",
        "Dropout is made up for in training, and once more in evaluation.",
        "layer",
        ScaledTwice,
        Dropping,
        ("paths",),
        (*SAME, "permutation"),
    ),
    Exhibit(
        "L12-functional",
        "",
        "Functional dropout is on unless told otherwise.",
        "layer",
        AlwaysDropping,
        Dropping,
        ("determinism",),
        SAME,
    ),
    Exhibit(
        "L12-sdpa",
        "",
        "SDPA is handed a dropout probability in evaluation mode.",
        "layer",
        SdpaDropping,
        Dropping,
        ("determinism",),
        SAME,
    ),
]
