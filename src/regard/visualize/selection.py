"""Layers, heads and queries by index, counted from 0."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypeGuard

from regard.errors import InputError


def read_indices(value: Any) -> list[int] | None:
    """An index or several as a list; None selects all."""
    if value is None:
        return None
    indices = value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    if not indices or not all(is_index(index) for index in indices):
        raise InputError(
            "Layers and heads have numbers.",
            asked=repr(value)[:80],
            because="they are counted from 0, and at least one is drawn",
            instead="layer=0, head=[0, 2], or None for all",
        )
    return [int(index) for index in indices]


def is_index(value: Any) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def select_indices(name: str, indices: Sequence[int] | None, count: int, what: str = "") -> list[int]:
    """The selected indices of `count` layers, heads or tokens, all of them if None; raises for one out of range.

    name: the argument, "layer", "head" or "query".
    what: what there are `count` of, where the name does not say it.
    """
    selected = list(range(count)) if indices is None else list(indices)
    if not selected or any(not is_index(index) or not 0 <= index < count for index in selected):
        raise InputError(
            f"There is no such {'token' if name == 'query' else name}.",
            asked=f"{name}={', '.join(map(repr, selected))}",
            found=f"{count} {what or f'{name}s'}",
            because="they are counted from 0",
            instead=f"{name}=0 to {name}={count - 1}" if count > 1 else f"{name}=0",
        )
    return [int(index) for index in dict.fromkeys(selected)]
