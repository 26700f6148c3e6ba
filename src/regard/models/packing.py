"""Texts of unequal length laid end to end, so that nothing is computed for padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ConfigError, InputError
from regard.patterns import Segments


@dataclass(frozen=True)
class Packed:
    """One row of several texts.

    Attributes:
        texts: which of the given texts these are.
        tokens: `(1, token)`.
        positions: of each token in its own text, `(1, token)`.
        starts: where each text begins, and after them where the last one ends, `(text + 1,)`.
        pattern: tokens see their own text.
    """

    texts: Tensor
    tokens: Tensor
    positions: Tensor
    starts: Tensor
    pattern: Segments


def pack(
    texts: Sequence[Sequence[int]], tokens_at_once: int, context: int, vocabulary: int | None = None
) -> Iterator[Packed]:
    """Rows of about `tokens_at_once` tokens; a text is never cut.

    Texts are taken in the order of their lengths, so that neighbours in a row have blocks of equal size.
    """
    lengths = [len(text) for text in texts]
    for index, length in enumerate(lengths):
        if not 1 <= length <= context:
            raise InputError(
                "A text does not fit the model.",
                asked=f"text {index} of {length} tokens",
                found=f"a model for 1 to {context} tokens",
                because="a mean of no tokens is nothing, and there are no positions beyond the context",
                instead=f"texts[{index}][:{context}]" if length else "at least the first and last token of a text",
            )
        if vocabulary is not None and not 0 <= min(texts[index]) <= max(texts[index]) < vocabulary:
            place = next(place for place, token in enumerate(texts[index]) if not 0 <= token < vocabulary)
            raise InputError(
                "A token is not in the vocabulary.",
                asked=f"texts[{index}][{place}] = {texts[index][place]}",
                found=f"a vocabulary of {vocabulary} tokens, 0 to {vocabulary - 1}",
                because="every id is a row of the embedding",
                instead="the tokenizer that belongs to this model",
            )
    order = sorted(range(len(texts)), key=lambda index: lengths[index])
    row: list[int] = []
    filled = 0
    for index in order:
        if row and filled + lengths[index] > tokens_at_once:
            yield _packed(texts, row)
            row, filled = [], 0
        row.append(index)
        filled += lengths[index]
    if row:
        yield _packed(texts, row)


def _packed(texts: Sequence[Sequence[int]], row: list[int]) -> Packed:
    lengths = torch.tensor([len(texts[index]) for index in row])
    starts = torch.zeros(len(row) + 1, dtype=torch.long)
    starts[1:] = lengths.cumsum(0)
    ids = torch.repeat_interleave(torch.arange(len(row)), lengths)
    positions = torch.arange(len(ids)) - starts[ids]
    tokens = torch.tensor([token for index in row for token in texts[index]])
    return Packed(torch.tensor(row), tokens[None], positions[None], starts, Segments(ids))


def pooled_rows(hidden: Tensor, packed: Packed, pooling: str) -> Tensor:
    """One row for each text: the mean of its tokens, or its first one, from `(token, dim)`."""
    if pooling == "first":
        return hidden[packed.starts[:-1].to(hidden.device)]
    if pooling != "mean":
        raise ConfigError(
            "There is no such pooling.",
            asked=f"pooling={pooling!r}",
            because='a text becomes one vector by the "mean" of its tokens, by its "first" or by its "pooled" one',
            instead='pooling="mean"',
        )
    return torch.segment_reduce(hidden, "mean", lengths=packed.starts.diff().to(hidden.device), axis=0)
