"""Examples as token sequences `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, packed into rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.patterns import Padding, Pattern, Segments


class Example(NamedTuple):
    """A text or a pair of texts without special tokens, and the label of the pair."""

    first: Sequence[int]
    second: Sequence[int] | None = None
    label: int = 0


class Sequences(NamedTuple):
    """Sequences one after the other: their tokens, segments (0 for A, 1 for B), and the length of each."""

    tokens: Tensor
    segments: Tensor
    lengths: Tensor

    @property
    def numbers(self) -> Tensor:
        """The sequence of each token."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)


def join_examples(examples: Sequence[Example], cls_token: int, sep_token: int) -> Sequences:
    """The sequences of some examples.

    >>> join_examples([Example([5, 6], [7])], cls_token=1, sep_token=2)[:2]
    (tensor([1, 5, 6, 2, 7, 2]), tensor([0, 0, 0, 0, 1, 1]))
    """
    tokens, segments, lengths = [], [], []
    for first, second, _ in examples:
        a = [cls_token, *first, sep_token]
        b = [] if second is None else [*second, sep_token]
        tokens += a + b
        segments += [0] * len(a) + [1] * len(b)
        lengths.append(len(a) + len(b))
    return Sequences(torch.tensor(tokens), torch.tensor(segments), torch.tensor(lengths))


@dataclass(frozen=True)
class PackedSequences:
    """Sequences in the rows of a batch, several in a row where they fit; they do not see each other.

    Attributes:
        tokens, segments, positions: `(row, token)`; positions are counted in each sequence.
        pattern: tokens see their own sequence; None where all rows are full with one.
        places: of each token in the flattened rows, in the order of the sequences, `(token,)`.
        firsts: of the first token of each sequence in the flattened rows, `(sequence,)`.
    """

    tokens: Tensor
    segments: Tensor
    positions: Tensor
    pattern: Pattern | None
    places: Tensor
    firsts: Tensor


def pack_sequences(sequences: Sequences, row_length: int, pad_token: int) -> PackedSequences:
    """Put sequences into rows of at most `row_length` tokens."""
    rows, columns = assign_rows(sequences.lengths.tolist(), row_length)
    lengths, numbers = sequences.lengths, sequences.numbers
    inside = torch.arange(len(numbers)) - (lengths.cumsum(0) - lengths)[numbers]
    width = int((columns + lengths).max())
    places = rows[numbers] * width + columns[numbers] + inside
    shape = int(rows.max()) + 1, width

    def scatter(values: Tensor, fill: int) -> Tensor:
        return torch.full((shape[0] * width,), fill).index_copy(0, places, values).view(shape)

    pattern: Pattern | None = None
    if len(lengths) > shape[0]:
        pattern = Segments(scatter(numbers, -1))
    elif int(lengths.min()) < width:
        pattern = Padding(torch.empty_like(lengths).index_copy(0, rows, lengths))
    return PackedSequences(
        scatter(sequences.tokens, pad_token),
        scatter(sequences.segments, 0),
        scatter(inside, 0),
        pattern,
        places,
        rows * width + columns,
    )


def assign_rows(lengths: Sequence[int], row_length: int) -> tuple[Tensor, Tensor]:
    """The row and the first column of each sequence: the longest first, each into the first row with room for it.

    >>> [each.tolist() for each in assign_rows([3, 5, 2, 4], row_length=7)]
    [[1, 0, 0, 1], [4, 0, 5, 0]]
    """
    rows, columns = torch.zeros(2, len(lengths), dtype=torch.long)
    filled: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        row = next((row for row, used in enumerate(filled) if used + lengths[number] <= row_length), len(filled))
        if row == len(filled):
            filled.append(0)
        rows[number], columns[number] = row, filled[row]
        filled[row] += lengths[number]
    return rows, columns
