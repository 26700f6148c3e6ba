"""Heads as batch rows: plans and kernels tell batch rows apart, not heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard.patterns.base import Pattern
from regard.patterns.box import Array, Box, Lengths
from regard.patterns.order import Order


@dataclass(frozen=True, repr=False)
class HeadRows(Pattern):
    """A pattern whose row `batch row * heads + head` is what one head of one batch row sees.

    `batch_rows` is `None` where all batch rows see the same pairs, so that there is one row for each head.
    """

    pattern: Pattern
    batch_rows: int | None
    per_row: int

    def __repr__(self) -> str:
        return repr(self.pattern)

    @property
    def rows(self) -> int:
        return (self.batch_rows or 1) * self.per_row

    def _row(self, row):
        """The row that the pattern itself is asked for; works on arrays and tensors."""
        batch_row, head = row // self.per_row, row % self.per_row
        if self.pattern.heads is None:
            return batch_row
        return head if self.pattern.rows is None else batch_row * self.per_row + head

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        return self.pattern._allows(i, j, self._row(row), lengths)

    def _relation(self, query: Box, key: Box, row: Array, lengths: Lengths) -> Array:
        return self.pattern._relation(query, key, self._row(row), lengths)

    @property
    def _opaque(self) -> bool:
        return self.pattern._opaque

    @property
    def _needs_keys(self) -> bool:
        return self.pattern._needs_keys

    def _order(self) -> Order:
        return self.pattern._order()

    def _check(self, lengths: Lengths) -> None:
        self.pattern._check(lengths)

    @property
    def is_key_padding(self) -> bool:
        return self.pattern.is_key_padding
