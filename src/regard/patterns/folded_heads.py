"""Heads folded into batch rows: plans and kernels distinguish batch rows, not heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard.patterns.base import Pattern
from regard.patterns.box import Array, Lengths, TokenBox
from regard.patterns.token_order import TokenOrder


@dataclass(frozen=True, repr=False)
class FoldedHeads(Pattern):
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

    def _inner_row(self, row):
        """The row of the inner pattern, for arrays and tensors."""
        batch_row, head = row // self.per_row, row % self.per_row
        if self.pattern.heads is None:
            return batch_row
        return head if self.pattern.rows is None else batch_row * self.per_row + head

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        return self.pattern._allows(i, j, self._inner_row(row), lengths)

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        return self.pattern._box_coverage(query, key, self._inner_row(row), lengths)

    @property
    def _is_opaque(self) -> bool:
        return self.pattern._is_opaque

    @property
    def _needs_key_length(self) -> bool:
        return self.pattern._needs_key_length

    def _find_dense_order(self) -> TokenOrder:
        return self.pattern._find_dense_order()

    def _check_lengths(self, lengths: Lengths) -> None:
        self.pattern._check_lengths(lengths)

    @property
    def is_key_padding(self) -> bool:
        return self.pattern.is_key_padding
