"""Which tokens a trial hides, and which keys from which queries."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng

SIDES = ("right", "left", "interior", "random")


def token_mask(side: str, batch: int, tokens: int, hidden: int, rng: Rng) -> Tensor:
    """`(batch, token)`, True is real. Rows hide unequal numbers: `hidden`, none, half of it, a third, and so on.

    Every row keeps a token. `side` is right, left, interior, random, "row" (as right, and the last row keeps none),
    "same" (all rows as the first, on the right) or "single" (one real token for each row, each elsewhere).
    """
    hidden = min(hidden, tokens - 1)
    places = torch.arange(tokens)
    rows = []
    for row in range(batch):
        count = hidden if row == 0 or side == "same" else (0 if row == 1 else max(hidden // row, 1))
        count = min(count, tokens - 1)
        if side == "left":
            real = places >= count
        elif side == "interior":
            first = max((tokens - count) // 2, 1) if count < tokens - 1 else 1
            real = (places < first) | (places >= first + count)
        elif side == "random":
            real = torch.ones(tokens, dtype=torch.bool)
            real[rng.permutation(tokens)[:count]] = False
        elif side == "single":
            real = places == (row * 3 + tokens // 2) % tokens
        else:
            real = places < tokens - count
        rows.append(real)
    if side == "row":
        rows[-1] = torch.zeros(tokens, dtype=torch.bool)
    return torch.stack(rows)


def key_mask(subject: OperatorAdapter, real: Tensor, shape: str, queries: int) -> Tensor:
    """A mask of keys `(batch, key)` in a shape that an operator takes."""
    mask = real[:, None, None, :]
    if shape == "pairs":
        return mask.expand(-1, 1, queries, -1).clone()
    if shape == "heads":
        return mask.expand(-1, subject.heads, queries, -1).clone()
    return mask


def pair_mask(subject: OperatorAdapter, shape: str, batch: int, queries: int, keys: int, rng: Rng) -> Tensor:
    """A random mask of pairs: (1, 1, query, key), (batch, 1, query, key) as "pairs", or for each head as "heads".

    Every query keeps its last key and one other, where unequal lengths meet at the end, so that a causal subject sees
    something too.
    """
    sizes = {"shared": (1, 1), "pairs": (batch, 1), "heads": (batch, subject.heads)}[shape]
    mask = rng.integers(0, 2, *sizes, queries, keys).bool()
    own = (torch.arange(queries) + keys - queries).clamp(0, keys - 1)
    mask[..., torch.arange(queries), own] = True
    mask[..., 0] |= rng.integers(0, 2, *sizes, queries).bool()
    return mask
