"""Two records beside each other: what is equal bit for bit, what differs and by how much, what only one has."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sympy
import torch
from record import load
from torch import Tensor

Difference = str | None


def compare(old: Path, new: Path, show: int = 20) -> int:
    """Print a line for each section and the first differences of each; 1 if anything differs or is missing."""
    (old_tensors, old_facts), (new_tensors, new_facts) = load(old), load(new)
    sections: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    _collect(sections, old_tensors, new_tensors, compare_tensors)
    _collect(sections, old_facts, new_facts, compare_facts)
    for section, found in sorted(sections.items()):
        counts = ", ".join(
            f"{len(found[kind])} {kind}" for kind in ("equal", "differ", "missing", "new") if found[kind]
        )
        print(f"{section:12} {counts}")
        for kind in ("differ", "missing", "new"):
            for line in found[kind][:show]:
                print(f"    {kind:8} {line}")
            if len(found[kind]) > show:
                print(f"    ... and {len(found[kind]) - show} more")
    return int(any(found["differ"] or found["missing"] for found in sections.values()))


def _collect(sections: Any, old: Mapping, new: Mapping, differ: Callable[[Any, Any], Difference]) -> None:
    for name in sorted({*old, *new}):
        found = sections[name.partition("/")[0]]
        if name not in new or name not in old:
            found["missing" if name not in new else "new"].append(name)
            continue
        difference = differ(old[name], new[name])
        if difference is None:
            found["equal"].append(name)
        else:
            found["differ"].append(f"{name}: {difference}")


def compare_tensors(old: Tensor, new: Tensor) -> Difference:
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"{tuple(old.shape)} {old.dtype} -> {tuple(new.shape)} {new.dtype}"
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[old.element_size()]
    unequal = old.view(width) != new.view(width)
    if not unequal.any():
        return None
    a, b = old.double(), new.double()
    if bool((a.isnan() != b.isnan()).any()):
        return f"NaN in {int(a.isnan().sum())} -> {int(b.isnan().sum())} of {a.numel()}"
    apart = (a - b).abs().nan_to_num(0.0)
    if not apart.any():
        return f"{int(unequal.sum())} of {a.numel()} in the sign of zero or the bits of NaN"
    size = b.abs().nan_to_num(0.0).max()
    return f"{int(unequal.sum())} of {a.numel()}, by {float(apart.max()):.2g} (largest {float(size):.2g})"


def compare_facts(old: Any, new: Any) -> Difference:
    if old == new:
        return None
    if isinstance(old, str) and isinstance(new, str) and old[-1:] == new[-1:] == ")":
        return None if are_equal(sympy.sympify(old), sympy.sympify(new)) else _tell_formulas(old, new)
    return f"{_shorten(old)} -> {_shorten(new)}"


def are_equal(old: sympy.Expr, new: sympy.Expr) -> bool:
    """Whether two formulas are the same function: as expressions, or at random sizes."""
    if old.free_symbols != new.free_symbols:
        old, new = sympy.simplify(old), sympy.simplify(new)
    if old == new or sympy.expand(old - new) == 0:
        return True
    symbols = sorted(old.free_symbols | new.free_symbols, key=str)
    rng = random.Random(0)
    for _ in range(5):
        sizes = {symbol: rng.randint(2, 97) for symbol in symbols}
        if abs(sympy.N((old - new).subs(sizes))) > 1e-9 * abs(sympy.N(new.subs(sizes))):
            return False
    return True


def _tell_formulas(old: str, new: str) -> str:
    return f"{_shorten(sympy.sympify(old))} -> {_shorten(sympy.sympify(new))}"


def _shorten(value: Any, length: int = 150) -> str:
    text = str(value)
    return text if len(text) <= length else text[: length - 3] + "..."
