"""Programs under tracing: pattern and lengths are constants of the graph, and so are the words of the program."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from regard.caching import constant_under_compile
from regard.kernels.program import program
from regard.patterns import Lengths, Pattern


def get_program(pattern: Pattern, lengths: Lengths, lanes: int) -> tuple[Tensor, Tensor]:
    """Words and masks of the program."""
    if torch.compiler.is_compiling():
        # A program belongs to its lengths, so a graph does too: `index` specializes on the numbers.
        queries, keys = operator.index(lengths.queries), operator.index(lengths.keys)
        return _constant_words(pattern, queries, keys, lanes), _constant_masks(pattern, queries, keys, lanes)
    made = program(pattern, lengths, lanes)
    return made.words, made.masks


@constant_under_compile
def _constant_words(pattern: Pattern, queries: int, keys: int, lanes: int) -> Tensor:
    return program(pattern, Lengths(queries, keys), lanes).words


@constant_under_compile
def _constant_masks(pattern: Pattern, queries: int, keys: int, lanes: int) -> Tensor:
    return program(pattern, Lengths(queries, keys), lanes).masks
