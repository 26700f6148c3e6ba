"""Attention weights of a model of Hugging Face transformers, through its table of attention implementations."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.attention_readers import AttentionRows
from regard.adapters.override import find_override
from regard.errors import InputError
from regard.layers.modes import eval_mode

RECORDER = "regard_recorder"  # our name in the library's table of attentions
CHUNK = 256  # queries whose rows are computed at once


def is_huggingface(model: nn.Module) -> bool:
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def record_attention(model: Any, args: tuple, kwargs: dict) -> list[AttentionRows]:
    """Every attention of the model in one call.

    The model runs twice: as it is, and with a recording attention in place of its own, which keeps queries and keys and
    computes a few rows at a time. Where the two outputs differ, the weights come from `output_attentions`, and so they
    do after `regard.use`, whose patterns only our own attention knows.
    """
    if any(find_override(module) is not None for module in model.modules()):
        return _output_attentions(model, args, kwargs, model.config._attn_implementation)
    with eval_mode(model), torch.no_grad():
        expected = _first_output(model(*args, **kwargs))
        with _make_recorder(model) as found:
            actual = _first_output(model(*args, **kwargs))
    if not found or not torch.allclose(actual, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        return _output_attentions(model, args, kwargs)
    return found


def _first_output(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


@contextmanager
def _make_recorder(model: Any) -> Iterator[list[AttentionRows]]:
    """The model with the recording attention, and the list that it fills."""
    library = sys.modules["transformers"]
    names = {id(module): name for name, module in model.named_modules()}
    found: list[AttentionRows] = []
    mixed: list[Tensor] = []  # what the newest attention returned

    def read_output(module: Any, inputs: tuple) -> None:
        """The matrix that is given the heads' outputs themselves is the one that mixes them."""
        if not mixed or not inputs or not isinstance(inputs[0], Tensor):
            return
        if inputs[0].untyped_storage().data_ptr() == mixed[0].untyped_storage().data_ptr():
            mixed.clear()
            weight = module.weight if isinstance(module, nn.Linear) else module.weight.T  # Conv1D of GPT-2
            found[-1] = dataclasses.replace(found[-1], output=weight)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
    ) -> Any:
        attention = _RecordedAttention(module, query, key, attention_mask, rest)
        name, sizes = names.get(id(module), ""), (query.shape[2], key.shape[2])
        found.append(AttentionRows(name, query, *sizes, attention.rows, attention.head_rows, value))
        pieces = [
            attention.rows(range(start, min(start + CHUNK, query.shape[2])))
            for start in range(0, query.shape[2], CHUNK)
        ]
        group = query.shape[1] // value.shape[1]
        value = value.repeat_interleave(group, 1) if group > 1 else value
        mixed[:] = [torch.cat([piece @ value for piece in pieces], 2).transpose(1, 2).contiguous()]
        return mixed[0], None

    before = model.config._attn_implementation
    library.AttentionInterface.register(RECORDER, attend)
    library.AttentionMaskInterface.register(RECORDER, library.masking_utils.sdpa_mask)
    hooks = [
        module.register_forward_pre_hook(read_output)
        for module in model.modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]
    try:
        model.set_attn_implementation(RECORDER)
        yield found
    except (ValueError, NotImplementedError):  # a model that does not use the table
        found.clear()
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()


class _RecordedAttention:
    """Queries, keys and all that is added to their products."""

    def __init__(self, module: Any, query: Tensor, key: Tensor, mask: Tensor | None, rest: dict) -> None:
        group = query.shape[1] // key.shape[1]
        self.group, self.query, self.key = group, query, key
        self.mask, self.rest = mask, rest
        scaling = rest.get("scaling")
        self.scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
        causal = rest.get("is_causal")
        causal = getattr(module, "is_causal", False) if causal is None else causal
        self.causal = mask is None and causal and query.shape[2] > 1

    def rows(self, queries: Sequence[int]) -> Tensor:
        """The weights of some queries, `(batch, head, place, key)`."""
        return self._weigh(queries, slice(None), self.key.repeat_interleave(self.group, 1))

    def head_rows(self, queries: Sequence[int], head: int) -> Tensor:
        """The weights of some queries of one head, `(batch, 1, place, key)`."""
        key_head = head // self.group
        return self._weigh(queries, slice(head, head + 1), self.key[:, key_head : key_head + 1])

    def _weigh(self, queries: Sequence[int], heads: slice, key: Tensor) -> Tensor:
        chosen = list(queries)
        scores = self.scale * self.query[:, heads][:, :, chosen] @ key.mT
        cap, position, sink = (self.rest.get(name) for name in ("softcap", "position_bias", "s_aux"))
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if position is not None:
            position = position[:, heads] if position.shape[1] > 1 else position
            scores = scores + (position[:, :, chosen] if position.shape[2] > 1 else position)
        if self.mask is not None:
            mask = self.mask[:, heads] if self.mask.shape[1] > 1 else self.mask
            mask = mask[:, :, chosen] if mask.shape[2] > 1 else mask
            mask = mask[..., : scores.shape[-1]]
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        elif self.causal:
            later = (
                torch.arange(scores.shape[-1], device=scores.device)
                > torch.tensor(chosen, device=scores.device)[:, None]
            )
            scores = scores.masked_fill(later, -torch.inf)
        if sink is not None:
            sink = sink.reshape(1, -1, 1, 1)[:, heads].expand(*scores.shape[:-1], 1)
            return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        return scores.softmax(-1)


def _output_attentions(model: Any, args: tuple, kwargs: dict, implementation: str = "eager") -> list[AttentionRows]:
    """The whole weight matrix of every layer, as the model itself returns it with `output_attentions=True`."""
    before = model.config._attn_implementation
    try:
        if implementation != before:
            model.set_attn_implementation(implementation)
        with eval_mode(model), torch.no_grad():
            output = model(*args, **{**kwargs, "output_attentions": True})
    except (TypeError, ValueError, NotImplementedError) as failure:
        raise InputError(
            f"{type(model).__name__} does not return its attention weights.",
            asked=f"the attention weights of {type(model).__name__}",
            found=f"{type(failure).__name__}: {failure}",
            because="it uses no attention of the library's table, and has no output_attentions",
            instead="one of its attention layers by itself",
        ) from failure
    finally:
        model.set_attn_implementation(before)
    weights = getattr(output, "attentions", None) or getattr(output, "decoder_attentions", None) or ()
    found = []
    for index, square in enumerate(square for square in weights if square is not None and square.ndim == 4):
        rows = AttentionRows(f"layers.{index}", square, square.shape[2], square.shape[3], _find_layer_index(square))
        found.append(rows)
    return found


def _find_layer_index(square: Tensor) -> Any:
    return lambda queries: square[:, :, list(queries)]
