"""Caches of Regard's layers and models, as laws use them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.errors import CacheError
from regard.laws.subjects.seen import is_padding
from regard.layers import MultiHeadAttention
from regard.layers.cache import StateCache


class Remembering:
    """A fresh cache of the target, filled as its pieces come; only the first may be padded, and on the left."""

    def __init__(self, subject: Any) -> None:
        self.subject = subject

    def bound_to(self, subject: Any) -> Remembering:
        return type(self)(subject)

    def start(self, batch: int, tokens: int) -> Any:
        target = self.subject.target
        if isinstance(target, MultiHeadAttention):
            return target.new_cache()
        return self.subject.new_cache()

    def step(self, state: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        return self.subject.call(x, None, cache=state, **self.padding(x, mask)), state

    def padding(self, x: Tensor, mask: Tensor | None) -> dict[str, Any]:
        """The lengths of the rows, if the first tokens are padded."""
        if mask is None or bool(mask.all()):
            return {}
        new, begins = mask[:, -x.shape[1] :], mask.shape[1] == x.shape[1]
        if not (is_padding(new, "left") if begins else bool(new.all())):
            raise CacheError(
                "Only the first tokens may be padded, on the left.",
                asked=f"a mask of {mask.sum(-1).tolist()} real tokens out of {mask.shape[1]}",
                because="later padding would leave holes between tokens",
                instead="padding on the left, all of it in the first piece",
            )
        return {"lengths": new.sum(-1)} if begins else {}

    def reorder(self, state: Any, index: Tensor) -> Any:
        for cache in state if isinstance(state, list) else [state]:
            cache.reorder(index)
        return state

    def crop(self, state: Any, tokens: int) -> Any | None:
        caches = state if isinstance(state, list) else [state]
        if any(isinstance(cache, StateCache) for cache in caches):
            return None  # sums cannot be taken apart
        for cache in caches:
            cache.crop(tokens)
        return state


__all__ = ["Remembering"]
