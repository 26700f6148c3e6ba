"""Positions that are not relative, not exact, or not as declared."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from zoo.exhibit import Exhibit, given, report

# PO1: angles in half precision


class RotaryTable(nn.Module):
    """The rates of rotation are kept as Python numbers; cosines are rounded when they are done."""

    def __init__(self, dim=16, heads=2, base=10000.0):
        super().__init__()
        self.dim, self.heads, self.base = dim, heads, base
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.prepare(dim // heads)

    def prepare(self, size):
        self.rates = [self.base ** (-i / size) for i in range(0, size, 2)]

    def table(self, tokens, dtype):
        rates = torch.tensor(self.rates, dtype=torch.float64)
        angle = torch.arange(tokens, dtype=torch.float64)[:, None] * rates
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        cos, sin = self.table(x.shape[1], x.dtype)

        def turn(y):
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        return F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True).transpose(1, 2).flatten(2)


class RotaryBuffer(RotaryTable):
    """The rates are a buffer, which is cast with the model; so are the angles."""

    def prepare(self, size):
        rates = self.base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        self.register_buffer("inv_freq", rates.float())

    def table(self, tokens, dtype):
        angle = torch.outer(torch.arange(tokens).to(self.inv_freq.dtype), self.inv_freq)
        return angle.cos().to(dtype), angle.sin().to(dtype)


class SinusoidTable(nn.Module):
    """Absolute sinusoids, made in float64 once and rounded when used."""

    def __init__(self, dim=16, max_len=2048):
        super().__init__()
        self.dim, self.max_len = dim, max_len
        self.qkv = nn.Linear(dim, 3 * dim)

    def places(self, tokens, dtype):
        return torch.arange(tokens, dtype=torch.float64)

    def forward(self, x):
        rate = torch.exp(-math.log(1000.0) * torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        angle = self.places(x.shape[1], x.dtype).double()[:, None] * rate
        q, k, v = self.qkv(x + torch.cat([angle.sin(), angle.cos()], -1).to(x.dtype)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)


class SinusoidOfRoundedPlaces(SinusoidTable):
    def places(self, tokens, dtype):
        return torch.arange(tokens).to(dtype)  # 257 is no bfloat16


# PO3, and our own: rotations that are none


def _rotary(q, k, v, *, offset=None, bases=(100.0, 100.0)):
    """The first three quarters of each head are rotated; the table holds cosines, then sines."""
    size = max(2, q.shape[-1] * 3 // 4 // 2 * 2)
    half = size // 2
    first = half if offset is None else offset(size)

    def turn(x, base):
        rate = base ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * rate
        table = F.pad(torch.cat([angle.cos(), angle.sin()], -1), (0, size)).to(x.dtype)
        cos, sin = table[:, :half], table[:, first : first + half]
        a, b, rest = x[..., :half], x[..., half:size], x[..., size:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    return F.scaled_dot_product_attention(turn(q, bases[0]), turn(k, bases[1]), v)


def rotary(q, k, v):
    return _rotary(q, k, v)


def rotary_with_padded_sines(q, k, v):
    """Sines are read from behind the next power of two."""
    return _rotary(q, k, v, offset=lambda size: 2 ** math.ceil(math.log2(size)) // 2)


def rotary_of_two_bases(q, k, v):
    return _rotary(q, k, v, bases=(100.0, 10000.0))


def _alibi(q, k, v, distance):
    heads = q.shape[1]
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
    i, j = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    bias = -slopes[:, None, None] * distance(i, j).double()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))


def alibi(q, k, v):
    return _alibi(q, k, v, lambda i, j: (i - j).abs())


def alibi_of_products(q, k, v):
    """The distance is broadcast along the wrong axes: it grows with both places."""
    return _alibi(q, k, v, lambda i, j: (i - j).abs() * (1 + i // 4))


def _interleaved(q, k, v, start):
    """Neighbouring features are rotated, by complex numbers."""

    def turn(x, first):
        rate = 30.0 ** (-torch.arange(x.shape[-1] // 2, dtype=torch.float64) / (x.shape[-1] // 2))
        angle = (torch.arange(x.shape[2], dtype=torch.float64) + first)[:, None] * rate
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2).to(x.dtype)

    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(turn(q, start(q, k)), turn(k, 0), v, attn_mask=mask)


def rotary_from_the_end(q, k, v):
    return _interleaved(q, k, v, lambda q, k: k.shape[2] - q.shape[2])


def rotary_from_the_start(q, k, v):
    """Few queries at the end of many keys are rotated as the first ones."""
    return _interleaved(q, k, v, lambda q, k: 0)


def rotary_and_places(q, k, v):
    place = torch.sin(0.3 * torch.arange(k.shape[2], dtype=torch.float64))[:, None].to(k.dtype)
    return _rotary(q, k + place, v)


class AlibiLayer(nn.Module):
    """A penalty for distance; a row of biases is shifted by its largest before it is rounded."""

    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def bias(self, tokens, dtype):
        place = torch.arange(tokens, dtype=torch.float64)
        slopes = 2.0 ** -torch.arange(3, 3 + self.heads, dtype=torch.float64)
        return (slopes[:, None, None] * (place[None, :] - place[:, None])).to(dtype)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        bias = self.bias(x.shape[1], x.dtype).masked_fill(future, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


class AlibiRounded(AlibiLayer):
    """Places of keys alone, as softmax forgives a shift; but half precision cannot hold them beside the scores."""

    def bias(self, tokens, dtype):
        slopes = 2.0 ** -torch.arange(3, 3 + self.heads).to(dtype)
        return slopes[:, None, None] * torch.arange(tokens).to(dtype).expand(tokens, tokens)


EXHIBITS = [
    Exhibit(
        "PO1",
        report("EleutherAI/gpt-neox/issues/1003"),
        "The rates of rotation are cast with the model, and angles are computed in half precision.",
        "layer",
        RotaryBuffer,
        RotaryTable,
        ("table-precision",),
        ("table-precision", "causality"),
    ),
    Exhibit(
        "L20-places",
        "",
        "Places are cast before they are multiplied, and half precision cannot count that far.",
        "layer",
        SinusoidOfRoundedPlaces,
        SinusoidTable,
        ("table-precision",),
        ("table-precision", "batch-independence"),
    ),
    Exhibit(
        "PO3",
        report("vllm-project/vllm-ascend/issues/12723"),
        "Sines are read behind the next power of two, so rotations change the length of what they rotate.",
        "operator",
        given(rotary_with_padded_sines),
        given(rotary),
        ("relative-position",),
        ("relative-position", "batch-independence"),
    ),
    Exhibit(
        "L15-bases",
        "",
        "Queries and keys are rotated with different bases.",
        "operator",
        given(rotary_of_two_bases),
        given(rotary),
        ("relative-position",),
        ("relative-position", "determinism"),
    ),
    Exhibit(
        "L15-alibi",
        "",
        "The bias grows with the place and not with the distance alone.",
        "operator",
        given(alibi_of_products),
        given(alibi),
        ("relative-position",),
        ("relative-position", "batch-independence"),
    ),
    Exhibit(
        "L2-rotary",
        "",
        "Few queries at the end of many keys are rotated as if they were the first.",
        "operator",
        given(rotary_from_the_start),
        given(rotary_from_the_end),
        ("alignment",),
        ("alignment", "causality"),
    ),
    Exhibit(
        "L15-absolute",
        "",
        "Places are added to queries and keys, and scores depend on where a pair is.",
        "operator",
        given(rotary_and_places),
        given(rotary),
        ("relative-position",),
        ("relative-position", "determinism"),
    ),
    Exhibit(
        "L20-slopes",
        "",
        "Distances are rounded before they are multiplied by a slope.",
        "layer",
        AlibiRounded,
        AlibiLayer,
        ("table-precision",),
        ("table-precision", "causality"),
    ),
]
