"""From what a user wrote to tokens a model can read: every check of a prompt, in four parts each."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

import torch
from torch import Tensor

from regard.errors import InputError
from regard.models.generation.protocol import GenerativeModel, find_device
from regard.models.padding import find_padding
from regard.models.validation import check_vocabulary, to_list, to_token_lists

__all__ = ["Prompts", "StopTokens", "check_integer", "parse_prompts", "parse_stop_tokens"]

StopTokens = int | Sequence[int] | Tensor | None


@dataclass(frozen=True)
class Prompts:
    """Prompts as lists and as one tensor, padded on the left with zeros.

    Attributes:
        lists: each prompt's tokens.
        tokens: (batch, longest prompt).
        lengths: (batch,), or None where all prompts are equally long.
    """

    lists: list[list[int]]
    tokens: Tensor
    lengths: Tensor | None


def parse_prompts(
    model: GenerativeModel,
    prompts: Sequence[Sequence[int]] | Sequence[int] | Tensor,
    max_new_tokens: int,
    attention_mask: Tensor | None = None,
) -> Prompts:
    """The prompts, known to fit the model together with `max_new_tokens` tokens more.

    attention_mask: `(batch, token)` of prompts that are padded on either side; the padding is dropped.
    """
    lists = to_token_lists(prompts, "prompts", single=True)
    if attention_mask is not None:
        lists = _drop_padding(lists, attention_mask)
    if not lists:
        raise InputError(
            "There is no prompt.",
            asked="prompts=[]",
            because="a model continues what it has read",
            instead="at least one prompt of at least one token, prompts=[[0]]",
        )
    for row, tokens in enumerate(lists):
        if not tokens:
            raise InputError(
                f"Prompt {row} is empty.",
                found=f"prompts of {_format_first([len(other) for other in lists])} tokens",
                because="the first new token needs one before it",
                instead="begin with the token that starts a text in this vocabulary",
            )
    check_vocabulary(lists, model.vocab_size, "prompts")
    _check_context_length(model, max(map(len, lists)), max_new_tokens)
    return _pad_left(lists, find_device(model))


def parse_stop_tokens(model: GenerativeModel, stop_tokens: StopTokens) -> frozenset[int]:
    """The tokens that end a text: one, several, or none."""
    given = to_list(() if stop_tokens is None else stop_tokens)
    given = tuple(given) if isinstance(given, Iterable) else (given,)
    tokens = frozenset(check_integer("stop_tokens", token, least=0) for token in given)
    if tokens and max(tokens) >= model.vocab_size:
        raise InputError(
            "A stop token is not in the vocabulary.",
            asked=f"stop_tokens={stop_tokens!r}",
            because=f"tokens are numbers from 0 to {model.vocab_size - 1}: this one is never written",
            instead="the end token of the tokenizer that belongs to this model",
        )
    return tokens


def check_integer(name: str, value: SupportsIndex, least: int) -> int:
    """A whole number that is not too small."""
    value = to_list(value)
    if isinstance(value, SupportsIndex) and not isinstance(value, bool) and operator.index(value) >= least:
        return operator.index(value)
    raise InputError(
        f"{name} is a whole number, {least} or more.",
        asked=f"{name}={value!r}",
        because=f"{value!r} is too small" if isinstance(value, SupportsIndex) else f"{value!r} is not a whole number",
        instead=f"{name}={least}",
    )


def _drop_padding(lists: list[list[int]], attention_mask: Tensor) -> list[list[int]]:
    if len(set(map(len, lists))) > 1:
        raise InputError(
            "Prompts of unequal length have no padding.",
            asked=f"attention_mask with prompts of {_format_first(sorted(set(map(len, lists))))} tokens",
            because="an attention_mask belongs to a tensor of prompts, padded to one length",
            instead="the tensor of prompts as the tokenizer gives it, or lists without a mask",
        )
    padding = find_padding(torch.tensor(lists), None, attention_mask, side="left")
    if padding is None:
        return lists
    first = padding.side == "right"
    return [row[:count] if first else row[len(row) - count :] for row, count in zip(lists, padding.counts, strict=True)]


def _check_context_length(model: GenerativeModel, longest: int, max_new_tokens: int) -> None:
    if model.context_length is None:
        return
    capacity = model.context_length - longest if model.prompt_fills_context else model.context_length
    if max_new_tokens <= capacity:
        return
    counted = (
        f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens}"
        if model.prompt_fills_context
        else f"max_new_tokens={max_new_tokens}"
    )
    raise InputError(
        "The text would outgrow the context.",
        asked=counted,
        because=f"the model holds {model.context_length} tokens"
        + (f" and the prompt leaves room for {max(capacity, 0)}" if model.prompt_fills_context else ""),
        instead=f"max_new_tokens={capacity} or less"
        if capacity > 0
        else f"the last {model.context_length - max_new_tokens} tokens of the prompt"
        if max_new_tokens < model.context_length
        else "a shorter prompt and fewer new tokens",
    )


def _pad_left(lists: list[list[int]], device: torch.device) -> Prompts:
    lengths = [len(tokens) for tokens in lists]
    longest = max(lengths)
    rows = [[0] * (longest - len(tokens)) + tokens for tokens in lists]
    unequal = min(lengths) < longest
    return Prompts(
        lists=lists,
        tokens=torch.tensor(rows, dtype=torch.int64, device=device),
        lengths=torch.tensor(lengths, dtype=torch.int64, device=device) if unequal else None,
    )


def _format_first(values: list) -> str:
    """The first values of a list, short enough for one line."""
    shown = ", ".join(repr(value) if len(repr(value)) < 40 else f"{repr(value)[:36]} ..." for value in values[:4])
    return shown + (", ..." if len(values) > 4 else "")
