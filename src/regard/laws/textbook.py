"""The formula that an operator claims to compute, where it is found to compute it on a small case."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng


@dataclass(frozen=True)
class Textbook:
    """softmax(scale Q Kᵀ + mask) V, of all keys or of those up to the query's own.

    Attributes:
        causal: whether later keys are hidden.
        scale: the factor of the scores; None is one over the root of the size.
        align: where unequal lengths meet; None if that was not found, or does not matter.
        masks: whether a mask hides keys, so that its place in the formula is known.
    """

    causal: bool
    scale: float | None
    align: str | None
    masks: bool

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """The output, with one matrix of scores and nothing clever."""
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = query @ key.mT * scale
        queries, keys = scores.shape[-2:]
        if self.causal:
            offset = keys - queries if self.align != "start" else 0
            scores = scores.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(offset), float("-inf"))
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ value


def find_textbook_formula(subject: OperatorAdapter) -> Textbook | None:
    """The formula that the operator computes on a few tokens, or None if it is none of these."""
    if "_textbook" not in vars(subject):  # found once; every precision computes the same formula
        vars(subject)["_textbook"] = _match_formula(subject)
    return vars(subject)["_textbook"]


@torch.no_grad()
def _match_formula(subject: OperatorAdapter) -> Textbook | None:
    rng = Rng(0, "textbook")
    try:
        small = subject.tensors(rng, 2, 6, 6)
        found = subject.attend(*small)
    except Exception:  # other laws report a subject that refuses this
        return None
    for causal in (False, True):
        for scale in dict.fromkeys((subject.conventions.scale, None)):
            formula = Textbook(causal, scale, None, False)
            if is_close(formula(*small), found):
                return Textbook(causal, scale, _find_alignment(subject, formula), _obeys_masks(subject, rng))
    return None


def _find_alignment(subject: OperatorAdapter, formula: Textbook) -> str | None:
    if not formula.causal:
        return "end"
    tensors = subject.tensors(Rng(0, "aligned"), 2, 3, 7)
    try:
        found = subject.attend(*tensors)
    except Exception:  # it takes equal lengths only
        return None
    for align in ("end", "start"):
        if is_close(Textbook(True, formula.scale, align, False)(*tensors), found):
            return align
    return None


def _obeys_masks(subject: OperatorAdapter, rng: Rng) -> bool:
    """Whether the output is independent of keys that a mask hides, and depends on the others."""
    if "mask" not in subject.abilities:
        return False
    query, key, value = subject.tensors(rng, 2, 6, 6)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    mask[..., 2] = False
    other = value.clone()
    other[:, :, 2] += 5
    changed = value.clone()
    changed[:, :, 0] += 5
    try:
        one, two, three = (subject.attend(query, key, each, mask) for each in (value, other, changed))
    except Exception:  # a mask of another shape, then
        return False
    return is_close(one, two) and not is_close(one, three)


def is_close(expected: Tensor, found: Tensor, tolerance: float = 1e-4) -> bool:
    """Equal but for rounding, roughly: for telling conventions apart, not for judging."""
    if expected.shape != found.shape:
        return False
    scale = float(expected.abs().nan_to_num(0, 0, 0).max()) + 1e-30
    return bool(((expected - found).abs() <= tolerance * scale).all())


def draw_pair_mask(kind: str, batch: int, heads: int, queries: int, keys: int, rng: Rng) -> Tensor:
    """A mask `(batch, head, query, key)` of a kind, in which every query sees the key at its own place."""
    rows, columns = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    if kind == "banded":
        mask = ((columns - rows).abs() <= 2).expand(batch, heads, queries, keys).clone()
    elif kind in ("late", "early"):
        cut = {"late": 64, "early": max(keys - 65, 1)}[kind]
        changed = columns >= min(cut, keys - 1) if kind == "late" else columns < cut
        mask = changed.expand(batch, heads, queries, keys).clone()
    elif kind == "blocks":
        mask = ((columns // 64 + rows // 64) % 2 == 0).expand(batch, heads, queries, keys).clone()
    else:
        mask = rng.integers(0, 2, batch, heads, queries, keys).bool()
    mask |= columns == rows.clamp(0, keys - 1)
    return mask
