"""Caches of Regard's layers and models, as laws use them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.adapters.mask_patterns import is_padding
from regard.errors import CacheError
from regard.layers import MultiHeadAttention
from regard.layers.cache import StateCache


class RegardCache:
    """A fresh cache of the target, filled as its pieces come; only the first may be padded, and on the left."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def bound_to(self, adapter: Any) -> RegardCache:
        return type(self)(adapter)

    def start(self, batch: int, tokens: int) -> Any:
        target = self.adapter.target
        if isinstance(target, MultiHeadAttention):
            return target.new_cache()
        return self.adapter.new_cache()

    def step(self, state: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        return self.adapter.call(x, None, cache=state, **self.padding(x, mask)), state

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


__all__ = ["RegardCache"]
