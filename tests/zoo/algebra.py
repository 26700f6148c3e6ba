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

    num_beams = Beams

    def make_cache(self):
        return self.num_beams()

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
    num_beams = StaleBeams


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


# Our own: a ring that is overwritten, slots that are not cleared, a token that is not carried over


class Ring(Cached):
    """The last eight tokens are kept in eight slots; the slot of token t is t mod 8."""

    slots = 8

    def place(self, seen, slots):
        """The token that each slot holds; negative where there is none yet."""
        slot = torch.arange(slots)
        return seen - 1 - (seen - 1 - slot) % slots

    def forward(self, x, cache=None):
        q, k, v = self.project(x)
        b, h, t, d = k.shape
        if cache is None:
            cache = (
                torch.zeros(b, h, self.slots, d, dtype=x.dtype),
                torch.zeros(b, h, self.slots, d, dtype=x.dtype),
                0,
            )
        keys, values, seen = cache[0].clone(), cache[1].clone(), cache[2]
        held = self.place(seen, self.slots)
        token = torch.cat([held, seen + torch.arange(t)])
        now = seen + torch.arange(t)[:, None]
        allowed = (token >= 0) & (token <= now) & (token > now - self.slots)
        y = F.scaled_dot_product_attention(q, torch.cat([keys, k], 2), torch.cat([values, v], 2), attn_mask=allowed)
        for i in range(t):
            keys[:, :, (seen + i) % self.slots] = k[:, :, i]
            values[:, :, (seen + i) % self.slots] = v[:, :, i]
        return self.o(merged(y)), (keys, values, seen + t)


class RingNotTurned(Ring):
    def place(self, seen, slots):
        slot = torch.arange(slots) + max(0, seen - slots)  # as if the oldest were always in the first slot
        return torch.where(slot < seen, slot, -1)


class Slots:
    """Room for a number of tokens, and how many are there."""

    def __init__(self):
        self.keys = self.values = None
        self.used = 0

    def crop(self, tokens):
        self.used = tokens

    def reorder(self, index):
        self.keys, self.values = self.keys[index], self.values[index]


class SlotReader(Cached):
    def new_cache(self):
        return Slots()

    def filled(self, cache):
        return torch.arange(cache.keys.shape[2]) < cache.used

    def forward(self, x, cache=None):
        cache = self.new_cache() if cache is None else cache
        q, k, v = self.project(x)
        t = x.shape[1]
        if cache.keys is None:
            cache.keys, cache.values = (
                k.new_zeros(*k.shape[:2], 160, k.shape[3]),
                v.new_zeros(*v.shape[:2], 160, v.shape[3]),
            )
        old = self.filled(cache)
        seen = torch.cat([old.expand(t, -1), torch.ones(t, t, dtype=torch.bool).tril()], 1)
        both = [torch.cat([room, new], 2) for room, new in ((cache.keys, k), (cache.values, v))]
        y = F.scaled_dot_product_attention(q, *both, attn_mask=seen)
        cache.keys, cache.values = cache.keys.clone(), cache.values.clone()
        cache.keys[:, :, cache.used : cache.used + t] = k
        cache.values[:, :, cache.used : cache.used + t] = v
        cache.used += t
        return self.o(merged(y))


class SlotsThatAreNotZero(SlotReader):
    """A slot counts as filled if something is in it; cropping leaves it there."""

    def filled(self, cache):
        return cache.keys.abs().sum((0, 1, 3)) > 0


class TokenShift(Cached):
    """Values are mixed with the token before."""

    def before(self, cache, x):
        return x.new_zeros(x.shape[0], 1, x.shape[2]) if cache is None else cache[2]

    def forward(self, x, cache=None):
        shifted = torch.cat([self.before(cache, x), x[:, :-1]], 1)
        q, k, v = (heads_of(f(y), self.heads) for f, y in ((self.q, x), (self.k, x), (self.v, 0.5 * (x + shifted))))
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=lower_right(q.shape[2], k.shape[2]))
        return self.o(merged(y)), (k, v, x[:, -1:])


class TokenShiftFromNothing(TokenShift):
    def before(self, cache, x):
        return x.new_zeros(x.shape[0], 1, x.shape[2])


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
    Exhibit(
        "L18-slots",
        "",
        "Slots count as filled while something is in them, and cropping does not empty them.",
        "layer",
        SlotsThatAreNotZero,
        SlotReader,
        ("cache-algebra",),
        CLAIMS,
    ),
    Exhibit(
        "L3-ring",
        "",
        "A ring of slots is read as if its oldest token were always the first.",
        "layer",
        RingNotTurned,
        Ring,
        ("cache",),
        ("cache", "causality"),
    ),
    Exhibit(
        "L3-shift",
        "",
        "The first token of a piece does not know the last one of the piece before.",
        "layer",
        TokenShiftFromNothing,
        TokenShift,
        ("cache",),
        ("cache", "causality"),
    ),
]
