"""Decoding: the prompt is read into the cache of a model (prefill), and what remains is a step of one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.fake_copies import TracedTarget
from regard.errors import CostError
from regard.layers import CrossCache, MultiHeadAttention


def prepare_decode_step(
    target: TracedTarget,
    called: Callable[..., Any],
    module: nn.Module | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Callable[[], Any]:
    """A call that decodes one token, after a prefill with the arguments."""
    if module is not None and called is module:
        if {"past_key_values", "use_cache"} <= target.accepts:
            step = _hugging_face(module, dict(kwargs), args)
            if step is not None:
                return step
        elif hasattr(module, "prefill") and hasattr(module, "decode_step"):
            return _regard_model(module, args)
        elif isinstance(module, MultiHeadAttention) and len(args) > 1:
            return _regard_cross_attention(module, args)
        elif "cache" in target.accepts and len(args) == 1:
            return _regard_layer(module, args[0], kwargs)
    raise CostError(
        f"{target.name} has no cache to decode with.",
        asked=f'cost({target.name}, step="decode")',
        because="one token after others needs what was computed for them, kept in past_key_values or a cache",
        instead='step="forward" with tokens=1, or a causal model',
    )


def _hugging_face(module: nn.Module, kwargs: dict[str, Any], args: tuple[Any, ...]) -> Callable[[], Any] | None:
    """Models of transformers return their cache; encoders return none."""
    kwargs |= {"use_cache": True}
    try:
        first = module(*args, **kwargs, return_dict=True)
    except TypeError:
        first = module(*args, **kwargs)
    past = getattr(first, "past_key_values", None)
    if past is None:
        return None
    more: dict[str, Any] = {"past_key_values": past, "use_cache": True}
    if "decoder_input_ids" in kwargs:
        more["decoder_input_ids"] = kwargs["decoder_input_ids"][:, :1]
        more["encoder_outputs"] = (first.encoder_last_hidden_state,)
        return lambda: module(**more)
    if args:
        return lambda: module(args[0][:, :1], **more)
    more["input_ids"] = kwargs["input_ids"][:, :1]
    return lambda: module(**more)


def _regard_model(module: Any, args: tuple[Any, ...]) -> Callable[[], Any]:
    """Models of Regard make their cache; an encoder-decoder encodes its source first."""
    *source, tokens = args
    cache = module.new_cache(tokens.shape[1] + 1)
    if source:
        module.decode(tokens, module.encode(source[0]), cache=cache)
    else:
        module(tokens, cache=cache)
    return lambda: module.decode_step(tokens[:, :1], cache)


def _regard_layer(module: Any, x: Tensor, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Layers of Regard take a cache."""
    attention = module if hasattr(module, "new_cache") else module.attention
    cache = attention.new_cache(x.shape[-2] + 1)
    with torch.no_grad():
        module(x, cache=cache, **kwargs)
    return lambda: module(x[..., :1, :], cache=cache, **kwargs)


def _regard_cross_attention(module: MultiHeadAttention, args: tuple[Any, ...]) -> Callable[[], Any]:
    """Keys and values of the context are projected once, before the first step."""
    cache = CrossCache()
    with torch.no_grad():
        module(*args, cache=cache)
    return lambda: module(args[0][..., :1, :], cache=cache)
