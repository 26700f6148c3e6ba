"""State that leaks between calls, instances, rows or threads."""

from __future__ import annotations

import math
import time

import torch
import torch.nn.functional as F
from torch import nn
from zoo.exhibit import Exhibit, given, report


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Plain(nn.Module):
    """One head, no positions."""

    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


# IS1: one buffer for the inputs of two calls under way


class Staged(Plain):
    """The input is copied to a place of its own before the computation is started."""

    def forward(self, x):
        staged = x.clone()
        time.sleep(0.002)  # the graph is launched
        return super().forward(staged)


class StagedInOnePlace(Plain):
    room: dict = {}  # noqa: RUF012  the fault: one for all

    def forward(self, x):
        self.room["input"] = x
        time.sleep(0.002)
        return super().forward(self.room["input"])


# IS2: one cache for every request


def attend_with_history(x, cache=None):
    """Keys and values are the tokens themselves."""
    keys = x if cache is None else torch.cat([cache, x], 1)
    mask = torch.ones(x.shape[1], keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - x.shape[1])
    return F.scaled_dot_product_attention(x, keys, keys, attn_mask=mask), keys


def make_shared():
    requests = {}

    def attend_with_shared_history(x, cache=None):
        if cache is None:  # a new request; what is left of the last one of this shape is taken for its prompt
            cache = requests.get(x.shape)
        y, keys = attend_with_history(x, cache)
        requests[x.shape] = keys[:, -x.shape[1] :]
        return y, keys

    return attend_with_shared_history


# IS3: results kept under a key that does not tell requests apart


class RegardCache(Plain):
    def __init__(self, dim=16):
        super().__init__(dim)
        self.store = {}

    def key(self, x):
        return x.dtype, x.shape, x.detach().numpy().tobytes()

    def forward(self, x):
        key = self.key(x)
        if key not in self.store:
            self.store[key] = super().forward(x).detach()
        return self.store[key]


class RememberingTheStart(RegardCache):
    def key(self, x):
        return x.dtype, x.shape, x[:, :1].detach().numpy().tobytes()


# IS5: a batch of one is computed otherwise than a batch of many


def same_for_all(q, k, v):
    return (torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def split_for_many(q, k, v):
    """From two rows on, weights are kept in fewer digits to save room."""
    weights = (torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])).softmax(-1)
    if q.shape[0] > 1:
        weights = weights.to(torch.bfloat16).to(v.dtype)
    return weights @ v


# KV13: a flag that is set and never taken back


class Forecaster(nn.Module):
    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def past(self):
        return None

    def keep(self, k, v):
        return None

    def forward(self, x):
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        past = self.past() if x.shape[1] == 1 else None
        if past is not None and past[0].shape[0] == x.shape[0]:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        self.keep(k, v)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class ForecasterWithMemory(Forecaster):
    """A single token is taken for the next step of whatever came before."""

    kept = None

    def past(self):
        return self.kept

    def keep(self, k, v):
        self.kept = (k.detach(), v.detach()) if k.shape[2] > 1 and self.kept is None else self.kept


# Our own: tables that are made once


class Rotated(nn.Module):
    def __init__(self, dim=16, base=100.0):
        super().__init__()
        self.dim, self.base = dim, base
        self.qk, self.v = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.tables = {}

    def angles(self, tokens):
        key = (tokens, self.base, self.dim)
        if key not in self.tables:
            rate = self.base ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
            self.tables[key] = torch.arange(tokens, dtype=torch.float64)[:, None] * rate
        return self.tables[key]

    def forward(self, x):
        angle = self.angles(x.shape[1])
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        q, k = ((a * cos - b * sin, a * sin + b * cos) for a, b in (y.chunk(2, -1) for y in self.qk(x).chunk(2, -1)))
        return F.scaled_dot_product_attention(torch.cat(q, -1), torch.cat(k, -1), self.v(x), is_causal=True)


class StretchedOnce(Rotated):
    """The table is stretched to the longest input so far, as a dynamic scaling does, and never shrinks back."""

    longest = 32

    def angles(self, tokens):
        self.longest = max(self.longest, tokens)
        return super().angles(tokens) * (32 / self.longest)


