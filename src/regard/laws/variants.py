"""Variants of a subject that a case may need: half precision, other head sizes, and lengths beyond the usual ones.

Code often has a branch for half precision, for wide heads and for long sequences. A law searches there as well: a case
with `dtype="bfloat16"`, `head_dim=80` or `num_heads=2` is run on the subject in that variant.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn

from regard.adapters.rng import Rng
from regard.laws.law import Case

if TYPE_CHECKING:
    from regard.adapters.base import Adapter

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# One length beyond 512 and one beyond 1024, neither of them a multiple of a block.
LONG, LONGER = 601, 1037
# Multiplications that one call of a long probe may take, in a fast and in a full search.
AFFORDABLE = {True: 2e8, False: 2e9}
# Sizes of an operator that a case may change, and the subject's names for them.
SIZES = {"num_heads": "heads", "head_dim": "dim"}
# Head sizes beyond 64: no power of two, and one just at the next.
WIDE = (80, 128)


def half_precisions(subject: Adapter) -> list[str]:
    """The half precisions that a subject runs in; none for a subject that came in half precision."""
    if subject.native in HALVES.values() or subject.dtype != subject.native:
        return []
    return [name for name, dtype in HALVES.items() if subject.at(dtype) is not None]


def is_half(subject: Adapter) -> bool:
    """Whether this is the half-precision variant of a wider subject."""
    return subject.dtype in HALVES.values() and subject.dtype != subject.native


def in_native_precision(subject: Adapter) -> Adapter:
    """The subject in the precision that it came in."""
    return subject.at(subject.native) or subject


def find_variant(subject: Adapter, case: Case) -> Adapter | None:
    """The subject with the sizes and in the precision of the case; None if it has no such variant."""
    sizes = {own: int(case[name]) for name, own in SIZES.items() if name in case and own in vars(subject)}
    if sizes:
        subject = resize(subject, **sizes)
    name = case.get("dtype")
    return subject.at(HALVES[name]) if isinstance(name, str) and name in HALVES else subject


def resize(subject: Adapter, **sizes: int) -> Adapter:
    """An operator that is drawn with another number of heads or channels; groups of heads are kept."""
    known, key = _RESIZED.setdefault(subject, {}), tuple(sorted(sizes.items()))
    if key not in known:
        other = copy.copy(subject)
        group = other.heads // other.kv_heads  # type: ignore[attr-defined]
        for name, size in sizes.items():
            setattr(other, name, size)
        other.kv_heads = max(other.heads // group, 1)  # type: ignore[attr-defined]
        other.value_dim = other.dim  # type: ignore[attr-defined]
        other._views, other._eps = {}, None
        known[key] = other
    return known[key]


_RESIZED: WeakKeyDictionary[Adapter, dict[tuple, Adapter]] = WeakKeyDictionary()


def head_sizes(subject: Adapter) -> list[dict[str, int]]:
    """Head sizes beyond 64 that an operator of any size takes, each with few heads."""
    if not {"heads", "dim"} <= set(vars(subject)):
        return []
    found = []
    for dim in WIDE:
        heads = 2 * subject.heads // subject.kv_heads  # type: ignore[attr-defined]
        wide = resize(subject, heads=heads, dim=dim)
        try:
            with torch.no_grad():
                wide.run(wide.draw(1, 3, Rng(0, "wide heads")))
        except Exception:  # its head size is fixed
            continue
        found.append({"num_heads": heads, "head_dim": dim})
    return found


def long_lengths(subject: Adapter, fast: bool, *wanted: int) -> list[int]:
    """Those of the wanted lengths that the subject takes and that cost little.

    Its longest where that is shorter than all of them, but still beyond what the other cases try.
    """
    if "lengths" not in subject.abilities:
        return []
    step = subject.step_of_lengths
    lengths = [-(-tokens // step) * step for tokens in wanted]
    if subject.max_length is not None:
        fitting = [tokens for tokens in lengths if tokens <= subject.max_length]
        lengths = fitting or ([subject.max_length] if subject.max_length > 256 else [])
    return [tokens for tokens in lengths if _estimate_multiplications(subject, tokens) <= AFFORDABLE[fast]]


def _estimate_multiplications(subject: Adapter, tokens: int) -> float:
    """About how many multiplications one row of this length takes."""
    target = subject.target
    numbers = sum(each.numel() for each in target.parameters()) if isinstance(target, nn.Module) else 0
    return float(tokens) * (numbers + tokens * subject.channels)
