"""A bias that depends on relative position only, as a table with one entry for each difference.

Every token gets a code so that the entry of a pair is `query_code - key_code`. On a line the code is the position. On a
grid of C columns it is `row * (2 C - 1) + column`: no two different steps have the same difference then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.biases.base import Bias
from regard.caching import lru_cache_bytes
from regard.patterns import Lengths

FAR = 1 << 30  # the code of a token that is not on the grid: no entry is as far away, and what has no entry scores 0


def make_bias_table(bias: Bias, lengths: Lengths) -> tuple[Tensor, Tensor, Tensor]:
    """Table `(head, entry)`, differentiable, and the codes of queries and keys."""
    grid = getattr(bias, "grid", None)
    place = None if grid is None else (*grid, getattr(bias, "start", 0))
    # A tracer has to see the operations themselves, so nothing is cached under it.
    make = _compute_codes if torch.compiler.is_compiling() else _compute_codes_cached
    query_code, key_code, query_position, key_position = make(place, lengths)
    return bias.scores(query_position, key_position), query_code, key_code


def list_table_entries(bias: Bias, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """For each entry of the table the positions of a query and a key that have it."""
    grid = getattr(bias, "grid", None)
    return _compute_codes_cached(None if grid is None else (*grid, getattr(bias, "start", 0)), lengths)[2:]


@lru_cache_bytes(lambda codes: sum(code.nbytes for code in codes))
def _compute_codes_cached(
    place: tuple[int, int, int] | None, lengths: Lengths
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of queries and keys, and for each entry positions of a query and a key that have it."""
    return _compute_codes(place, lengths)


def _compute_codes(place: tuple[int, int, int] | None, lengths: Lengths) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _compute_line_codes(lengths) if place is None else _compute_grid_codes(*place, lengths)


def _compute_line_codes(lengths: Lengths) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    queries, keys = lengths
    query_code = torch.arange(queries, dtype=torch.int32) + (keys - 1)
    entry = torch.arange(queries + keys - 1)
    # query number n sits at n + offset, so that key - query = (keys - 1 - entry) - offset
    return (
        query_code,
        torch.arange(keys, dtype=torch.int32),
        torch.zeros_like(entry),
        (keys - 1) - entry - lengths.offset,
    )


def _compute_grid_codes(rows: int, columns: int, start: int, lengths: Lengths) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = 2 * columns - 1

    def code(position: Tensor, far: int) -> Tensor:
        token = position - start
        inside = (token >= 0) & (token < rows * columns)
        code = torch.div(token, columns, rounding_mode="floor") * wide + token % columns
        return torch.where(inside, code, far).to(torch.int32)

    shift = (rows - 1) * wide + columns - 1
    query_position = torch.arange(lengths.queries) + lengths.offset
    query_code = code(query_position, FAR - shift) + shift
    key_code = code(torch.arange(lengths.keys), -FAR)
    entry = torch.arange((2 * rows - 1) * wide)
    up, left = torch.div(entry, wide, rounding_mode="floor") - (rows - 1), entry % wide - (columns - 1)  # query - key
    key_row, key_column = (-up).clamp(min=0), (-left).clamp(min=0)
    query_row, query_column = key_row + up, key_column + left
    return query_code, key_code, start + query_row * columns + query_column, start + key_row * columns + key_column
