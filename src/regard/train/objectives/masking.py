r"""Masked language modelling: choose tokens, hide most of them, and predict what they were.

Of the tokens that are no special ones a share of 15 % is chosen. A chosen token is replaced by the mask token with
probability 0.8, by a token drawn evenly from the whole vocabulary with probability 0.1, and kept with probability 0.1:

    P(the input differs from the text) = 0.15 (0.8 + 0.1 (1 - 1 / V))

Source: Devlin et al., BERT (2019), section 3.1, and the released `create_pretraining_data.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# The target of a token that is not predicted; torch's cross-entropy leaves it out.
IGNORED = -100
# The shares of chosen tokens that are masked, and that are masked or replaced by a random token.
MASKED, ALTERED = 0.8, 0.9


class Masked(NamedTuple):
    """Input tokens, and targets of the same shape: the original token where one was chosen, `IGNORED` elsewhere."""

    tokens: Tensor
    targets: Tensor


def mask_tokens(
    tokens: Tensor,
    *,
    generator: torch.Generator,
    vocab_size: int,
    mask_token: int,
    special_tokens: Sequence[int],
    share: float = 0.15,
    words: Tensor | None = None,
    exact: bool = False,
    max_predictions: int | None = None,
    sequences: Tensor | None = None,
) -> Masked:
    """Choose tokens of a batch for prediction and mask them.

    tokens: of any shape; special_tokens are never chosen.
    words: the word of each token (`find_words`), of the same shape; a word is then chosen as a whole.
    exact: False chooses every token (word) by itself with probability `share`; True chooses
        `count_predictions(length, share, max_predictions)` tokens of every sequence, as BERT's code does.
    sequences: the sequence of each token, for `exact`; the rows of a batch `(batch, token)` if not given.

    >>> tokens = torch.tensor([[2, 7, 8, 9, 10, 3]])
    >>> settings = dict(vocab_size=11, mask_token=4, special_tokens=(0, 1, 2, 3, 4), exact=True)
    >>> mask_tokens(tokens, generator=torch.Generator().manual_seed(1), **settings)
    Masked(tokens=tensor([[ 2,  7,  4,  9, 10,  3]]), targets=tensor([[-100, -100,    8, -100, -100, -100]]))
    """
    eligible = ~torch.isin(tokens, torch.tensor(list(special_tokens), dtype=tokens.dtype))
    units = torch.arange(tokens.numel()).view_as(tokens) if words is None else words
    if exact:
        rows = _number_rows(tokens) if sequences is None else sequences
        chosen = _choose_exactly(eligible, units, rows, share, max_predictions, generator)
    else:
        draws = torch.rand(tokens.numel(), generator=generator)  # at least as many as there are words
        chosen = eligible & (draws[_number_from_zero(units)] < share)
    draws = torch.rand(tokens.shape, generator=generator)
    random = torch.randint(vocab_size, tokens.shape, generator=generator, dtype=tokens.dtype)
    altered = torch.where(draws < MASKED, torch.full_like(tokens, mask_token), random)
    return Masked(
        torch.where(chosen & (draws < ALTERED), altered, tokens), torch.where(chosen, tokens, torch.tensor(IGNORED))
    )


def count_predictions(length: int, share: float = 0.15, max_predictions: int | None = None) -> int:
    """How many tokens BERT predicts in a sequence of `length` tokens, its special ones included.

        min(max_predictions, max(1, round(share length)))

    >>> [count_predictions(length, max_predictions=20) for length in (3, 128)], count_predictions(512)
    ([1, 19], 77)
    """
    count = max(1, round(share * length))
    return count if max_predictions is None else min(max_predictions, count)


def find_words(tokens: Tensor, starts_word: Tensor) -> Tensor:
    """The word of each token, counted from 0; `starts_word[token]` is false for pieces inside a word, as "##ing".

    >>> find_words(torch.tensor([5, 6, 6, 5]), starts_word=torch.tensor([True] * 6 + [False]))
    tensor([0, 0, 0, 1])
    """
    return (starts_word[tokens].flatten().long().cumsum(0) - 1).clamp(min=0).view_as(tokens)


def _number_rows(tokens: Tensor) -> Tensor:
    return torch.arange(tokens[..., 0].numel()).view(*tokens.shape[:-1], 1).expand_as(tokens)


def _number_from_zero(units: Tensor) -> Tensor:
    return torch.unique(units, return_inverse=True)[1]


def _choose_exactly(
    eligible: Tensor,
    units: Tensor,
    sequences: Tensor,
    share: float,
    max_predictions: int | None,
    generator: torch.Generator,
) -> Tensor:
    """In random order, units are chosen until the count of their sequence is reached; too long ones are skipped."""
    members: dict[tuple[int, int], list[int]] = {}
    rows = sequences.flatten().tolist()
    places = eligible.flatten().nonzero().flatten().tolist()
    numbers = units.flatten().tolist()
    for place in places:
        members.setdefault((rows[place], numbers[place]), []).append(place)
    lengths = torch.unique(sequences, return_counts=True)
    left = {
        row: count_predictions(length, share, max_predictions)
        for row, length in zip(*(each.tolist() for each in lengths), strict=True)
    }
    chosen = torch.zeros(eligible.numel(), dtype=torch.bool)
    groups = list(members.items())
    for number in torch.randperm(len(groups), generator=generator).tolist():
        (row, _), group = groups[number]
        if len(group) <= left[row]:
            left[row] -= len(group)
            chosen[group] = True
    return chosen.view_as(eligible)
