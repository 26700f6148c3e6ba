"""Checks of configurations and of the inputs of models."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from regard.errors import ConfigError, InputError
from regard.models.config import Config
from regard.patterns import Pattern

# What fields of every configuration mean, by their names.
CHANCES = ("dropout", "attention_dropout")
EPSILONS = ("norm_eps", "eps")
# The numbers that rows of an embedding are found by.
INDICES = (torch.int64, torch.int32)
OTHER_NUMBERS = (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.uint64)


def check_sizes(config: Config, *names: str) -> None:
    """Refuse sizes below one, a dropout that is no probability and a norm's epsilon that is negative or no number.

    A size may be `None`, which is none at all. Dropouts and epsilons are found by their names.
    """
    fields = [field.name for field in dataclasses.fields(config)]
    for name in (*names, *(name for name in fields if name in CHANCES or name in EPSILONS)):
        value = getattr(config, name)
        if name in CHANCES:
            fine, because, instead = 0 <= value < 1, "dropout is a probability below 1", f"{name}=0.1"
        elif name in EPSILONS:
            fine, because, instead = 0 <= value < math.inf, "it is added to a variance", f"{name}=1e-5"
        else:
            fine, because, instead = value is None or value >= 1, "there is at least one", f"{name}=1 or more"
        if not fine:
            raise ConfigError(
                f"{type(config).__name__} cannot have {name}={value}.",
                asked=f"{type(config).__name__}({name}={value})",
                because=because,
                instead=instead,
            )


def to_list(values: Any) -> Any:
    """A tensor or an array as lists of Python's numbers, a number on no axis as one; anything else as it is.

    A TypeError where a tensor has no numbers to list: sparse, nested, quantised, or on the meta device.
    """
    if not callable(getattr(values, "tolist", None)):
        return values
    try:
        return values.tolist()
    except (RuntimeError, NotImplementedError) as failure:
        raise TypeError(f"a tensor whose numbers cannot be listed: {failure}") from failure


def check_tensor(name: str, value: object, example: str) -> None:
    """Refuse what is not a dense tensor of plain numbers. `name`: of the argument; `example`: what could be given."""
    found = ""
    if not isinstance(value, Tensor):
        found = f"a {type(value).__name__}"
    elif value.is_nested or value.layout != torch.strided or value.is_quantized:
        kind = "quantised" if value.is_quantized else "nested" if value.is_nested else f"sparse ({value.layout})"
        found = f"a tensor that is {kind}"
    if not found:
        return
    instead = example
    if isinstance(value, str):
        instead = f"{example}, which the tokenizer of this model makes of a text" if name == "tokens" else example
    elif isinstance(value, Mapping) and "input_ids" in value:
        instead = f"{name}['input_ids'], and lengths= for its padding"
    elif isinstance(value, list | tuple) or callable(getattr(value, "tolist", None)):
        instead = f"torch.as_tensor({name})" if found and not isinstance(value, Tensor) else f"a dense one: {example}"
    raise InputError(
        f"The {name} are no tensor that a model reads.",
        asked=f"{name} that are {found}",
        because="a model reads a dense tensor",
        instead=instead,
    )


def check_cache(cache: object) -> None:
    """Refuse a cache that `new_cache` did not make."""
    # by its attributes: a cache may be wrapped
    if cache is not None and not (hasattr(cache, "layers") and hasattr(cache, "positions")):
        raise InputError(
            "This is not the cache of a model.",
            asked=f"cache={type(cache).__name__}",
            because="it holds the keys and values of every layer for the tokens so far",
            instead="cache=model.new_cache()",
        )


def check_pattern(pattern: object) -> None:
    """Refuse what is no pattern; a tensor of a mask becomes one."""
    if pattern is not None and not isinstance(pattern, Pattern):
        raise InputError(
            "This is no pattern.",
            asked=f"pattern={type(pattern).__name__}",
            because="a pattern says which tokens see each other, without a tensor",
            instead="Mask(tensor) for a boolean (query, key) tensor, lengths=[5, 3] for padding, or Window(7, 0) and "
            "the like",
        )


def check_positions(positions: Tensor | None, tokens: Tensor) -> None:
    """Refuse positions that are not one whole number for each token, alike for all rows or not."""
    if positions is None:
        return
    check_tensor("positions", positions, "torch.arange(tokens.shape[1])")
    shapes = (tuple(tokens.shape[1:]), (1, *tokens.shape[1:]), tuple(tokens.shape))
    if positions.dtype not in INDICES or tuple(positions.shape) not in shapes:
        raise InputError(
            "These positions do not fit.",
            asked=f"positions {tuple(positions.shape)} of {positions.dtype} for tokens {tuple(tokens.shape)}",
            because="every token has one position, int64 or int32: (token,) or (batch, token)",
            instead="torch.arange(tokens.shape[1])",
        )


def to_token_ids(text: Any) -> list[int]:
    """The tokens of one text, a list, tensor or array; a TypeError where they are no whole numbers."""
    tokens = to_list(text)
    if any(isinstance(token, bool) for token in tokens):
        raise TypeError("true and false are no tokens")
    return [operator.index(to_list(token)) for token in tokens]


def to_token_lists(texts: Any, name: str, *, single: bool = False) -> list[list[int]]:
    """The token ids of several texts, from lists, arrays or a tensor.

    name: of the argument; single: one text may be given without a list around it.
    """
    if isinstance(texts, Tensor):
        check_tensor(name, texts, "torch.tensor([[464, 3290]])")
    lists: list[list[int]] = []
    rows = None
    try:
        if isinstance(texts, str):
            raise TypeError  # a string is a sequence too, of characters
        rows = list(to_list(texts))
        if single and rows and all(isinstance(to_list(token), SupportsIndex) for token in rows):
            rows = [rows]
        for row in rows:
            lists.append(to_token_ids(row))
        return lists
    except TypeError:
        text = f"{name}={texts!r}" if rows is None else f"{name}[{len(lists)}] = {rows[len(lists)]!r}"
        if isinstance(texts, Tensor):
            text = f"{name} {tuple(texts.shape)} of {texts.dtype}"
        raise InputError(
            f"Each of the {name} is a list of token ids.",
            asked=f"{name}=[[101, 7592, 102], [101, 102]], or the like",
            found=text if len(text) < 80 else f"{text[:76]} ...",
            because="a model takes token ids, not text, and a batch of them",
            instead=f"the ids of this model's tokenizer; {name}=[ids] for a single text",
        ) from None


def check_vocabulary(lists: Sequence[Sequence[int]], vocab_size: int, name: str) -> None:
    """Refuse token ids that no row of the embedding belongs to."""
    for row, tokens in enumerate(lists):
        for place, token in enumerate(tokens):
            if not 0 <= token < vocab_size:
                raise InputError(
                    "A token is not in the vocabulary.",
                    asked=f"{name}[{row}][{place}] = {token}",
                    found=f"a vocabulary of {vocab_size} tokens, 0 to {vocab_size - 1}",
                    because="every id is a row of the embedding",
                    instead="the tokenizer that belongs to this model",
                )


def check_tokens(tokens: Tensor, vocab_size: int, context: int | None = None, past: int = 0) -> None:
    """Refuse what is not a batch of token ids, ids that no row of the embedding belongs to, and texts too long."""
    check_tensor("tokens", tokens, "torch.tensor([[464, 3290]])")
    if tokens.ndim != 2 or tokens.dtype not in INDICES:
        whole = tokens.ndim == 2 and tokens.dtype in OTHER_NUMBERS
        raise InputError(
            "Expected token ids.",
            asked=f"a tensor {tuple(tokens.shape)} of {tokens.dtype}",
            because="tokens are whole numbers, (batch, token), and rows of an embedding are found by int64 or int32",
            instead="tokens.long()" if whole else "torch.tensor([[464, 3290]]), with two brackets for one text",
        )
    if not tokens.shape[1]:
        raise InputError(
            "The text has no tokens.",
            asked=f"tokens {tuple(tokens.shape)}",
            because="a model says something of each token, and there is none",
            instead="at least one token, such as the one that begins a text",
        )
    if context is not None and past + tokens.shape[1] > context:
        raise InputError(
            "The text is longer than the context.",
            asked=f"{tokens.shape[1]} tokens" + (f" after {past}" if past else ""),
            found=f"a model for at most {context} tokens",
            because="there are no positions beyond the last one it has learned",
            instead=f"the last {max(context - past, 0)} tokens, or a model with a longer context",
        )
    if not tokens.numel() or torch.compiler.is_compiling() or not _has_data(tokens):
        return
    smallest, largest = (int(edge) for edge in tokens.aminmax())
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        row, column = (int(place) for place in (tokens == wrong).nonzero()[0])
        raise InputError(
            f"Token {wrong} is not in the vocabulary.",
            asked=f"tokens[{row}, {column}] = {wrong}",
            found=f"a vocabulary of {vocab_size} tokens, 0 to {vocab_size - 1}",
            because="every id is a row of the embedding",
            instead="the tokenizer that belongs to this model; lengths or patterns for padding, not an id of its own",
        )


def _has_data(tokens: Tensor) -> bool:
    """False for meta and fake tensors, which have shapes and no values."""
    return tokens.device.type != "meta" and not isinstance(tokens, FakeTensor)


def check_lengths(lengths: Sequence[int] | Tensor, tokens: Tensor) -> None:
    """Refuse lengths that are not one whole number for each text, at most its number of tokens."""
    if tokens.ndim != 2:
        return  # no tokens; `check_tokens` says so
    because = ""
    rows, count = tokens.shape
    try:
        numbers = to_token_ids(lengths)
    except TypeError:
        numbers, because = [], "a length is a whole number, on one axis for all texts"
    if not because and len(numbers) != rows:
        because = "a length says how many tokens of its row are real"
    elif not because and any(not 0 <= length <= count for length in numbers):
        because = f"a row has {count} tokens; none is longer than that"
    if because:
        text = repr(lengths)
        raise InputError(
            "Every text has one length.",
            asked=f"{len(numbers)} lengths"
            if numbers
            else f"lengths={text if len(text) <= 80 else text[:76] + ' ...'}",
            found=f"{rows} texts: tokens {tuple(tokens.shape)}",
            because=because,
            instead=f"lengths={[count] * rows} for texts without padding",
        )


def check_segments(segments: Tensor, tokens: Tensor, kinds: int) -> None:
    """Refuse segments that do not belong to the tokens one by one, and kinds that have no row of their own."""
    because = ""
    instead = "0 for each token of the first sentence, 1 for each of the second"
    check_tensor("segments", segments, "torch.zeros_like(tokens)")
    if not kinds:
        because, instead = "this model does not tell sentences apart", "leave segments out"
    elif segments.shape != tokens.shape or segments.dtype not in INDICES:
        because = "every token has one whole number, int64 or int32, which says what sentence it belongs to"
    elif segments.numel() and segments.device.type != "meta" and not torch.compiler.is_compiling():
        smallest, largest = (int(edge) for edge in segments.aminmax())
        if smallest < 0 or largest >= kinds:
            because = f"there is no sentence {smallest if smallest < 0 else largest}"
    if because:
        raise InputError(
            "These segments do not fit.",
            asked=f"segments {tuple(segments.shape)} of {segments.dtype} for tokens {tuple(tokens.shape)}",
            found=f"a model of {kinds} kinds of sentences" + (f", 0 to {kinds - 1}" if kinds else ""),
            because=because,
            instead=instead,
        )
