"""Hugging Face transformers: importing this module registers the attention implementation "regard".

    import regard.integrations.transformers
    model = AutoModel.from_pretrained(..., attn_implementation="regard")
    model.set_attn_implementation("regard")

Two functions are registered: the attention itself, and the function that makes its masks. With the first alone, models
would pass no mask at all, and padding and causality would be lost without an error.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.override import Override, find_override
from regard.attention import Attention, attend, weights
from regard.attention.decode_step import decode_step
from regard.errors import InputError, PatternError
from regard.integrations.dense_rows import attend_dense_rows
from regard.integrations.huggingface_masks import make_pattern_mask
from regard.integrations.pattern_mask import PatternMask, is_jit_traced
from regard.patterns import Causal, Full, Lengths, Mask, Pattern
from regard.patterns.submatrix import Submatrix

NAME = "regard"
# Keywords by which implementations are told what changes the result, and which have no meaning here.
UNSUPPORTED = ("block_table", "head_mask")


def attend_in_model(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of a layer of transformers: `(batch, query, head, dim)`, and the weights where they are asked for.

    Query is `(batch, head, query, dim)`, key and value `(batch, kv_head, key, dim)`. Without a mask, a module that is
    causal is so from the first key on, if it has more than one query.
    """
    _refuse_unsupported(module, kwargs)
    if cache is not None and hasattr(cache, "block_tables"):
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    total = key.shape[2]
    pattern, bias, used, key_offset = _read_mask(module, query, key, attention_mask, is_causal)
    if used < total:
        key, value = key[:, :, :used], value[:, :, :used]
        position_bias = position_bias if position_bias is None else position_bias[..., :used]
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    if pattern.rows is not None and len(query) == 1 < pattern.rows:  # a mask of several rows broadcasts
        query, key, value = (tensor.expand(pattern.rows, -1, -1, -1) for tensor in (query, key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
    override = find_override(module)
    if override is not None:
        padding = attention_mask.padding if isinstance(attention_mask, PatternMask) else Full()
        pattern, bias, scale = _apply(override, module, pattern, padding, bias, scale, query, key, key_offset)
    need_weights = bool(kwargs.get("output_attentions")) or _captures_weights()
    if softcap is not None or s_aux is not None:
        if isinstance(bias, nn.Module):
            raise _refuse_bias(module, bias)
        output, square = attend_dense_rows(
            query, key, value, pattern, scale, bias, softcap, s_aux, dropout, need_weights
        )
    else:
        output, square = _attend(query, key, value, Attention(pattern, scale, bias), dropout, need_weights)
    if square is not None and used < total:
        square = nn.functional.pad(square, (0, total - used))
    return output.transpose(1, 2).contiguous(), square


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attention: Attention, dropout: float, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    if need_weights:
        return attend(query, key, value, attention, dropout=dropout), weights(query, key, attention)
    if not dropout:
        output = decode_step(query, key, value, attention)
        if output is not None:
            return output, None
    return attend(query, key, value, attention, dropout=dropout), None


def _read_mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None
) -> tuple[Pattern, Any, int, int]:
    """Pattern, bias, how many keys are used, and the absolute position of the first one."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal or queries == 1:
            return Full(), None, keys, 0
        if keys >= queries:
            return Causal(), None, queries, 0  # aligned with the first key: later ones are free slots of a static cache
        return Mask(torch.ones(queries, keys, dtype=torch.bool).tril()), None, keys, 0
    if isinstance(mask, PatternMask):
        if mask.pattern is None:
            mask = mask.to_dense()
        elif (mask.shape[2] == queries and keys in (mask.shape[3], mask.used_keys)) or (
            mask.pattern.is_key_padding and keys in (mask.shape[3], mask.used_keys)
        ):
            return mask.pattern, None, mask.used_keys, mask.key_offset
        else:
            mask = mask.to_dense()
    mask = mask[..., :keys]
    if mask.ndim == 2:
        mask = mask[:, None, None]
    if _has_no_values(mask):
        return Full(), _to_bias(mask, query.dtype), keys, 0
    if mask.dtype.is_floating_point:
        hidden = _find_hidden(mask)
        return (Full(), mask, keys, 0) if hidden is None else (_make_mask(mask, ~hidden), None, keys, 0)
    return _make_mask(mask, mask.bool()), None, keys, 0


def _has_no_values(mask: Tensor) -> bool:
    """Whether a mask is traced, or on a device whose values would have to be waited for."""
    return torch.compiler.is_compiling() or is_jit_traced() or not mask.is_cpu or type(mask) is not Tensor


def _to_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return mask if mask.dtype.is_floating_point else torch.zeros((), dtype=dtype).masked_fill(~mask.bool(), -torch.inf)


def _find_hidden(mask: Tensor) -> Tensor | None:
    """The pairs that a mask of scores hides, if it has no other scores than 0 and those of hidden pairs.

    Where it hides all keys of a query its scores stay scores, to which those of the layer are added.
    """
    if mask.requires_grad:
        return None
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if not bool((hidden | (mask == 0)).all()) or bool(hidden.all(-1).any()):
        return None
    return hidden


def _make_mask(source: Tensor, visible: Tensor) -> Pattern:
    """The mask of a tensor, made once for all layers that are given the same one."""
    known = getattr(source, "_regard_mask", None)
    if known is None or known[0] != source._version:
        known = (source._version, Mask(visible))
        source._regard_mask = known  # type: ignore[attr-defined]
    return known[1]


def _captures_weights() -> bool:
    """Whether the model was called with `output_attentions=True`, which it need not pass on to its layers."""
    collector = getattr(_capturing, "_active_collector", None)
    active = None if collector is None else collector.get()
    return bool(active) and any("attentions" in name for name in active)


def _refuse_unsupported(module: nn.Module, kwargs: dict[str, Any]) -> None:
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise InputError(
                f'attn_implementation="regard" has no {name}.',
                asked=f"{type(module).__name__} with {name}=...",
                because=f"the layer passes {name} to its attention, which would change the result",
                instead='model.set_attn_implementation("eager") for this model',
            )


def _refuse_bias(module: nn.Module, bias: nn.Module) -> InputError:
    return InputError(
        "This layer takes no bias by rule.",
        asked=f"use(model, bias={bias!r}) on a {type(module).__name__}",
        because="its scores are soft-capped or have a sink, which are computed from a tensor of scores",
        instead="bias=... as a tensor that broadcasts to (head, query, key), or layers= without this one",
    )


def _apply(
    override: Override,
    module: nn.Module,
    pattern: Pattern,
    padding: Pattern,
    bias: Any,
    scale: float,
    query: Tensor,
    key: Tensor,
    key_offset: int,
) -> tuple[Pattern, Any, float]:
    """Pattern, bias and scale of a layer after `regard.use`."""
    if override.pattern is not None:
        own = override.pattern
        if key_offset and not own.is_shift_invariant():
            whole = Lengths(key.shape[2] + key_offset, key.shape[2] + key_offset)
            runs = ((whole.keys - query.shape[2], whole.keys),), ((key_offset, whole.keys),)
            own = Submatrix(own, whole, *runs)
        if not own._supports_left_padding and not _is_right_padding(padding, key.shape[2]):
            raise PatternError(
                "The pattern counts positions from the start of the row, which is padding.",
                asked=f"use(model, pattern={override.pattern!r}) and an attention mask {padding!r}",
                found=f"{type(module).__name__} with {query.shape[2]} queries and {key.shape[2]} keys",
                because="in a row that is padded on the left, position 0 is no token",
                instead='tokenizer.padding_side = "right", one row at a time, or a pattern of distances such as Window',
            )
        kept = padding if override.replace_mask else pattern
        pattern = own if kept.is_full else kept & own
    if override.bias is not None:
        if bias is not None and not isinstance(override.bias, Tensor):
            raise _refuse_bias(module, override.bias)
        bias = override.bias if bias is None else bias + override.bias
    return pattern, bias, scale if override.scale is None else override.scale


def _is_right_padding(padding: Pattern, keys: int) -> bool:
    """Whether every row begins with a real token, or is empty."""
    if padding.is_full:
        return True
    visible = padding.matrix(1, keys)
    return not bool((~visible[..., 0] & visible.any(-1)).any())


def _import_library() -> Any:
    try:
        library = importlib.import_module("transformers")
    except ImportError as failure:
        raise InputError(
            "transformers is not installed.",
            asked="regard.integrations.transformers",
            found=f"{type(failure).__name__}: {failure}",
            because='attn_implementation="regard" is an entry in a table of that library',
            instead="pip install transformers",
        ) from failure
    try:
        importlib.import_module("transformers.masking_utils")
        return library.AttentionInterface, library.AttentionMaskInterface
    except (ImportError, AttributeError) as failure:
        raise InputError(
            f"transformers {library.__version__} has no table of attentions and masks.",
            asked="regard.integrations.transformers",
            found=f"{type(failure).__name__}: {failure}",
            because="AttentionInterface and AttentionMaskInterface are both needed: an attention without its mask "
            "function would run without any mask",
            instead="pip install -U transformers (5 or later), or regard.sdpa() around the call",
        ) from failure


def register() -> None:
    """Enter "regard" into the library's tables of attentions and of mask functions."""
    attention, mask = _import_library()
    attention.register(NAME, attend_in_model)
    mask.register(NAME, make_pattern_mask)


register()
try:
    _capturing: Any = importlib.import_module("transformers.utils.output_capturing")
except ImportError:  # an older library passes output_attentions on to its layers
    _capturing = None
