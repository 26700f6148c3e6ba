"""One token more: the first tokens are read into a cache without being written down, and then comes the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.cost.trace.subject import Subject
from regard.errors import CostError


def prepared(
    subject: Subject,
    called: Callable[..., Any],
    module: nn.Module | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Callable[[], Any]:
    """What reads one token after the tokens of the arguments are cached."""
    if module is not None and called is module:
        if {"past_key_values", "use_cache"} <= subject.accepts:
            step = _hugging_face(module, dict(kwargs), args)
            if step is not None:
                return step
        elif hasattr(module, "new_memory") and hasattr(module, "extend"):
            return _remembering(module, args)
        elif "cache" in subject.accepts and len(args) == 1:
            return _caching(module, args[0], kwargs)
    raise CostError(
        f"{subject.name} has no cache to decode with.",
        asked=f'cost({subject.name}, step="decode")',
        because="one token after others needs what was computed for them, kept in past_key_values or a memory",
        instead='step="forward" with tokens=1, or a causal model',
    )


def _hugging_face(module: nn.Module, kwargs: dict[str, Any], args: tuple[Any, ...]) -> Callable[[], Any] | None:
    """Models of transformers return what they cached; encoders return none."""
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


def _remembering(module: Any, args: tuple[Any, ...]) -> Callable[[], Any]:
    """Models of Regard have a memory; one that translates reads its source before."""
    *source, tokens = args
    memory = module.new_memory(tokens.shape[1] + 1)
    if source:
        module.decode(tokens, module.encode(source[0]), memory=memory)
    else:
        module(tokens, memory=memory)
    return lambda: module.extend(tokens[:, :1], memory)


def _caching(module: Any, x: Tensor, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Layers of Regard take a cache."""
    attention = module if hasattr(module, "new_cache") else module.attention
    cache = attention.new_cache(x.shape[-2] + 1)
    with torch.no_grad():
        module(x, cache=cache, **kwargs)
    return lambda: module(x[..., :1, :], cache=cache, **kwargs)
