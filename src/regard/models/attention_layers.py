"""The attention of each layer of a model: one description for all of them, or one for each."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.backends import Request, find
from regard.biases import Bias, TransformerXL
from regard.errors import ConfigError
from regard.features import feature_map as resolve_features
from regard.models.attention_text import FIELDS, rebuild_bias
from regard.patterns import Causal, Full, Pattern

Attentions = Attention | tuple[Attention, ...] | None


def select_layer(attentions: Attentions, layer: int) -> Attention:
    """The description of one layer, as the configuration holds it."""
    if attentions is None:
        return Attention()
    return attentions[layer] if isinstance(attentions, tuple) else attentions


def build_layer(attentions: Attentions, layer: int) -> Attention:
    """The description of one layer, with a bias of its own: learned parameters are not shared between layers."""
    attention = select_layer(attentions, layer)
    return dataclasses.replace(attention, bias=_copy_bias(attention.bias))


def make_causal(pattern: Pattern | None, base: Pattern | None = None) -> Pattern:
    """The pattern without the future: `Causal() & pattern`, or the pattern itself where it hides the future already.

    base: a sliding window in place of `Causal()`.

    >>> from regard.models.attention_layers import make_causal
    >>> make_causal(Strided(2)), make_causal(Window(3, 0)), make_causal(None)
    (Causal() & Strided(2), Window(3, 0), Causal())
    """
    if pattern is None or pattern.is_full:
        return Causal() if base is None else base
    if base is None:
        return pattern if pattern.supports_kv_cache else Causal() & pattern
    return base & pattern


def find_window(attention: Attention) -> int | None:
    """How many tokens back a causal description sees if it is a sliding window and nothing else; -1: all of them.

    None where it is something else, which no `sliding_window` of another library expresses.
    """
    if any(getattr(attention, name) is not None for name in FIELDS if name != "pattern"):
        return None
    pattern = attention.pattern
    if pattern is None or pattern.is_full or pattern.is_causal:
        return -1
    return make_causal(pattern).sliding_window


def is_plain(attentions: Attentions, *, causal: bool = False) -> bool:
    """Whether the descriptions say nothing but what a layer does without one."""
    several = attentions if isinstance(attentions, tuple) else (attentions or Attention(),)
    return all(
        _is_plain_pattern(each.pattern, causal) if name == "pattern" else getattr(each, name) is None
        for each in several
        for name in FIELDS
    )


def _is_plain_pattern(pattern: Pattern | None, causal: bool) -> bool:
    return pattern is None or pattern.is_full or (causal and pattern.is_causal)


def _copy_bias(bias: Bias | Tensor | None) -> Bias | Tensor | None:
    if isinstance(bias, nn.Parameter):
        return nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
    if not isinstance(bias, Bias):
        return bias
    if any(tensor.is_meta for tensor in (*bias.parameters(), *bias.buffers())):  # read from text: it has no values
        return rebuild_bias(bias)
    return copy.deepcopy(bias).to(device=torch.get_default_device(), dtype=torch.get_default_dtype())


# Checks


def check_attentions(config: Any, name: str, attentions: Attentions, grid: tuple[int, int] | None = None) -> None:
    """Refuse descriptions that no layer of this model can run.

    `name`: the field of the configuration; `grid`: rows and columns of the tokens after the first, for images.
    """
    model, layers, heads = type(config).__name__.removesuffix("Config"), config.layers, config.heads
    head_dim = getattr(config, "head_size", config.dim // heads)
    if isinstance(attentions, tuple) and len(attentions) != layers:
        raise ConfigError(
            f"{model} has another number of layers than attentions.",
            asked=f"{name} of {len(attentions)} descriptions",
            found=f"{layers} layers",
            because="one description serves all layers, or there is one for each",
            instead=f"{name}=Attention(...), or a tuple of {layers}",
        )
    for layer in range(layers if isinstance(attentions, tuple) else 1):
        attention = select_layer(attentions, layer)
        if reason := _explain_unsupported(attention, heads, head_dim):
            because, instead = reason
            raise ConfigError(
                f"{model} cannot run this attention.",
                asked=f"{name}={_format_attention(attention)}"
                + (f" in layer {layer}" if isinstance(attentions, tuple) else ""),
                found=f"{heads} heads of {head_dim} channels",
                because=because,
                instead=instead,
            )
        if grid is not None and any(other != (*grid, 1) for other in find_grids(attention)):
            raise ConfigError(
                f"{model} has another grid of tokens than this attention.",
                asked=f"{name}={_format_attention(attention)}",
                found=f"{grid[0]} x {grid[1]} patches after the class token",
                because="a patch would have two rows and two columns",
                instead=f"({grid[0]}, {grid[1]}) as grid, and start=1",
            )


def find_grids(attention: Attention) -> set[tuple[int, int, int]]:
    """The grids on which pattern and bias lay the tokens: rows, columns, and the position of the first token."""
    pattern, bias = attention.pattern, attention.bias
    grids = set() if pattern is None else {(grid.rows, grid.columns, grid.start) for grid in pattern._list_grids()}
    shape = getattr(bias, "grid", None)
    return grids if shape is None else {*grids, (*shape, getattr(bias, "start", 0))}


def _explain_unsupported(attention: Attention, heads: int, head_dim: int) -> tuple[str, str] | None:
    """Why a layer cannot run a description, and what could be given instead."""
    pattern, bias, features = attention.pattern, attention.bias, attention.feature_map
    numbers = [getattr(attention, name) for name in FIELDS if name not in ("pattern", "bias", "feature_map")]
    if pattern is not None and not isinstance(pattern, Pattern):
        return "its pattern is not made of patterns", "Causal() or Window(128, 0), say; Where(...) for a rule"
    if pattern is not None and pattern.rows is not None:
        return (
            "its pattern tells the rows of one batch apart, and a model reads any batch",
            "lengths= or pattern= when the model is called",
        )
    if pattern is not None and pattern.heads not in (None, heads):
        return f"its pattern is for {pattern.heads} heads", f"a mask of {heads} heads, or of one for all"
    if any(isinstance(n, bool) or (n is not None and not isinstance(n, int | float)) or n != n for n in numbers):
        return "its scale is not a number", "None for 1/sqrt(dim)"
    if bias is not None and not isinstance(bias, Bias | Tensor):
        return "its bias is neither a bias nor a tensor", f"Alibi({heads}), say"
    if isinstance(bias, Bias) and bias.heads not in (1, heads):
        return f"its bias is for {bias.heads} heads", f"{type(bias).__name__}(heads={heads}, ...)"
    if isinstance(bias, TransformerXL) and bias.dim != head_dim:
        return f"its bias is for heads of {bias.dim} channels", f"TransformerXL(heads={heads}, dim={head_dim})"
    if features is None:
        return None
    resolved = resolve_features(features)
    if bias is not None:
        return "linear attention has no scores to add a bias to", "the feature map or the bias, not both"
    if any(n is not None and math.isinf(n) for n in numbers):
        return "linear attention has no hard limit", "the feature map, or the infinite scale"
    token = torch.empty(1, heads, 1, head_dim, device="meta")
    request = Request(token, token, token, Full() if pattern is None else pattern, 1.0, None, resolved)
    reason = find("linear").refuse(request)
    return None if reason is None else (reason, "a feature map with Full() or Causal() alone")


def _format_attention(attention: Attention) -> str:
    text = ", ".join(f"{name}={value!r}" for name in FIELDS if (value := getattr(attention, name)) is not None)
    return f"Attention({text if len(text) <= 200 else text[:199] + '…'})"
