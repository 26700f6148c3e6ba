"""Sequence packing: texts of unequal length share a row, so that nothing is computed for padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ConfigError, InputError
from regard.models.validation import check_vocabulary, to_token_lists
from regard.patterns import Segments


@dataclass(frozen=True)
class PackedTexts:
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


def pack_texts(
    texts: Sequence[Sequence[int]] | Tensor, tokens_at_once: int, context: int, vocab_size: int | None = None
) -> Iterator[PackedTexts]:
    """Rows of about `tokens_at_once` tokens; a text is never cut.

    Texts are taken in the order of their lengths, so that neighbours in a row have blocks of equal size. A text may
    also be a tensor or an array of one axis.
    """
    lists = to_token_lists(texts, "texts")
    lengths = [len(text) for text in lists]
    for index, length in enumerate(lengths):
        if not 1 <= length <= context:
            raise InputError(
                "A text does not fit the model.",
                asked=f"text {index} of {length} tokens",
                found=f"a model for 1 to {context} tokens",
                because="a mean of no tokens is nothing, and there are no positions beyond the context",
                instead=f"texts[{index}][:{context}]" if length else "at least the first and last token of a text",
            )
    if vocab_size is not None:
        check_vocabulary(lists, vocab_size, "texts")
    order = sorted(range(len(lists)), key=lambda index: lengths[index])
    row: list[int] = []
    filled = 0
    for index in order:
        if row and filled + lengths[index] > tokens_at_once:
            yield _join_texts(lists, row)
            row, filled = [], 0
        row.append(index)
        filled += lengths[index]
    if row:
        yield _join_texts(lists, row)


def _join_texts(texts: list[list[int]], row: list[int]) -> PackedTexts:
    lengths = torch.tensor([len(texts[index]) for index in row])
    starts = torch.zeros(len(row) + 1, dtype=torch.long)
    starts[1:] = lengths.cumsum(0)
    ids = torch.repeat_interleave(torch.arange(len(row)), lengths)
    positions = torch.arange(len(ids)) - starts[ids]
    tokens = torch.tensor([token for index in row for token in texts[index]])
    return PackedTexts(torch.tensor(row), tokens[None], positions[None], starts, Segments(ids))


def pool_texts(hidden: Tensor, packed: PackedTexts, pooling: str) -> Tensor:
    """One row for each text: the mean of its tokens, or its first one, from `(token, dim)`."""
    check_pooling(pooling, ("mean", "first"))
    if pooling == "first":
        return hidden[packed.starts[:-1].to(hidden.device)]
    return torch.segment_reduce(hidden, "mean", lengths=packed.starts.diff().to(hidden.device), axis=0)


def check_pooling(pooling: str, known: Sequence[str] = ("mean", "first", "pooled")) -> None:
    """Refuse a pooling that there is not."""
    if pooling not in known:
        raise ConfigError(
            "There is no such pooling.",
            asked=f"pooling={pooling!r}",
            because='a text becomes one vector by the "mean" of its tokens, by its "first" or by its "pooled" one',
            instead='pooling="mean"',
        )
