"""Windows of a stream of tokens, for language models: random ones to train on, consecutive ones to evaluate on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import torch
from torch import Tensor

from regard.errors import InputError
from regard.train.task import ORDER, seed_of


def sample_windows(tokens: numpy.ndarray, batch_size: int, context_length: int, *, seed: int, step: int) -> Tensor:
    """`(batch, context + 1)` tokens from random offsets; inputs are `[:, :-1]`, targets `[:, 1:]`.

    The offsets are uniform over all windows of the text, and follow from the seed and the step alone.
    """
    if len(tokens) <= context_length:
        raise InputError(
            "The text is shorter than the context.",
            asked=f"context_length={context_length}",
            found=f"{len(tokens):,} tokens",
            because="a window has one token more than the context, the last target",
            instead=f"context_length={max(len(tokens) - 1, 1)} or less, or more text",
        )
    generator = torch.Generator().manual_seed(seed_of(seed, ORDER, step))
    offsets = torch.randint(len(tokens) - context_length, (batch_size,), generator=generator).numpy()
    return _take(tokens, offsets[:, None] + numpy.arange(context_length + 1))


def sequential_windows(tokens: numpy.ndarray, batch_size: int, context_length: int) -> Iterator[Tensor]:
    """The whole text in order, in batches of windows that overlap by one token.

    So every token but the first is a target once. The last window may be shorter; it is a batch of its own.
    """
    whole = max(len(tokens) - 1, 0) // context_length
    for first in range(0, whole, batch_size):
        starts = numpy.arange(first, min(first + batch_size, whole)) * context_length
        yield _take(tokens, starts[:, None] + numpy.arange(context_length + 1))
    if whole * context_length < len(tokens) - 1:
        yield _take(tokens, numpy.arange(whole * context_length, len(tokens))[None])


def _take(tokens: numpy.ndarray, places: numpy.ndarray) -> Tensor:
    return torch.from_numpy(tokens[places].astype(numpy.int64))
