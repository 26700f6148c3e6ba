"""Small causal layers and models with a cache, each in another style, right and wrong, for tests of laws.

Every layer is multi-head attention with rotated queries and keys. `fault` names what is wrong with it; none by default.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn


def turned(x: Tensor, first: int) -> Tensor:
    """Pairs of features turned by their token's position, which begins at `first`."""
    half = x.shape[-1] // 2
    places = torch.arange(first, first + x.shape[-2], dtype=x.dtype)
    angles = places[:, None] * 0.7 ** torch.arange(half, dtype=x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Core(nn.Module):
    """Projections and attention; `mix` is told where the queries and the keys begin."""

    def __init__(self, channels: int = 12, heads: int = 3, window: int | None = None, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.heads, self.window, self.fault = heads, window, fault
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)

    def parts(self, x: Tensor, first: int) -> list[Tensor]:
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return [turned(query, 0 if self.fault == "query at zero" else first), turned(key, first), value]

    def mix(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        queries, keys = query.shape[-2], key.shape[-2]
        first = 0 if self.fault == "aligned at the start" else keys - queries
        rows, columns = torch.arange(queries)[:, None] + first, torch.arange(keys)
        visible = columns <= rows
        if self.fault == "not causal":
            visible = torch.ones_like(visible)
        if self.window is not None:
            visible = visible & (columns > rows - self.window)
        visible = visible.expand(query.shape[0], 1, queries, keys)
        if mask is not None:
            visible = visible & mask[:, None, None, -keys:]
        scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~visible, -1e30)
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


class Returned(Core):
    """`f(x, cache=None) -> (y, cache)` with a pair of tensors; with a window it keeps that many tokens."""

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: tuple | None = None) -> tuple[Tensor, tuple]:
        first = 0 if cache is None or self.fault == "positions restart" else cache[2]
        query, key, value = self.parts(x, first)
        if cache is not None:
            key, value = torch.cat([cache[0], key], 2), torch.cat([cache[1], value], 2)
        output = self.mix(query, key, value, mask)
        if self.window is not None:
            kept = self.window - 1 if self.fault != "window kept short" else self.window - 2
            key, value = key[:, :, -kept:], value[:, :, -kept:]
        return output, (key, value, first + x.shape[1])


class Filled(Core):
    """`f(x, cache=None) -> y` that writes into a dict."""

    def forward(self, x: Tensor, cache: dict | None = None) -> Tensor:
        past = cache or {}
        query, key, value = self.parts(x, past["key"].shape[2] if past else 0)
        if past:
            key = torch.cat([past["key"], key], 2)
            value = torch.cat([past["value"], value], 2)
        if cache is not None:
            if self.fault == "second piece lost" and past:
                return self.mix(query, key, value)
            cache["key"], cache["value"] = key, value
        return self.mix(query, key, value)


class Slots:
    """Room for a number of tokens, made once."""

    def __init__(self, room: int, fault: str = "") -> None:
        self.room, self.length, self.fault = room, 0, fault
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.key is None or self.value is None:
            shape = (*key.shape[:2], self.room, key.shape[-1])
            self.key, self.value = torch.zeros(shape, dtype=key.dtype), torch.zeros(shape, dtype=key.dtype)
        end = self.length + key.shape[2]
        self.key[:, :, self.length : end], self.value[:, :, self.length : end] = key, value
        self.length = end
        if self.fault == "empty slots seen":
            return self.key, self.value
        return self.key[:, :, :end], self.value[:, :, :end]

    def crop(self, tokens: int) -> None:
        if self.fault == "crop does nothing":
            return
        self.length = tokens + 1 if self.fault == "crop off by one" else tokens

    def reorder(self, index: Tensor) -> None:
        assert self.key is not None
        assert self.value is not None
        if self.fault == "reorder does nothing":
            return
        self.key = self.key[index]
        if self.fault != "reorder omits values":
            self.value = self.value[index]


class Trimmed(Slots):
    """Slots that are told how many tokens to drop, and speak of it as `trim`."""

    crop = None  # type: ignore[assignment]

    def trim(self, tokens: int) -> None:
        if self.fault != "trim does nothing":
            self.length -= tokens


class Made(Core):
    """`layer.new_cache(room)` and `f(x, cache=...)`, which fills it."""

    slots: type[Slots] = Slots

    def new_cache(self, batch_size: int, max_len: int) -> Slots:
        return self.slots(max_len, self.fault)

    def forward(self, x: Tensor, cache: Slots | None = None) -> Tensor:
        query, key, value = self.parts(x, cache.length if cache is not None else 0)
        if cache is None:
            return self.mix(query, key, value)
        before = cache.length
        keys, values = cache.append(key, value)
        if keys.shape[2] != before + x.shape[1]:  # all slots: nothing hides those that are empty
            weights = (query @ keys.mT * query.shape[-1] ** -0.5).softmax(-1)
            return self.out((weights @ values).transpose(1, 2).flatten(2))
        return self.mix(query, keys, values)


