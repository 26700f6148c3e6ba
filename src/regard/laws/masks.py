"""Masks of tokens, of keys and of pairs that the cases of laws use."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng

# Shapes of masks that broadcast to (batch, head, query, key).
BROADCAST_MASKS = ("none", "keys", "rows of keys", "pairs", "pairs of rows", "pairs of heads")
# Masks of pairs that an operator may take: (query, key), and with a row for each of the batch, and for each head.
PAIRS = ("plain", "pairs", "heads")
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


def draw_operator_mask(
    subject: OperatorAdapter, form: str, batch: int, queries: int, keys: int, rng: Rng
) -> Tensor | None:
    """A mask of a form: "none", "keys" with half of the keys hidden in each row, or a form of `pair_mask`."""
    if form == "none":
        return None
    if form == "keys":
        return token_mask("random", batch, keys, keys // 2, rng)[:, None, None, :]
    return pair_mask(subject, form, batch, queries, keys, rng)


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


def prepare_masked_call(
    subject: OperatorAdapter, form: str, batch: int, queries: int, keys: int, rng: Rng
) -> tuple[OperatorAdapter, Tensor | None]:
    """A mask in the form that an operator takes, and the operator called with it as it is, without a copy."""
    mask = make_pair_mask(subject, form, batch, queries, keys, rng)
    if mask is None or subject.form is None:
        return subject, mask
    plain = copy.copy(subject)
    plain.form = replace(subject.form, hide=False, dtype=torch.bool)
    return plain, subject.form.give(mask)


def make_pair_mask(subject: OperatorAdapter, form: str, batch: int, queries: int, keys: int, rng: Rng) -> Tensor | None:
    """A mask for an operator: "none", "right" for padding, or one of `PAIRS`."""
    if form == "none":
        return None
    if form in ("right", "row"):
        mask = make_token_mask(form, batch, keys)
        assert mask is not None
        return mask[:, None, None, :]
    mask = pair_mask(subject, {"plain": "shared", "empty": "pairs"}.get(form, form), batch, queries, keys, rng)
    if form == "empty":
        mask[-1, :, queries // 2] = False
    return mask[0, 0] if form == "plain" else mask


def list_row_hiding_masks(subject: Adapter) -> tuple[str, ...]:
    """Masks that hide everything from somewhere: a row of the batch, or one query of an operator."""
    if "mask" not in subject.abilities:
        return ()
    return ("row", "empty") if isinstance(subject, OperatorAdapter) else ("row",)


def make_token_mask(form: str, batch: int, tokens: int) -> Tensor | None:
    """A mask of tokens: "none", "right" for padding, or "row" where the last row is all padding."""
    if form == "none":
        return None
    if form == "row":
        return token_mask("row", batch, tokens, tokens // 2, Rng(0, "row"))
    return make_right_padding(batch, tokens)


def make_right_padding(batch: int, tokens: int) -> Tensor:
    """A mask of which the rows end in padding, one token more in each; every row keeps half of its tokens."""
    hidden = torch.arange(batch)[:, None].clamp(max=tokens // 2)
    return torch.arange(tokens) < tokens - hidden


def draw_broadcast_mask(kind: str, rng: Rng, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """A random mask of one of `BROADCAST_MASKS`, in which every query keeps its own key and the first."""
    shape = {
        "keys": (1, 1, 1, keys),
        "rows of keys": (batch, 1, 1, keys),
        "pairs": (queries, keys),
        "pairs of rows": (batch, 1, queries, keys),
        "pairs of heads": (batch, heads, queries, keys),
    }[kind]
    mask = rng.integers(0, 2, *shape).bool()
    mask[..., 0] = True
    if kind.startswith("pairs"):
        own = torch.arange(queries) + keys - queries
        mask[..., torch.arange(queries), own.clamp(min=0)] = True
        mask[..., torch.arange(queries), torch.arange(queries).clamp(max=keys - 1)] = True
    return mask


def make_padding(side: str, batch: int, tokens: int) -> Tensor | None:
    """Masks of tokens with another number of real ones in each row."""
    if side == "none":
        return None
    real = torch.tensor([max(tokens - 1 - 2 * row, 1) for row in range(batch)])
    order = torch.arange(tokens)
    order = order.flip(0) if side == "left" else order
    return order[None, :] < real[:, None]
