"""`nn.MultiheadAttention` with its attention by Regard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.override import Override
from regard.attention import weights
from regard.errors import InputError
from regard.integrations.scaled_dot_product import attend_like_sdpa, describe_call, refuse_subclasses

MULTIHEAD = nn.functional.multi_head_attention_forward


def run_multihead(
    module: nn.MultiheadAttention,
    override: Override,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`nn.MultiheadAttention.forward` with another pattern, bias or scale."""
    if module.bias_k is not None or module.add_zero_attn:
        raise InputError(
            "nn.MultiheadAttention with keys of its own has no pattern.",
            asked="regard.use on a layer with add_bias_kv or add_zero_attn",
            because="it appends keys that belong to no token, and a pattern counts the tokens",
            instead="layers= without this layer",
        )
    refuse_subclasses(query, key, value)
    swap = module.batch_first and query.dim() == 3
    if swap:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    output, square = attend_multihead(
        override,
        query=query,
        key=key,
        value=value,
        num_heads=module.num_heads,
        in_proj_weight=module.in_proj_weight,
        in_proj_bias=module.in_proj_bias,
        dropout_p=module.dropout,
        out_proj_weight=module.out_proj.weight,
        out_proj_bias=module.out_proj.bias,
        training=module.training,
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        use_separate_proj_weight=not module._qkv_same_embed_dim,
        q_proj_weight=module.q_proj_weight,
        k_proj_weight=module.k_proj_weight,
        v_proj_weight=module.v_proj_weight,
        is_causal=is_causal,
        need_weights=need_weights,
        average_attn_weights=average_attn_weights,
    )
    return (output.transpose(0, 1) if swap else output), square


def takes_multihead(arguments: dict[str, Any]) -> bool:
    """Whether `attend_multihead` does what torch's function does, as fast: plain tensors, no weights, no own keys."""
    others = ("bias_k", "bias_v", "static_k", "static_v")
    tensors = [arguments[name] for name in ("query", "key", "value", "attn_mask", "key_padding_mask")]
    plain = all(
        tensor is None or (type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and not tensor.is_nested)
        for tensor in tensors
    )
    return (
        plain
        and not torch.compiler.is_compiling()
        and not arguments["need_weights"]
        and not arguments["add_zero_attn"]
        and all(arguments[name] is None for name in others)
    )


def attend_multihead(
    override: Override | None,
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    use_separate_proj_weight: bool,
    q_proj_weight: Tensor | None,
    k_proj_weight: Tensor | None,
    v_proj_weight: Tensor | None,
    is_causal: bool,
    need_weights: bool,
    average_attn_weights: bool,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """torch's `multi_head_attention_forward`: tensors are `(token, batch, channel)`, or without batch."""
    batched = query.dim() == 3
    if not batched:
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    matrices: Any
    if use_separate_proj_weight:
        matrices = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        assert in_proj_weight is not None
        matrices = in_proj_weight.chunk(3)
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    heads = [
        nn.functional.linear(x, matrix, bias).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
        for x, matrix, bias in zip((query, key, value), matrices, biases, strict=True)
    ]
    if attn_mask is None and is_causal:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # torch's own words
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.unflatten(0, (-1, num_heads))
    mask = _join_masks(attn_mask, key_padding_mask)
    output = attend_like_sdpa(heads[0], heads[1], heads[2], mask, dropout_p if training else 0.0, override=override)
    joined = nn.functional.linear(output.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    square = None
    if need_weights:
        square = weights(heads[0], heads[1], **describe_call(heads[0], heads[1], mask, False, None, override))
        square = square.mean(1) if average_attn_weights else square
        square = square if batched else square.squeeze(0)
    return (joined if batched else joined.squeeze(1)), square


def _join_masks(attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
    """One mask as torch's function takes it: booleans that are true where a key is visible, or scores."""
    padding = None if key_padding_mask is None else key_padding_mask[:, None, None]
    masks = [mask for mask in (attn_mask, padding) if mask is not None]
    if all(mask.dtype == torch.bool for mask in masks):
        hidden = [~mask for mask in masks]
        return None if not hidden else hidden[0] if len(hidden) == 1 else hidden[0] & hidden[1]
    dtype = next(mask.dtype for mask in masks if mask.dtype != torch.bool)
    zero = torch.zeros((), dtype=dtype)
    scores = [zero.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask for mask in masks]
    return scores[0] if len(scores) == 1 else scores[0] + scores[1]
