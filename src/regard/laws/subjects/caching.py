"""Caches of strangers: how to hand one over, and how to get it back."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from regard.laws.law import Dice
from regard.laws.subjects.base import first_tensor
from regard.laws.subjects.calling import parameters

if TYPE_CHECKING:
    from regard.laws.subjects.layer import Sequences

CACHES = ("cache", "kv_cache", "past_key_values", "past_key_value", "past_kv", "layer_past", "past", "state", "memory")
ASKS = ("use_cache", "return_cache", "return_state", "return_past")
REORDERS = ("reorder", "reorder_cache", "batch_select_indices", "select")
CROPS = ("crop", "trim", "truncate", "rollback")
MAKES = ("new_cache", "make_cache", "init_cache", "create_cache", "empty_cache")


class StrangerCache:
    """`f(x, cache=None)` that returns `(output, cache)`, or that fills the cache it is given."""

    def __init__(self, subject: Sequences, argument: str, style: str) -> None:
        self.subject = subject
        self.argument = argument
        self.style = style  # "returned", "made", "dict" or "list"

    def bound_to(self, subject: Sequences) -> StrangerCache:
        return StrangerCache(subject, self.argument, self.style)

    def start(self, batch: int, tokens: int) -> Any:
        if self.style == "made":
            target = self.subject.target
            return getattr(target, next(name for name in MAKES if hasattr(target, name)))()
        return {"dict": {}, "list": [], "returned": None}[self.style]

    def step(self, state: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        more: dict[str, Any] = {self.argument: state}
        more.update({name: True for name in ASKS if name in parameters(self.subject.target)})
        output = self.subject.call(x, mask, **more)
        return first_tensor(output), (self.returned(output) if self.style == "returned" else state)

    def returned(self, output: Any) -> Any:
        if isinstance(output, tuple | list) and len(output) > 1:
            return output[1]
        for name in CACHES:
            found = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
            if found is not None and not isinstance(output, Tensor):
                return found
        return None

    def reorder(self, state: Any, index: Tensor) -> Any | None:
        for name in REORDERS:
            if callable(method := getattr(state, name, None)):
                result = method(index)
                return state if result is None else result
        target = self.subject.target
        for name in ("reorder_cache", "_reorder_cache"):
            if callable(method := getattr(target, name, None)):
                return method(state, index)
        if isinstance(state, tuple | list | dict | Tensor):
            # A bare tree of tensors is reordered by whoever holds it.
            return tree_map_only(Tensor, lambda tensor: tensor.index_select(0, index), state)
        return None

    def crop(self, state: Any, tokens: int) -> Any | None:
        for name in CROPS:
            if callable(method := getattr(state, name, None)):
                result = method(tokens)
                return state if result is None else result
        return None


def find_cache(subject: Sequences) -> StrangerCache | None:
    """How this subject takes a cache, found out by trying; None if it takes none."""
    names = parameters(subject.target)
    argument = next((name for name in CACHES if name in names), None)
    if argument is None:
        return None
    tokens = subject.lengths(3)[0]
    x = subject.draw(1, tokens, Dice(0, "cache"))
    made = any(callable(getattr(subject.target, name, None)) for name in MAKES)
    for style in (["made"] if made else []) + ["returned", "dict", "list"]:
        caching = StrangerCache(subject, argument, style)
        try:
            state = caching.start(1, tokens)
            before = copy.copy(state)
            with torch.no_grad():
                output, after = caching.step(state, x)
            if output.shape[:2] != x.shape[:2]:
                continue
            if style == "returned" and after is not None:
                return caching
            if style == "made" or (style in ("dict", "list") and len(state) > len(before)):
                return caching
        except Exception:  # not this way, then
            continue
    return None
