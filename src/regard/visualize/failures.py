"""Failures of a model while it reads an input, in four parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError, RegardError


@contextmanager
def explaining_failures(model: nn.Module, inputs: tuple, words: dict) -> Iterator[None]:
    """What a model raises while it reads an input, in four parts: with what the input is, and what it may be."""
    try:
        yield
    except RegardError:
        raise
    except Exception as failure:  # of any kind: it is the model's
        given = [*(("", value) for value in inputs), *words.items()]
        described = [f"{name}{'=' if name else ''}{_describe(value)}" for name, value in given]
        lines = str(failure).strip().splitlines() or [""]
        raise InputError(
            f"{type(model).__name__} cannot read this input.",
            asked=", ".join(described) or "no input",
            found=f"{type(failure).__name__}: {lines[0]}",
            because=_why_unreadable(model, [value for _, value in given]),
            instead="show(model, input) with an input on which model(input) runs",
        ) from failure


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    text = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if value.dtype.is_floating_point or value.is_complex() or value.dtype == torch.bool or not value.numel():
        return text
    return f"{text} from {int(value.min())} to {int(value.max())}"


def _why_unreadable(model: nn.Module, values: list[Any]) -> str:
    """The likeliest reason: ids beyond the vocabulary, more tokens than positions, or that the model failed."""
    ids = next((each for each in values if isinstance(each, Tensor) and not each.is_floating_point()), None)
    vocab_size, positions = read_limits(model)
    if ids is not None and ids.numel() and ids.dtype != torch.bool and not ids.is_complex():
        if int(ids.min()) < 0 or (vocab_size is not None and int(ids.max()) >= vocab_size):
            return "token ids are counted from 0" + (f", and its vocabulary has {vocab_size:,}" if vocab_size else "")
        if positions is not None and ids.shape[-1] > positions:
            return f"it has positions for {positions:,} tokens, and these are {ids.shape[-1]:,}"
    if not values:
        return "it needs an input to run"
    return "the model fails on it by itself"


def read_limits(model: Any) -> tuple[int | None, int | None]:
    """How many token ids and how many positions a model knows, as far as it says."""
    config = getattr(model, "config", None)
    vocab_size, positions = (
        next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
        for names in (
            ("vocab_size",),
            ("max_position_embeddings", "n_positions", "context_length"),
        )
    )
    if vocab_size is None:
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        vocab_size = max((table.num_embeddings for table in tables), default=None)
    return vocab_size, positions
