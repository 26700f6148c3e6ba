"""Attentions of other libraries: torch, timm and Hugging Face. None of them is imported here."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.show.looking import AT_ONCE, Look, check_alone, resting

WATCHING = "regard_show"  # our name in Hugging Face's table of attentions


def eye(module: nn.Module) -> Callable[..., Look] | None:
    """Who reads a module of torch or timm."""
    if isinstance(module, nn.MultiheadAttention):
        return _torch
    if type(module).__module__.startswith("timm.") and _is_timm(module):
        return _timm
    return None


# torch


def _torch(name: str, layer: nn.MultiheadAttention, inputs: tuple, words: dict) -> Look:
    given = inspect.signature(layer.forward).bind(*inputs, **words).arguments
    first = layer.batch_first
    query, key = (
        given[side] if given[side].ndim == 3 else given[side].unsqueeze(1 - first) for side in ("query", "key")
    )
    token = 1 if first else 0
    check_alone(query if first else query.transpose(0, 1))
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
        chosen = torch.tensor(list(queries), device=query.device)
        part = None if mask is None else mask[..., chosen, :]
        with resting(layer):
            weight = layer(
                query.index_select(token, chosen),
                key,
                key if layer.vdim == layer.kdim else given["value"],
                attn_mask=part,
                key_padding_mask=hidden if hidden is None or hidden.ndim == 2 else hidden[None],
                need_weights=True,
                average_attn_weights=False,
            )[1]
        return weight[0]

    return Look(name, query.shape[token], key.shape[token], rows)


# timm


def _is_timm(module: Any) -> bool:
    """Attention as timm's vision transformers have it: one matrix for queries, keys and values, perhaps norms."""
    return all(hasattr(module, name) for name in ("qkv", "q_norm", "k_norm", "num_heads", "scale", "proj")) and set(
        inspect.signature(module.forward).parameters
    ) <= {"x", "attn_mask", "is_causal"}


def _timm(name: str, layer: Any, inputs: tuple, words: dict) -> Look:
    given = inspect.signature(layer.forward).bind(*inputs, **words).arguments
    x, mask = given["x"], given.get("attn_mask")
    if mask is not None or given.get("is_causal"):
        raise InputError(
            "Masked attention of timm cannot be shown.",
            asked=f"{name} with a mask",
            because="only what its vision transformers do without one is known",
            instead="an input without padding",
        )
    check_alone(x)
    query, key, _ = layer.qkv(x).unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    query, key = layer.q_norm(query) * layer.scale, layer.k_norm(key)
    return Look(name, x.shape[1], x.shape[1], _dense(query, key))


def _dense(query: Tensor, key: Tensor) -> Callable[[Sequence[int]], Tensor]:
    def rows(queries: Sequence[int]) -> Tensor:
        return (query[0, :, list(queries)] @ key[0].mT).softmax(-1)

    return rows


# Hugging Face


def is_hugging_face(model: nn.Module) -> bool:
    return any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)


def hugging_face(model: Any, inputs: tuple, words: dict) -> list[Look]:
    """Every attention of a model of transformers, through its own table of attentions.

    The model runs twice: as it is, and with an attention of ours in the place of its own, which keeps queries and keys
    and computes a few rows at a time. Both must say the same, or the weights would not be the model's.
    """
    with resting(model), torch.no_grad():
        expected = _first(model(*inputs, **words))
        with _instead(model) as found:
            actual = _first(model(*inputs, **words))
    if not found or not torch.allclose(actual, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        return _asked(model, inputs, words)
    return found


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


@contextmanager
def _instead(model: Any) -> Iterator[list[Look]]:
    """The model with our attention, and what it sees."""
    library = sys.modules["transformers"]
    names = {id(module): name for name, module in model.named_modules()}
    found: list[Look] = []

    def watch(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
    ) -> Any:
        attention = _Recalled(module, query, key, attention_mask, rest)
        found.append(Look(names.get(id(module), ""), query.shape[2], key.shape[2], attention.first))
        pieces = [
            attention.rows(range(start, min(start + AT_ONCE, query.shape[2])))
            for start in range(0, query.shape[2], AT_ONCE)
        ]
        group = query.shape[1] // value.shape[1]
        value = value.repeat_interleave(group, 1) if group > 1 else value
        return torch.cat([piece @ value for piece in pieces], 2).transpose(1, 2).contiguous(), None

    before = model.config._attn_implementation
    library.AttentionInterface.register(WATCHING, watch)
    library.AttentionMaskInterface.register(WATCHING, library.masking_utils.sdpa_mask)
    try:
        model.set_attn_implementation(WATCHING)
        yield found
    except (ValueError, NotImplementedError):  # a model that does not use the table
        found.clear()
    finally:
        model.set_attn_implementation(before)


class _Recalled:
    """Queries, keys and all that is added to their products."""

    def __init__(self, module: Any, query: Tensor, key: Tensor, mask: Tensor | None, rest: dict) -> None:
        check_alone(query)
        group = query.shape[1] // key.shape[1]
        self.query, self.key = query, key.repeat_interleave(group, 1) if group > 1 else key
        self.mask, self.rest = mask, rest
        scaling = rest.get("scaling")
        self.scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
        causal = rest.get("is_causal")
        causal = getattr(module, "is_causal", False) if causal is None else causal
        self.causal = mask is None and causal and query.shape[2] > 1

    def first(self, queries: Sequence[int]) -> Tensor:
        return self.rows(queries)[0]

    def rows(self, queries: Sequence[int]) -> Tensor:
        """The weights of some queries, `(batch, head, place, key)`."""
        chosen = list(queries)
        scores = self.scale * self.query[:, :, chosen] @ self.key.mT
        cap, position, sink = (self.rest.get(name) for name in ("softcap", "position_bias", "s_aux"))
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if position is not None:
            scores = scores + (position[:, :, chosen] if position.shape[2] > 1 else position)
        if self.mask is not None:
            mask = self.mask[:, :, chosen] if self.mask.shape[2] > 1 else self.mask
            mask = mask[..., : scores.shape[-1]]
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        elif self.causal:
            later = (
                torch.arange(scores.shape[-1], device=scores.device)
                > torch.tensor(chosen, device=scores.device)[:, None]
            )
            scores = scores.masked_fill(later, -torch.inf)
        if sink is not None:
            sink = sink.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
        return scores.softmax(-1)


def _asked(model: Any, inputs: tuple, words: dict) -> list[Look]:
    """What a model that has its own way says when it is asked for its weights: the whole square of every layer."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("eager")
        with resting(model), torch.no_grad():
            output = model(*inputs, **{**words, "output_attentions": True})
    except (TypeError, ValueError, NotImplementedError) as failure:
        raise InputError(
            f"{type(model).__name__} does not tell its weights.",
            asked=f"show({type(model).__name__}, ...)",
            found=f"{type(failure).__name__}: {failure}",
            because="it uses no attention of the library's table, and has no output_attentions",
            instead="one of its attention layers by itself",
        ) from failure
    finally:
        model.set_attn_implementation(before)
    squares = getattr(output, "attentions", None) or getattr(output, "decoder_attentions", None) or ()
    found = []
    for index, square in enumerate(square for square in squares if square is not None and square.ndim == 4):
        check_alone(square)
        found.append(Look(f"layers.{index}", square.shape[2], square.shape[3], _kept(square[0])))
    return found


def _kept(square: Tensor) -> Callable[[Sequence[int]], Tensor]:
    return lambda queries: square[:, list(queries)]
