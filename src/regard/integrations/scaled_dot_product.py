"""torch's `scaled_dot_product_attention` by `attend`: its arguments, its meaning, its layout in memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from regard.adapters.override import Override
from regard.attention import attend
from regard.errors import InputError
from regard.patterns import Causal, Full, Mask, Pattern


def attend_like_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    override: Override | None = None,
) -> Tensor:
    """`scaled_dot_product_attention` by `attend`; `override` joins its pattern, bias and scale.

    Without an override, arguments are those that `find_reason_for_torch` has no reason against.
    """
    if torch.is_autocast_enabled("cpu"):  # torch casts all arguments of this function
        query, key, value = (_cast_like_autocast(tensor) for tensor in (query, key, value))
    if query.ndim < 3:  # no head axis
        query, key, value = (tensor.unsqueeze(-3) for tensor in (query, key, value))
        return attend_like_sdpa(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, override=override
        ).squeeze(-3)
    described = describe_call(query, key, attn_mask, is_causal, scale, override)
    return _lay_out_like(query, attend(query, key, value, dropout=dropout_p, **described))


def describe_call(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    override: Override | None,
) -> dict[str, Any]:
    """The arguments of `attend` for a call of torch's function in a layer with this override."""
    pattern: Pattern = Full()
    bias: Any = None
    queries, keys = query.shape[-2], key.shape[-2]
    if is_causal:
        pattern = Causal() if queries == keys else Mask(torch.ones(queries, keys, dtype=torch.bool).tril())
    mask = attn_mask if attn_mask is not None and attn_mask.dtype == torch.bool else None
    if attn_mask is not None and mask is None:
        bias = attn_mask
    if override is not None:
        if override.pattern is not None:
            pattern = override.pattern if pattern.is_full or override.replace_mask else pattern & override.pattern
            mask = None if override.replace_mask else mask
        if override.bias is not None:
            if bias is not None and not isinstance(override.bias, Tensor):
                raise InputError(
                    "This layer takes no bias by rule.",
                    asked=f"use(model, bias={override.bias!r})",
                    found=f"scaled_dot_product_attention with scores of shape {tuple(bias.shape)} as attn_mask",
                    because="it adds a tensor of scores of its own, to which only a tensor can be added",
                    instead="bias=... as a tensor that broadcasts to (head, query, key)",
                )
            bias = override.bias if bias is None else bias + override.bias
        scale = scale if override.scale is None else override.scale
    return {"pattern": pattern, "mask": mask, "bias": bias, "scale": scale}


def find_reason_for_torch(
    query: Any,
    key: Any = None,
    value: Any = None,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    *,
    scale: Any = None,
    enable_gqa: Any = False,
    **unknown: Any,
) -> str | None:
    """Why a call of `scaled_dot_product_attention` is torch's own, or `None` where `attend` gives the same.

    What torch refuses is left to torch as well, so that its errors stay as they are.
    """
    tensors = [query, key, value] + ([] if attn_mask is None else [attn_mask])
    if unknown or not all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors):
        return "a subclass of Tensor, such as a nested, fake or distributed tensor or a CausalBias"
    if any(tensor.is_nested or tensor.layout != torch.strided or not tensor.is_cpu for tensor in tensors):
        return "a tensor on another device, or in another layout"
    if torch.compiler.is_compiling():
        return "torch.compile has its own kernels for the function"
    if query.ndim < 2 or not query.ndim == key.ndim == value.ndim:
        return "torch refuses these shapes"
    kinds = {query.dtype, key.dtype, value.dtype}
    if not all(kind.is_floating_point for kind in kinds):
        return "torch refuses these dtypes"
    if len(kinds) > 1 and not torch.is_autocast_enabled("cpu"):
        return "torch refuses different dtypes"
    if not 0 <= dropout_p < 1 or (scale is not None and not math.isfinite(scale)):
        return "an edge that torch defines"
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return "torch refuses these shapes"
    if query.ndim > 2:
        heads = [tensor.shape[-3] for tensor in (query, key, value)]
        if heads[1] != heads[2] or (heads[0] != heads[1] and not enable_gqa and 1 not in heads):
            return "torch repeats the heads of keys and values apart, or refuses them"
    if attn_mask is None:
        return None
    if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype) or attn_mask.ndim < 2:
        return "torch refuses this mask"
    square = (*query.shape[:-1], key.shape[-2])
    if attn_mask.ndim > len(square) or any(
        size not in (1, full) for size, full in zip(attn_mask.shape[::-1], square[::-1], strict=False)
    ):
        return "torch refuses this mask"
    return None


def refuse_subclasses(*arguments: Any) -> None:
    """Refuse what has no positions that a pattern, a bias or a scale of `regard.use` could speak of."""
    for tensor in (argument for argument in arguments if isinstance(argument, Tensor)):
        if type(tensor) not in (Tensor, nn.Parameter, FakeTensor) or tensor.is_nested:
            raise InputError(
                "This call of torch's attention cannot be changed.",
                asked="regard.use on a layer that makes it",
                found=f"an argument of type {type(tensor).__module__}.{type(tensor).__name__}",
                because="its positions or its meaning are not those of a plain tensor",
                instead="padded tensors and a mask of booleans, or layers= without this layer",
            )


def _cast_like_autocast(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype("cpu"))


def _lay_out_like(query: Tensor, output: Tensor) -> Tensor:
    """The output, token by token in memory where the query is: torch does so, and models call `view` on it."""
    if query.ndim == 4 and not query.is_contiguous() and query.transpose(1, 2).is_contiguous():
        return output.transpose(1, 2).contiguous().transpose(1, 2)
    return output
