"""Caches that cannot be reordered, or taken back, without damage."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from zoo.caches import Cached, heads_of, lower_right, merged, rotate
from zoo.exhibit import Exhibit, report

# KV7: taking back what a recurrent state has swallowed


class History:
    """A recurrent state, and how it was after each token."""

    def __init__(self):
        self.states = []

    def crop(self, tokens):
        del self.states[tokens:]

    def reorder(self, index):
        self.states = [state.index_select(0, index) for state in self.states]


class Forgetful(History):
    """Recurrent caches cannot be trimmed, so asking for it does nothing."""

    def crop(self, tokens):
        return None


class Recurrent(nn.Module):
    history = History

    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)

    def new_cache(self):
        return self.history()

    def forward(self, x, cache=None):
        cache = self.new_cache() if cache is None else cache
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        k, rows = k.softmax(-1), []
        for t in range(x.shape[1]):
            update = k[:, :, t, :, None] * v[:, :, t, None, :]
            cache.states.append(0.8 * cache.states[-1] + update if cache.states else update)
            rows.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], cache.states[-1]))
        return merged(torch.stack(rows, 2))


class ForgetfulRecurrent(Recurrent):
    history = Forgetful


# KV8: one of the tensors keeps the old order of beams


class Beams:
    def __init__(self):
        self.keys = self.values = self.last = None
        self.length = 0

    def reorder(self, index):
        self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)
        self.last = self.last.index_select(0, index)
        return self

    def crop(self, tokens):
        raise NotImplementedError("the convolution's last token is gone")


class StaleBeams(Beams):
    def reorder(self, index):
        self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)
        return self


class ShiftedKeys(Cached):
    """Keys are mixed with the token before, as a short convolution does; the cache keeps that token."""

    beams = Beams

    def make_cache(self):
        return self.beams()

    def forward(self, x, cache=None):
        cache = self.make_cache() if cache is None else cache
        before = x.new_zeros(x.shape[0], 1, x.shape[2]) if cache.last is None else cache.last
        shifted = torch.cat([before, x[:, :-1]], 1)
        cache.last = x[:, -1:]
        q, k, v = (heads_of(f(y), self.heads) for f, y in ((self.q, x), (self.k, 0.5 * (x + shifted)), (self.v, x)))
        if cache.keys is not None:
            k, v = torch.cat([cache.keys, k], 2), torch.cat([cache.values, v], 2)
        cache.keys, cache.values = k, v
        return self.o(merged(F.scaled_dot_product_attention(q, k, v, attn_mask=lower_right(q.shape[2], k.shape[2]))))


class StaleShiftedKeys(ShiftedKeys):
    beams = StaleBeams


# Our own: cropping the keys, not the count of positions


class Grown:
    def __init__(self):
        self.keys = self.values = None
        self.seen = 0

    def crop(self, tokens):
        self.keys, self.values = self.keys[:, :, :tokens], self.values[:, :, :tokens]
        self.seen = tokens

    def reorder(self, index):
        self.keys, self.values = self.keys[index], self.values[index]


class Miscounted(Grown):
    def crop(self, tokens):
        kept = self.seen
        super().crop(tokens)
        self.seen = min(kept, tokens + 1)


class OldCount(Grown):
    def crop(self, tokens):
        self.keys, self.values = self.keys[:, :, :tokens], self.values[:, :, :tokens]


class KeysAlone(Grown):
    def reorder(self, index):
        self.keys = self.keys[index]


class Counting(Cached):
    """Rotary attention whose cache counts the tokens it has seen."""

    grown = Grown

    def new_cache(self):
        return self.grown()

    def forward(self, x, cache=None):
        cache = self.new_cache() if cache is None else cache
        q, k, v = self.project(x)
        q, k = rotate(q, cache.seen), rotate(k, cache.seen)
        if cache.keys is not None:
            k, v = torch.cat([cache.keys, k], 2), torch.cat([cache.values, v], 2)
        cache.keys, cache.values, cache.seen = k, v, cache.seen + x.shape[1]
        return self.o(merged(F.scaled_dot_product_attention(q, k, v, attn_mask=lower_right(q.shape[2], k.shape[2]))))


class CountingOffByOne(Counting):
    grown = Miscounted


class CountingFromBefore(Counting):
    grown = OldCount


class CountingKeysAlone(Counting):
    grown = KeysAlone


CLAIMS = ("cache-algebra", "cache", "causality")

EXHIBITS = [
    Exhibit(
        "KV7",
        report("ml-explore/mlx-lm/pull/1109"),
        "Trimming a recurrent cache does nothing, so rejected drafts stay in it.",
        "layer",
        ForgetfulRecurrent,
        Recurrent,
        ("cache-algebra",),
        CLAIMS,
    ),
    Exhibit(
        "KV8",
        report("huggingface/transformers/issues/46612"),
        "Keys and values are reordered for beams, the third tensor of the cache is not.",
        "layer",
        StaleShiftedKeys,
        ShiftedKeys,
        ("cache-algebra",),
        CLAIMS,
    ),
    Exhibit(
        "L18-crop",
        "",
        "After cropping, the count of positions is one too high.",
        "layer",
        CountingOffByOne,
        Counting,
        ("cache-algebra",),
        CLAIMS,
    ),
    Exhibit(
        "L18-count",
        "",
        "Cropping takes back the keys and leaves the count of positions.",
        "layer",
        CountingFromBefore,
        Counting,
        ("cache-algebra",),
        CLAIMS,
    ),
    Exhibit(
        "L18-values",
        "",
        "Reordering takes the keys along and leaves the values where they are.",
        "layer",
        CountingKeysAlone,
        Counting,
        ("cache-algebra",),
        CLAIMS,
    ),
]
