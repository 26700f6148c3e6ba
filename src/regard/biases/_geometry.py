"""Positions of keys relative to queries, on a sequence or on a grid in row-major order."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

from regard.biases._arguments import Grid


def find_deltas(
    query_position: Tensor, key_position: Tensor, grid: Grid | None, start: int
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Key minus query, one integer tensor per axis, and which pairs lie on the grid.

    Token `start + row * columns + column` lies at `(row, column)`. Tokens in front of `start` or behind the
    last row are clamped to the grid, so that every delta is a valid index, and marked `False` in the mask. On a
    sequence (`grid=None`) every integer is a position, and the mask is `None`.
    """
    if grid is None:
        return (key_position - query_position,), None
    query_row, query_column, query_inside = find_coordinates(query_position, grid, start)
    key_row, key_column, key_inside = find_coordinates(key_position, grid, start)
    return (key_row - query_row, key_column - query_column), query_inside & key_inside


def find_coordinates(position: Tensor, grid: Grid, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column, and whether the position lies on the grid."""
    rows, columns = grid
    token = position - start
    nearest = token.clamp(0, rows * columns - 1)
    return nearest // columns, nearest % columns, token == nearest


def zero_off_grid(scores: Tensor, inside: Tensor | None) -> Tensor:
    """The scores, and 0 for the pairs that are not on the grid."""
    return scores if inside is None else torch.where(inside, scores, 0.0)


def select_head(heads: int, head: Tensor) -> Tensor:
    """The head index of the bias for a head of the attention; a bias with one head is shared by all."""
    return torch.zeros_like(head) if heads == 1 else head


def look_up_entries(table: Tensor, entry: Tensor) -> Tensor:
    """`table` `(head, entries)` at the integers `entry` `(*pairs)`: `(head, *pairs)`."""
    # As table[:, entry], but about twice as fast both ways, and traced by FlexAttention with a scalar entry.
    return table.index_select(1, entry.reshape(-1)).reshape(table.shape[0], *entry.shape)


def add_up(terms: Iterable[Tensor]) -> Tensor:
    """The sum of a few tensors, without the initial 0 of the builtin `sum`."""
    return reduce(operator.add, terms)


def find_distinct(codes: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct integers of every row of `codes`, and which of them each entry is.

    Returns `values` `(*tile, distinct)` and `which` `(*tile, pairs)`: `values.gather(-1, which) == codes`.
    Rows with fewer distinct integers than the others are padded with their smallest one.
    """
    ordered, order = codes.sort(dim=-1)
    rank = torch.zeros_like(ordered)
    rank[..., 1:] = (ordered.diff(dim=-1) != 0).cumsum(dim=-1)
    count = int(rank.max()) + 1
    values = ordered[..., :1].repeat(*(1 for _ in codes.shape[:-1]), count)
    values.scatter_(-1, rank, ordered)
    which = torch.empty_like(rank).scatter_(-1, order, rank)
    return values, which
