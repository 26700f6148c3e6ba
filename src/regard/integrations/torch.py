"""torch's own attention: `scaled_dot_product_attention` and `nn.MultiheadAttention`, run by Regard.

    with regard.sdpa():
        model(x)

`sdpa` is a mode: inside, each call of `torch.nn.functional.scaled_dot_product_attention` on the CPU goes to `attend`;
torch itself is not changed, and other threads are not affected.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.attention import attend
from regard.errors import InputError
from regard.integrations.override import Override
from regard.patterns import Causal, Full, Mask, Pattern

SDPA = nn.functional.scaled_dot_product_attention
MULTIHEAD = nn.functional.multi_head_attention_forward


class sdpa(TorchFunctionMode):
    """A mode in which `scaled_dot_product_attention` on the CPU is computed by Regard, forward and backward.

        >>> query, key, value = torch.randn(3, 1, 2, 5, 8)
        >>> with sdpa() as mode:
        ...     output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        >>> mode.calls
        1

    Masks of booleans and of scores, `is_causal` (aligned with the first key, as torch has it), `dropout_p`, `scale` and
    `enable_gqa` have torch's meaning. A query that may see nothing gives zeros. Calls under torch.compile and with
    tensors on other devices are torch's own. `nn.MultiheadAttention` reaches this function in training mode and with
    `need_weights=False`; what it runs in eval mode is its own fused layer.

    Attributes:
        calls: how many calls were computed by Regard.
    """

    def __init__(self, override: Override | None = None) -> None:
        super().__init__()
        self.calls = 0
        self._override = override

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in (SDPA, MULTIHEAD) or torch.compiler.is_compiling() or not args[0].is_cpu:
            return func(*args, **kwargs)
        if func is MULTIHEAD:  # as a whole: torch calls it outside of the mode
            bound = inspect.signature(MULTIHEAD).bind(*args, **kwargs)
            bound.apply_defaults()
            if bound.arguments["need_weights"] or not _has_plain_keys(bound.arguments):
                return func(*args, **kwargs)
            self.calls += 1
            return _project_and_attend(self._override, **bound.arguments)
        self.calls += 1
        return attend_like_sdpa(*args, **kwargs, override=self._override)


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
    """`scaled_dot_product_attention` by `attend`; `override` joins its pattern, bias and scale."""
    if query.ndim < 3:
        return _attend_single_head(query, key, value, attn_mask, dropout_p, is_causal, scale, override)
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
                    because="it adds a tensor of scores of its own, to which only a tensor can be added",
                    instead="bias=... as a tensor that broadcasts to (head, query, key)",
                )
            bias = override.bias if bias is None else bias + override.bias
        scale = scale if override.scale is None else override.scale
    return attend(query, key, value, pattern=pattern, mask=mask, bias=bias, scale=scale, dropout=dropout_p)


def _attend_single_head(query, key, value, attn_mask, dropout_p, is_causal, scale, override) -> Tensor:
    """Tensors without a head axis."""
    query, key, value = (tensor.unsqueeze(-3) for tensor in (query, key, value))
    output = attend_like_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, override=override)
    return output.squeeze(-3)


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
    """`nn.MultiheadAttention.forward` with the override inside: its slow path, whose attention is torch's function."""
    if need_weights:
        raise InputError(
            "nn.MultiheadAttention with another pattern returns no weights.",
            asked="a call with need_weights=True, which is the default",
            because="weights are computed by torch from its own mask",
            instead="module(query, key, value, need_weights=False); regard.weights(...) for the weights",
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise InputError(
            "nn.MultiheadAttention with keys of its own has no pattern.",
            asked="regard.use on a layer with add_bias_kv or add_zero_attn",
            because="it appends keys that belong to no token, and a pattern counts the tokens",
            instead="layers= without this layer",
        )
    if is_causal and attn_mask is None:
        raise InputError(
            "is_causal of nn.MultiheadAttention is a hint about attn_mask.",
            asked="is_causal=True without attn_mask",
            because="torch refuses it as well",
            instead="attn_mask=..., or pattern=Causal() in regard.use",
        )
    batched = query.dim() == 3
    if module.batch_first and batched:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    separate = not module._qkv_same_embed_dim
    weights: dict[str, Any] = {}
    if separate:
        weights = {
            "use_separate_proj_weight": True,
            "q_proj_weight": module.q_proj_weight,
            "k_proj_weight": module.k_proj_weight,
            "v_proj_weight": module.v_proj_weight,
        }
    with sdpa(override):
        output, _ = MULTIHEAD(
            query,
            key,
            value,
            module.embed_dim,
            module.num_heads,
            module.in_proj_weight,
            module.in_proj_bias,
            module.bias_k,
            module.bias_v,
            module.add_zero_attn,
            module.dropout,
            module.out_proj.weight,
            module.out_proj.bias,
            training=module.training,
            key_padding_mask=key_padding_mask,
            need_weights=False,
            attn_mask=attn_mask,
            **weights,
        )
    return (output.transpose(0, 1) if module.batch_first and batched else output), None


def _has_plain_keys(arguments: dict[str, Any]) -> bool:
    """Whether the keys are those of the tokens, in a batch."""
    others = ("bias_k", "bias_v", "static_k", "static_v")
    plain = not arguments["add_zero_attn"] and all(arguments[name] is None for name in others)
    return plain and arguments["query"].dim() == 3


def _project_and_attend(
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
    **_: Any,
) -> tuple[Tensor, None]:
    """torch's `multi_head_attention_forward` without weights; tensors are `(token, batch, channel)`."""
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
    joined = output.permute(2, 0, 1, 3).flatten(2)
    return nn.functional.linear(joined, out_proj_weight, out_proj_bias), None


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