class Windowed(nn.Module):
    """The mask of each length is kept."""

    def __init__(self, dim=16):
        super().__init__()
        self.dim = dim
        self.qkv = nn.Linear(dim, 3 * dim)
        self.masks = {}

    def key(self, x, mask):
        return x.shape[1]

    def made(self, tokens, mask):
        triangle = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        return triangle

    def forward(self, x, mask=None):
        key = self.key(x, mask)
        if key not in self.masks:
            self.masks[key] = self.made(x.shape[1], mask)
        allowed = self.masks[key] if mask is None else self.masks[key] & mask[:, None, :]
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


class WindowedWithPadding(Windowed):
    """The first caller's padding is kept as well, for every call of the same shape."""

    def key(self, x, mask):
        return x.shape[:2]

    def made(self, tokens, mask):
        triangle = super().made(tokens, mask)
        return triangle if mask is None else triangle & mask[:, None, :]


class Counting(Plain):
    """Runs a statistic along in training, not in evaluation."""

    def __init__(self, dim=16):
        super().__init__(dim)
        self.register_buffer("size", torch.ones(()))

    def watch(self, x):
        if self.training:
            self.size.mul_(0.9).add_(0.1 * x.detach().std())

    def forward(self, x):
        self.watch(x)
        return super().forward(x / self.size)


class CountingAlways(Counting):
    def watch(self, x):
        self.size.mul_(0.9).add_(0.1 * x.detach().std())


class InPlace(Plain):
    """Scaling is done where the input lies."""

    def forward(self, x):
        x = x * 0.5
        return super().forward(x)


class InThePlaceOfTheInput(Plain):
    def forward(self, x):
        x.mul_(0.5)
        return super().forward(x)


CLAIMS = ("statelessness", "determinism")

EXHIBITS = [
    Exhibit(
        "IS1",
        report("ggml-org/llama.cpp/issues/28056"),
        "Two calls under way share the place where their input lies.",
        "layer",
        StagedInOnePlace,
        Staged,
        ("statelessness",),
        CLAIMS,
    ),
    Exhibit(
        "IS2",
        report("ml-explore/mlx-lm/issues/965"),
        "A request that brings no cache gets the one of the request before.",
        "layer",
        make_shared,
        given(attend_with_history),
        ("statelessness",),
        CLAIMS,
    ),
    Exhibit(
        "IS3",
        report("LMCache/LMCache/issues/4385"),
        "Results are stored under the first token, and another request finds them.",
        "layer",
        RememberingTheStart,
        RegardCache,
        ("statelessness",),
        ("statelessness", "determinism"),
    ),
    Exhibit(
        "IS5",
        report("vllm-project/vllm/pull/32480"),
        "A batch of many is computed with fewer digits than a batch of one.",
        "operator",
        given(split_for_many),
        given(same_for_all),
        ("batch-independence",),
        ("batch-independence", "permutation", "determinism"),
    ),
    Exhibit(
        "KV13-flag",
        report("time-series-foundation-models/lag-llama/issues/81"),
        "The cache of an earlier forecast is never put away, and a single token attends to it.",
        "layer",
        ForecasterWithMemory,
        Forecaster,
        ("statelessness",),
        (*CLAIMS, "causality"),
    ),
    Exhibit(
        "L22-stretch",
        "",
        "Positions are stretched to the longest input so far and stay stretched.",
        "layer",
        StretchedOnce,
        Rotated,
        ("statelessness",),
        CLAIMS,
    ),
    Exhibit(
        "L22-mask",
        "",
        "A mask is kept for each shape, with the padding of the first call.",
        "layer",
        WindowedWithPadding,
        Windowed,
        ("statelessness",),
        (*CLAIMS, "padding"),
    ),
    Exhibit(
        "L22-running",
        "",
        "A running statistic runs on in evaluation.",
        "layer",
        CountingAlways,
        Counting,
        ("statelessness",),
        CLAIMS,
    ),
    Exhibit(
        "L22-place",
        "",
        "The input is scaled in its own place, so the caller's numbers change.",
        "layer",
        InThePlaceOfTheInput,
        InPlace,
        ("statelessness",),
        CLAIMS,
    ),
]
