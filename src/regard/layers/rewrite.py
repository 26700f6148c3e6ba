"""Multi-head attention taken apart and put together again, without changing what it computes."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.errors import CheckpointError, ConfigError
from regard.layers.projections import AttentionSizes, Projections

if TYPE_CHECKING:
    from regard.layers.multihead import MultiHeadAttention


def split_output_matrix(layer: MultiHeadAttention) -> Tensor:
    """`W_h^o`, `(head, value, output)`."""
    return layer.output.weight.T.unflatten(0, (layer.sizes.heads, -1))


def split_output(layer: MultiHeadAttention, mixed: Tensor) -> Tensor:
    """Each head's summand of the output, from the heads' outputs `(*batch, head, token, value)`."""
    return torch.einsum("...htv,hvo->h...to", mixed, split_output_matrix(layer))


def merge_value_output(layer: MultiHeadAttention) -> Tensor:
    """`W^(h) = W_h^v W_h^o` for every head: `(head, values, output)`.

    As one matrix it costs less than two only where `value > in out / (in + out)`, half the channels of a square layer.
    """
    sizes = layer.sizes
    values = layer.projections.weights()[2].unflatten(0, (sizes.kv_heads, -1))
    values = values.repeat_interleave(sizes.group, 0)  # (head, value, in)
    return values.mT @ split_output_matrix(layer)


@torch.no_grad()
def split(layer: MultiHeadAttention, rank: int) -> MultiHeadAttention:
    """`W^(h) = U S V^T` cut to `rank`: values are `X U sqrt(S)`, outputs `sqrt(S) V^T`.

    The nearest layer with values of that size (Eckart and Young, 1936). Heads that shared their values get their own,
    and a bias of the values moves into the output's.
    """
    sizes = layer.sizes
    if rank < 1:
        raise ConfigError(
            "A value has at least one channel.",
            asked=f"split({rank})",
            because="the rank is the number of channels of each head's values",
            instead=f"split({sizes.value}), which changes nothing",
        )
    whole = fold_value_bias(layer)
    matrices = merge_value_output(whole)
    left, scale, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    keep = min(rank, scale.shape[-1])
    root = scale[:, :keep].sqrt()
    value = matrices.new_zeros(sizes.heads, rank, matrices.shape[1])
    output = matrices.new_zeros(sizes.heads, rank, matrices.shape[2])
    value[:, :keep] = (left[:, :, :keep] * root[:, None]).mT.to(value)
    output[:, :keep] = (root[:, :, None] * right[:, :keep]).to(output)
    group = sizes.group
    query, key, _ = whole.projections.weights()
    key = key.unflatten(0, (sizes.kv_heads, -1)).repeat_interleave(group, 0).flatten(0, 1)
    query_bias, key_bias, _ = whole.projections.biases()
    if key_bias is not None:
        key_bias = key_bias.unflatten(0, (sizes.kv_heads, -1)).repeat_interleave(group, 0).flatten()
    rebuilt = _make_like(layer, dataclasses.replace(sizes, kv_heads=sizes.heads, value=rank), whole.letters)
    _copy_parameters(rebuilt, (query, key, value.flatten(0, 1)), (query_bias, key_bias, None))
    rebuilt.output.weight.copy_(output.flatten(0, 1).T)
    if rebuilt.output.bias is not None:
        rebuilt.output.bias.copy_(whole.output.bias)
    return rebuilt


def fold_biases(layer: MultiHeadAttention) -> MultiHeadAttention:
    """Without the biases of key and value, which do nothing that others could not do.

    A key's bias adds `q . b_k` to all scores of a query, which its softmax does not see. A value's bias passes through
    the weights, which sum to one, and becomes part of the output's: `b_o + b_v W^o`. (A query that sees nothing has
    zeros instead of `b_v`; it is the only one that changes.)
    """
    if layer.rotary is not None or layer.attention.feature_map is not None:
        raise ConfigError(
            "The key's bias of this layer does something.",
            asked="fold_biases()",
            because="rotary positions turn it, so that it depends on the distance"
            if layer.rotary is not None
            else "a feature map is no softmax: adding the same to all scores changes it",
            instead="the layer as it is",
        )
    whole = fold_value_bias(layer)
    if "k" not in whole.letters:
        return whole
    rebuilt = _make_like(layer, layer.sizes, whole.letters.replace("k", ""))
    with torch.no_grad():
        query_bias, _, value_bias = whole.projections.biases()
        _copy_parameters(rebuilt, whole.projections.weights(), (query_bias, None, value_bias))
        rebuilt.output.load_state_dict(whole.output.state_dict())
    return rebuilt


@torch.no_grad()
def fold_value_bias(layer: MultiHeadAttention) -> MultiHeadAttention:
    """The bias of the values, moved into that of the output."""
    query_bias, key_bias, value_bias = layer.projections.biases()
    letters = layer.letters.replace("v", "")
    letters = letters if "o" in letters or value_bias is None else letters + "o"
    rebuilt = _make_like(layer, layer.sizes, letters)
    _copy_parameters(rebuilt, layer.projections.weights(), (query_bias, key_bias, None))
    rebuilt.output.weight.copy_(layer.output.weight)
    if rebuilt.output.bias is not None:
        bias = torch.zeros_like(rebuilt.output.bias) if layer.output.bias is None else layer.output.bias.clone()
        if value_bias is not None:
            group = layer.sizes.group
            spread = value_bias.unflatten(0, (layer.sizes.kv_heads, -1)).repeat_interleave(group, 0).flatten()
            bias += layer.output.weight @ spread
        rebuilt.output.bias.copy_(bias)
    return rebuilt


def _make_like(layer: MultiHeadAttention, sizes: AttentionSizes, letters: str) -> MultiHeadAttention:
    attention = copy.deepcopy(layer.attention)  # a learned bias of its own, not the same one twice
    rebuilt = type(layer)(sizes, attention=attention, bias=letters, dropout=layer.dropout, rotary=layer.rotary)
    if not any(parameter.requires_grad for parameter in layer.parameters()):
        rebuilt.requires_grad_(False)
    return rebuilt.to(layer.output.weight).train(layer.training)


@torch.no_grad()
def _copy_parameters(layer: MultiHeadAttention, weights: tuple, biases: tuple) -> None:
    for mine, theirs in zip(layer.projections.weights(), weights, strict=True):
        mine.copy_(theirs)
    for mine, theirs in zip(layer.projections.biases(), biases, strict=True):
        if mine is not None:
            mine.copy_(torch.zeros_like(mine) if theirs is None else theirs)


# torch.nn.MultiheadAttention


def rename_torch_state(state: dict[str, Tensor], prefix: str, projections: Projections) -> None:
    """Give torch's names ours, where they are there: `in_proj_weight`, or one for each of query, key and value."""
    renamed = {
        "in_proj_bias": "projections.bias",
        "out_proj.weight": "output.weight",
        "out_proj.bias": "output.bias",
    }
    if projections.joint:
        renamed["in_proj_weight"] = "projections.weight"
    for theirs, ours in renamed.items():
        if prefix + theirs in state:
            state[prefix + ours] = state.pop(prefix + theirs)
    separate = [f"{prefix}{name}_proj_weight" for name in ("q", "k", "v")]
    if all(name in state for name in separate):
        parts = [state.pop(name) for name in separate]
        if projections.joint:
            state[prefix + "projections.weight"] = torch.cat(parts)
        else:
            for name, part in zip(("query", "key", "value"), parts, strict=True):
                state[f"{prefix}projections.{name}_weight"] = part


def from_torch(
    cls: type[MultiHeadAttention], module: nn.MultiheadAttention, attention: Attention | None
) -> MultiHeadAttention:
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        raise CheckpointError(
            "This layer attends to more than its tokens.",
            asked="MultiHeadAttention.from_torch(module)",
            found="add_bias_kv or add_zero_attn",
            because="they append keys that belong to no token",
            instead="a module without them",
        )
    sizes = AttentionSizes(module.embed_dim, module.num_heads, context=module.kdim, values=module.vdim)
    rebuilt = cls(sizes, attention=attention, bias=module.in_proj_bias is not None, dropout=module.dropout)
    rebuilt.to(module.out_proj.weight).train(module.training)
    rebuilt.load_state_dict(module.state_dict())
    return rebuilt
