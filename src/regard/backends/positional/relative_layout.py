"""Positions of queries and keys for scores that depend on their difference, and sums over windows of differences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RelativeLayout:
    """Queries and keys on two axes, a line being one row. Entry `q - k + K - 1` of a table belongs to a pair.

    So query `q` sees the entries `q` to `q + K - 1` along each axis: a window of the table, as long as the keys.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]

    @property
    def table(self) -> tuple[int, int]:
        """How many differences there are along each axis."""
        rows, columns = (q + k - 1 for q, k in zip(self.queries, self.keys, strict=True))
        return rows, columns

    def make_codes(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Numbers of queries and keys whose difference is the place of a pair's entry in the flattened table."""
        wide = self.table[1]

        def code(size: tuple[int, int], first: tuple[int, int]) -> Tensor:
            row = torch.arange(first[0], first[0] + size[0], device=device)
            return (row[:, None] * wide + torch.arange(first[1], first[1] + size[1], device=device)).flatten()

        return code(self.queries, (self.keys[0] - 1, self.keys[1] - 1)), code(self.keys, (0, 0))


def sum_windows(table: Tensor, layout: RelativeLayout) -> Tensor:
    """For each query the sum of the entries it sees, `(head, *queries)`.

    Each window is the end of one block and the beginning of the next, so that it is the sum of two running sums and
    nothing is ever subtracted: the sum of positive numbers keeps its relative precision, however small it is. (Van
    Herk's maximum filter, 1992, with sums.)
    """
    for axis, size in ((1, layout.keys[0]), (2, layout.keys[1])):
        table = _sum_along_axis(table.movedim(axis, -1), size).movedim(-1, axis)
    return table


def _sum_along_axis(table: Tensor, size: int) -> Tensor:
    count = table.shape[-1] - size + 1
    blocks = torch.nn.functional.pad(table, (0, -table.shape[-1] % size)).unflatten(-1, (-1, size))
    upto = blocks.cumsum(-1).flatten(-2)
    onward = blocks.flip(-1).cumsum(-1).flip(-1).flatten(-2)
    at = torch.arange(count, device=table.device)
    # A window that is a whole block is already complete.
    rest = torch.where(at % size == 0, 0, upto[..., size - 1 : size - 1 + count])
    return onward[..., :count] + rest


def sum_windows_transposed(rows: Tensor, layout: RelativeLayout) -> Tensor:
    """For each entry the sum over the queries that see it, `(head, *table)`: the transpose of `sum_windows`.

    Entry `e` is seen by the queries `e - K + 1` to `e`, so that it is a window itself, with zeros around the queries.
    """
    for axis, keys in ((1, layout.keys[0]), (2, layout.keys[1])):
        around = torch.nn.functional.pad(rows.movedim(axis, -1), (keys - 1, keys - 1))
        rows = _sum_along_axis(around, keys).movedim(-1, axis)
    return rows
