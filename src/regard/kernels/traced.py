"""Programs where torch traces: a pattern and its lengths are constants of the graph, and so are its words."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.kernels.program import program
from regard.patterns import Lengths, Pattern


def words_of(pattern: Pattern, lengths: Lengths, lanes: int) -> tuple[Tensor, Tensor]:
    """Words and masks of the program."""
    if torch.compiler.is_compiling():
        return _constant_words(pattern, *lengths, lanes), _constant_masks(pattern, *lengths, lanes)
    made = program(pattern, lengths, lanes)
    return made.words, made.masks


@torch.compiler.assume_constant_result
def _constant_words(pattern: Pattern, queries: int, keys: int, lanes: int) -> Tensor:
    return program(pattern, Lengths(queries, keys), lanes).words


@torch.compiler.assume_constant_result
def _constant_masks(pattern: Pattern, queries: int, keys: int, lanes: int) -> Tensor:
    return program(pattern, Lengths(queries, keys), lanes).masks