class MadeTrimmed(Made):
    slots = Trimmed


class Inside(Core):
    """Keeps its cache to itself; `f(x, start_pos=0)` says where the piece begins, and slots before it are reused."""

    def __init__(self, **words: object) -> None:
        super().__init__(**words)  # type: ignore[arg-type]
        self.register_buffer("keys", torch.zeros(12, 3, 1100, 4), persistent=False)
        self.register_buffer("values", torch.zeros(12, 3, 1100, 4), persistent=False)

    def forward(self, x: Tensor, start_pos: int = 0) -> Tensor:
        query, key, value = self.parts(x, start_pos)
        rows, end = x.shape[0], start_pos + x.shape[1]
        keys, values = self.keys.clone(), self.values.clone()
        keys[:rows, :, start_pos:end] = key
        values[:rows, :, start_pos:end] = value
        if self.fault != "second piece lost" or start_pos == 0:
            self.keys, self.values = keys, values
        return self.mix(query, keys[:rows, :, :end], values[:rows, :, :end])


class Switched(Core):
    """HasCache while `use_cache=True`, until `reset_cache()`."""

    def __init__(self, **words: object) -> None:
        super().__init__(**words)  # type: ignore[arg-type]
        self.past: tuple[Tensor, Tensor] | None = None

    def reset_cache(self) -> None:
        self.past = None

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        past = self.past if use_cache else None
        query, key, value = self.parts(x, past[0].shape[2] if past is not None and self.fault != "flag" else 0)
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        if use_cache:
            self.past = (key, value)
        return self.mix(query, key, value)


class Model(nn.Module):
    """Two layers over ids; returns `logits` and `past_key_values`, a list of one pair for each layer."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(7)
        self.words = nn.Embedding(17, 12)
        self.layers = nn.ModuleList([Returned(fault=fault), Returned(window=9)])
        self.head = nn.Linear(12, 17)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: list | None = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        x, caches = self.words(input_ids), []
        mask = None if attention_mask is None else attention_mask.bool()
        for number, layer in enumerate(self.layers):
            change, cache = layer(x, mask, None if past_key_values is None else past_key_values[number])
            x = x + change
            caches.append(cache)
        return SimpleNamespace(logits=self.head(x), past_key_values=caches if use_cache else None)


class Running(nn.Module):
    """Linear attention: the state is a sum, `step(x, state)` goes on from it. It cannot be cropped."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv = nn.Linear(12, 36)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x)[0]

    def step(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        query, key, value = self.qkv(x).chunk(3, -1)
        query, key = query.exp(), key.exp()
        sums = (key[..., :, None] * value[..., None, :]).cumsum(1)
        norms = key.cumsum(1)
        if state is not None:
            sums = sums + state[0][:, None]
            norms = norms if self.fault == "norm omitted" else norms + state[1][:, None]
        output = (query[..., None, :] @ sums)[..., 0, :] / (query * norms).sum(-1, keepdim=True)
        return output, (sums[:, -1], norms[:, -1])


# Targets with their kind. The right ones obey every law about caches that applies to them.
RIGHT = {
    "returned": (Returned(), "layer"),
    "window": (Returned(window=7), "layer"),
    "filled": (Filled(), "layer"),
    "made": (Made(), "layer"),
    "trimmed": (MadeTrimmed(), "layer"),
    "inside": (Inside(), "layer"),
    "switched": (Switched(), "layer"),
    "model": (Model(), "model"),
    "running": (Running(), "layer"),
}
WRONG = {
    "query at zero": (Returned(fault="query at zero"), "layer"),
    "positions restart": (Returned(fault="positions restart"), "layer"),
    "aligned at the start": (Returned(fault="aligned at the start"), "layer"),
    "not causal": (Filled(fault="not causal"), "layer"),
    "second piece lost": (Filled(fault="second piece lost"), "layer"),
    "second piece lost inside": (Inside(fault="second piece lost"), "layer"),
    "window kept short": (Returned(window=7, fault="window kept short"), "layer"),
    "empty slots seen": (Made(fault="empty slots seen"), "layer"),
    "flag": (Switched(fault="flag"), "layer"),
    "one layer of a model": (Model(fault="positions restart"), "model"),
    "norm omitted": (Running(fault="norm omitted"), "layer"),
}
WRONG_ALGEBRA = {
    "crop does nothing": Made(fault="crop does nothing"),
    "crop off by one": Made(fault="crop off by one"),
    "reorder does nothing": Made(fault="reorder does nothing"),
    "reorder omits values": Made(fault="reorder omits values"),
    "trim does nothing": MadeTrimmed(fault="trim does nothing"),
}
