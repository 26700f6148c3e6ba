"""How models of transformers run chunk by chunk with a cache."""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.adapters.base import Variant, first_tensor
from regard.adapters.call_signature import parameters
from regard.adapters.rng import Rng

if TYPE_CHECKING:
    from regard.adapters.huggingface import HuggingFaceTextModel

# The names of the cache as argument and as output, and the flag that enables it.
NAMES = {
    "past_key_values": "use_cache",
    "cache_params": "use_cache",
    "past_buckets_states": "use_cache",
    "mems": "use_mems",
}


class HuggingFaceCache:
    """The cache that the model makes itself with `use_cache=True`."""

    def __init__(self, adapter: HuggingFaceTextModel, argument: str) -> None:
        self.adapter = adapter
        self.argument = argument

    @classmethod
    def found(cls, adapter: HuggingFaceTextModel) -> HuggingFaceCache | None:
        """How this model takes a cache; None if it takes none."""
        for argument in NAMES:
            if argument not in parameters(adapter.target):
                continue
            caching = cls(adapter, argument)
            try:
                with torch.no_grad():
                    x = adapter.draw(1, adapter.lengths(3)[0], Rng(0, "cache"))
                    output, state = caching.step(caching.start(1, 4), x)
                if state is not None and output.shape[:2] == x.shape[:2]:
                    return caching
            except Exception:  # this call is not supported
                continue
        return None

    def bound_to(self, adapter: HuggingFaceTextModel) -> HuggingFaceCache:
        return HuggingFaceCache(adapter, self.argument)

    def start(self, batch: int, tokens: int) -> Any:
        return None

    def step(self, state: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        more = {NAMES[self.argument]: True}
        if state is not None:
            more[self.argument] = state
        output = self.adapter.call(x, mask, **more)
        return first_tensor(output), getattr(output, self.argument, None)

    def reorder(self, state: Any, index: Tensor) -> Any | None:
        state = copy.deepcopy(state)
        if callable(method := getattr(state, "reorder_cache", None)):
            method(index)
            return state
        return None

    def crop(self, state: Any, tokens: int) -> Any | None:
        if not callable(getattr(state, "crop", None)):
            return None
        if getattr(getattr(state, "self_attention_cache", state), "is_croppable", True) is False:
            return None
        state = copy.deepcopy(state)
        try:
            # By how many, as a negative number: the meaning that every version has.
            state.crop(tokens - int(state.get_seq_length()))
        except RuntimeError:  # a sliding-window cache cannot be cropped, and raises
            return None
        return state


def static_cache_variant(adapter: HuggingFaceTextModel) -> Variant | None:
    """Prefill and decode through a cache of fixed length whose free places hold leftovers of another request."""
    library = sys.modules.get("transformers")
    kind = getattr(library, "StaticCache", None)
    if kind is None or "past_key_values" not in parameters(adapter.target) or adapter.target.config.is_encoder_decoder:
        return None

    def variant(x: Tensor, mask: Tensor | None = None) -> Tensor:
        tokens = x.shape[1]
        cache = _make_used_static_cache(adapter, kind, x)
        outputs, done = [], 0
        for size in _run_in_pieces(tokens):
            upto = done + size
            real_tokens = None if mask is None else mask[:, :upto]
            output = adapter.call(x[:, done:upto], real_tokens, past_key_values=cache, use_cache=True)
            outputs.append(first_tensor(output))
            done = upto
        return torch.cat(outputs, 1)

    try:
        with torch.no_grad():
            variant(adapter.draw(2, adapter.lengths(5)[0], Rng(0, "static")), None)
    except Exception:  # not every model takes such a cache
        return None
    return variant


def _run_in_pieces(tokens: int) -> list[int]:
    """A prompt, single tokens, and a piece of the rest."""
    prompt = max(tokens // 2, 1)
    single = min(2, tokens - prompt)
    rest = tokens - prompt - single
    return [size for size in (prompt, *[1] * single, rest) if size]


def _make_used_static_cache(adapter: HuggingFaceTextModel, kind: Any, x: Tensor) -> Any:
    """A fresh static cache with its places filled by what an earlier user might have left."""
    config, places = adapter.target.config, x.shape[1] + 3
    used, fresh = (kind(config=config, max_cache_len=places) for _ in range(2))
    with torch.no_grad():
        adapter.call(x[:, :1], past_key_values=used, use_cache=True)
        rng = Rng(0, "leftovers")
        for old, new in zip(used.layers, fresh.layers, strict=True):
            new.lazy_initialization(old.keys[:, :, :0], old.values[:, :, :0])
            new.keys.copy_(3.0 * rng.normal(*new.keys.shape))
            new.values.copy_(3.0 * rng.normal(*new.values.shape))
    return fresh
