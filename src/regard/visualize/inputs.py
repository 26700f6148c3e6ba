"""Inputs of models: a tensor, an array or a list with or without a batch axis, or a dict of keyword arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import InputError, RegardError
from regard.layers.multihead import MultiHeadAttention

# Layers for which three axes are (batch, token, channel), not an image or a grid of tokens.
TOKEN_LAYERS = (MultiHeadAttention, nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


class Inputs(NamedTuple):
    """The arguments with which a model is called."""

    positional: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def first_tensor(self) -> Tensor | None:
        values = (*self.positional, *self.keywords.values())
        return next((value for value in values if isinstance(value, Tensor)), None)


def read_inputs(model: nn.Module, positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> list[Inputs]:
    """The ways to read the arguments, in the order in which they are tried.

    One tensor, array or list gets a batch axis if it has none; one dict is keywords; several arguments are as given.
    Three axes are an image or a grid of tokens without a batch axis, or (batch, token, channel).
    """
    if len(positional) != 1:
        return [Inputs(positional, dict(keywords))]
    if isinstance(positional[0], Mapping):
        return [Inputs((), {str(name): value for name, value in positional[0].items()} | dict(keywords))]
    given = _read_tensor(positional[0])
    readings = [given[None] if _lacks_batch(model, given) else given]
    if given.is_floating_point() and given.ndim == 3 and readings[0] is not given:
        readings.append(given)
    return [Inputs((reading,), dict(keywords)) for reading in readings]


def _read_tensor(input: Any) -> Tensor:
    try:
        found = torch.as_tensor(input)
    except (TypeError, ValueError, RuntimeError) as failure:
        raise InputError(
            "Expected a tensor, an array or a dict of tensors.",
            asked=f"a {type(input).__name__}",
            found=f"{type(failure).__name__}: {failure}",
            because="an input is a tensor, an array, or a dict of them",
            instead="an image (channel, row, column), or token ids; regard show has --text and --image",
        ) from failure
    if found.is_floating_point() and not bool(found.isfinite().all()):
        raise InputError(
            "The input is not finite.",
            asked=f"an input {tuple(found.shape)}",
            found=f"{int((~found.isfinite()).sum())} of {found.numel()} numbers are nan or infinite",
            because="the attention weights would not be finite either",
            instead="torch.nan_to_num(input), or the image as it was before",
        )
    return found


def _lacks_batch(model: nn.Module, input: Tensor) -> bool:
    """Without a batch axis, token ids have one axis, embedded tokens two, images and grids of tokens three."""
    if not input.is_floating_point():
        return input.ndim == 1
    return input.ndim == 2 or (input.ndim == 3 and not isinstance(model, TOKEN_LAYERS))


@contextmanager
def explaining_failures(model: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Raise what a model raises on its input as an `InputError` that describes the input."""
    try:
        yield
    except RegardError:
        raise
    except Exception as failure:  # of any kind: it is the model's
        given = [*(("", value) for value in inputs.positional), *inputs.keywords.items()]
        described = [f"{name}{'=' if name else ''}{_describe(value)}" for name, value in given]
        lines = str(failure).strip().splitlines() or [""]
        raise InputError(
            f"{type(model).__name__} cannot read this input.",
            asked=", ".join(described) or "no input",
            found=f"{type(failure).__name__}: {lines[0]}",
            because=_find_reason(model, [value for _, value in given]),
            instead="show(model, input) with an input on which model(input) runs",
        ) from failure


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    text = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if value.dtype.is_floating_point or value.is_complex() or value.dtype == torch.bool or not value.numel():
        return text
    return f"{text} from {int(value.min())} to {int(value.max())}"


def _find_reason(model: nn.Module, values: list[Any]) -> str:
    """The likeliest reason: ids beyond the vocabulary, more tokens than positions, or an error of the model."""
    ids = next((each for each in values if isinstance(each, Tensor) and not each.is_floating_point()), None)
    vocab_size, positions = read_limits(model)
    if ids is not None and ids.numel() and ids.dtype != torch.bool and not ids.is_complex():
        if int(ids.min()) < 0 or (vocab_size is not None and int(ids.max()) >= vocab_size):
            return "token ids are counted from 0" + (f", and its vocabulary has {vocab_size:,}" if vocab_size else "")
        if positions is not None and ids.shape[-1] > positions:
            return f"it has positions for {positions:,} tokens, and these are {ids.shape[-1]:,}"
    return "the model itself raises this error" if values else "it needs an input to run"


def read_limits(model: Any) -> tuple[int | None, int | None]:
    """Vocabulary size and number of positions of a model, as far as its configuration or embeddings tell."""
    config = getattr(model, "config", None)
    vocab_size, positions = (
        next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
        for names in (("vocab_size",), ("max_position_embeddings", "n_positions", "context_length"))
    )
    if vocab_size is None:
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        vocab_size = max((table.num_embeddings for table in tables), default=None)
    return vocab_size, positions
