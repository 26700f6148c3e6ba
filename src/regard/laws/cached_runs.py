"""Running a subject piece by piece with its cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.adapters.base import Adapter, Cached
from regard.adapters.operator import OperatorAdapter
from regard.adapters.precision import find_coarsest_dtype
from regard.adapters.rng import Rng
from regard.laws.compare import FACTOR


def find_cached(subject: Adapter) -> Cached:
    """How the subject runs piece by piece."""
    if subject.caching is None and isinstance(subject, OperatorAdapter):
        return KeysAndValues(subject)
    assert subject.caching is not None
    return subject.caching


class KeysAndValues:
    """The KV cache of an operator: new queries attend to all keys and values so far."""

    def __init__(self, subject: OperatorAdapter) -> None:
        self.subject = subject

    def start(self, batch: int, tokens: int) -> Any:
        return None

    def step(self, state: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        past = x if state is None else torch.cat([state, x], 1)
        query, (_, key, value) = self.subject.parted(x)[0], self.subject.parted(past)
        output = self.subject.attend(query, key, value, None if mask is None else mask[:, None, None, :])
        return self.subject.rows(output), past

    def reorder(self, state: Any, index: Tensor) -> Any | None:
        return None

    def crop(self, state: Any, tokens: int) -> Any | None:
        return None


def decode_in_pieces(caching: Cached, x: Tensor, pieces: list[int], mask: Tensor | None = None) -> Tensor:
    """The output rows of a text read in pieces."""
    state: Any = caching.start(x.shape[0], x.shape[1])
    rows, read = [], 0
    for piece in x.split(pieces, 1):
        read += piece.shape[1]
        row, state = caching.step(state, piece, None if mask is None else mask[:, :read])
        rows.append(row)
    return torch.cat(rows, 1)


def split_into(split: str, tokens: int, rng: Rng) -> list[int]:
    """The sizes of the pieces, none of them empty."""
    each = {"ones": 1, "twos": 2, "threes": 3}.get(split)
    first = {"halves": -(-tokens // 2), "first": 1, "last": tokens - 1}.get(split, tokens)
    if each is not None:
        sizes = [each] * (tokens // each) + [tokens % each]
    elif split == "prefill":
        begin = max(1, tokens - 4)
        sizes = [begin] + [1] * (tokens - begin)
    elif split.startswith("from "):
        begin = max(1, min(int(split.removeprefix("from ")), tokens - 1))
        sizes = [begin] + [1] * min(12, tokens - begin) + [max(tokens - begin - 12, 0)]
    elif split == "random":
        sizes = []
        while sum(sizes) < tokens:
            largest = (2, 4, tokens)[rng.integer(0, 3)]
            sizes.append(min(rng.integer(1, largest + 1), tokens - sum(sizes)))
    else:
        sizes = [first, tokens - first]
    return [size for size in sizes if size]


def describe_pieces(pieces: list[int]) -> str:
    """Sizes of pieces, short."""
    if len(pieces) > 6:
        return ", ".join(map(str, pieces[:4])) + f" ... {pieces[-1]}"
    return ", ".join(map(str, pieces))


def measure_coarseness(subject: Adapter, caching: Cached) -> float:
    """How much coarser the numbers in a cache are than those of a run, in bounds; it may have its own precision."""
    if subject.dtype != torch.float64:
        return 1.0
    if (known := vars(subject).get("_coarseness")) is None:
        tokens = subject.lengths(3)[0]
        x = subject.draw(1, tokens, Rng(0, "coarseness"))
        eps = torch.finfo(find_coarsest_dtype(lambda: decode_in_pieces(caching, x, [1] * tokens))).eps
        factor = FACTOR[torch.float32] / FACTOR[torch.float64]
        known = 1.0 if eps <= subject.eps else max(1.0, eps / subject.eps * factor)
        vars(subject)["_coarseness"] = known
    return known
