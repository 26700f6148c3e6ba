"""Attention weights of single layers of torch and timm, computed for the requested queries."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.override import find_override
from regard.attention import weights
from regard.errors import InputError
from regard.layers.modes import eval_mode


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """The attention of one layer in one call; only the requested rows of weights are computed.

    Attributes:
        name: of the module.
        query: what the queries come from, batch first.
        queries, keys: how many there are.
        rows: from places of queries to their weights, `(batch, head, place, key)`.
        head_rows: the same for a single head, `(batch, 1, place, key)`, where that needs less work.
        value: `(batch, key_head, key, dim)`, what the weights multiply, where it is known.
        output: the matrix that mixes the heads, `(channel, head * dim)`, where it is known.
    """

    name: str
    query: Tensor
    queries: int
    keys: int
    rows: Callable[[Sequence[int]], Tensor]
    head_rows: Callable[[Sequence[int], int], Tensor] | None = None
    value: Tensor | None = None
    output: Tensor | None = None


# From a module's name, the module and the arguments of a call to its attention.
Reader = Callable[[str, Any, tuple, dict], AttentionRows]


def find_reader(module: nn.Module) -> Reader | None:
    """How to read a layer of torch or timm; None for other modules."""
    if isinstance(module, nn.MultiheadAttention):
        return _read_torch
    if type(module).__module__.startswith("timm.") and _is_timm_attention(module):
        return _read_timm
    return None


def _read_torch(name: str, layer: nn.MultiheadAttention, args: tuple, kwargs: dict) -> AttentionRows:
    given = inspect.signature(type(layer).forward).bind(layer, *args, **kwargs).arguments
    first = layer.batch_first
    query, key = (
        given[side] if given[side].ndim == 3 else given[side].unsqueeze(1 - first) for side in ("query", "key")
    )
    token = 1 if first else 0
    mask, hidden = given.get("attn_mask"), given.get("key_padding_mask")
    if mask is None and given.get("is_causal"):
        raise InputError(
            "A causal mask was announced and not given.",
            asked=f"{name} with is_causal=True and no attn_mask",
            because="torch takes is_causal as a hint about attn_mask, which it needs as well",
            instead="attn_mask=nn.Transformer.generate_square_subsequent_mask(tokens)",
        )

    @torch.no_grad()
    def rows(queries: Sequence[int]) -> Tensor:
        if find_override(layer) is not None:  # its pattern counts all queries
            with eval_mode(layer):
                square = layer(*args, **kwargs | {"need_weights": True, "average_attn_weights": False})[1]
            return (square if square.ndim == 4 else square[None])[:, :, list(queries)]
        chosen = torch.tensor(list(queries), device=query.device)
        with eval_mode(layer):
            return layer(
                query.index_select(token, chosen),
                key,
                key if layer.vdim == layer.kdim else given["value"],
                attn_mask=None if mask is None else mask[..., chosen, :],
                key_padding_mask=hidden if hidden is None or hidden.ndim == 2 else hidden[None],
                need_weights=True,
                average_attn_weights=False,
            )[1]

    return AttentionRows(
        name,
        query if first else query.transpose(0, 1),
        query.shape[token],
        key.shape[token],
        rows,
        value=_project_torch_values(layer, given["value"], key),
        output=layer.out_proj.weight,
    )


def _project_torch_values(layer: nn.MultiheadAttention, value: Tensor, key: Tensor) -> Tensor | None:
    """The values of the heads, `(batch, head, key, dim)`; None where the layer adds keys of its own."""
    if layer.bias_k is not None or layer.add_zero_attn:
        return None
    value = value.view_as(key) if value.ndim == 2 else value
    weight = layer.v_proj_weight if layer.in_proj_weight is None else layer.in_proj_weight[-layer.embed_dim :]
    bias = None if layer.in_proj_bias is None else layer.in_proj_bias[-layer.embed_dim :]
    with torch.no_grad():
        projected = nn.functional.linear(value if layer.batch_first else value.transpose(0, 1), weight, bias)
    return projected.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)


def _is_timm_attention(module: Any) -> bool:
    """Attention as timm's vision transformers have it: one matrix for queries, keys and values, perhaps norms."""
    return all(hasattr(module, name) for name in ("qkv", "q_norm", "k_norm", "num_heads", "scale", "proj")) and set(
        inspect.signature(type(module).forward).parameters
    ) <= {"self", "x", "attn_mask", "is_causal"}


def _read_timm(name: str, layer: Any, args: tuple, kwargs: dict) -> AttentionRows:
    given = inspect.signature(type(layer).forward).bind(layer, *args, **kwargs).arguments
    x, mask = given["x"], given.get("attn_mask")
    if mask is not None or given.get("is_causal"):
        raise InputError(
            "Masked attention of timm cannot be shown.",
            asked=f"{name} with a mask",
            because="only what its vision transformers do without one is known",
            instead="an input without padding",
        )
    query, key, value = layer.qkv(x).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    override = find_override(layer)
    if override is not None:  # its pattern counts all queries
        scale = layer.scale if override.scale is None else override.scale
        words = {"pattern": override.pattern, "bias": override.bias, "scale": scale}
        square = weights(layer.q_norm(query), layer.k_norm(key), **words)
    else:
        square = None
        query, key = layer.q_norm(query) * layer.scale, layer.k_norm(key)

    def rows(queries: Sequence[int]) -> Tensor:
        if square is not None:
            return square[:, :, list(queries)]
        return (query[:, :, list(queries)] @ key.mT).softmax(-1)

    def head_rows(queries: Sequence[int], head: int) -> Tensor:
        if square is not None:
            return square[:, head : head + 1, list(queries)]
        return (query[:, head : head + 1, list(queries)] @ key[:, head : head + 1].mT).softmax(-1)

    # A layer that normalises or gates the concatenated heads changes them before its output matrix.
    plain = isinstance(getattr(layer, "norm", None), nn.Identity | None) and getattr(layer, "gate", None) is None
    output = layer.proj.weight if plain else None
    return AttentionRows(name, x, x.shape[1], x.shape[1], rows, head_rows, value, output)
