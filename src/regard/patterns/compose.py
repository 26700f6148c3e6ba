"""`&`, `|` and `~` of patterns, computed from their operands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from regard.errors import PatternError
from regard.patterns.base import Pattern
from regard.patterns.box import ALL, Array, Grid, Lengths, TokenBox
from regard.patterns.token_order import NATURAL_ORDER, TokenOrder

MOST_ALTERNATIVES = 16  # parts that an `&` of unions may be split into; beyond that it stays one part


def _check_rows_and_heads(left: Pattern, right: Pattern, sign: str) -> None:
    """Raise for patterns with different numbers of batch rows or heads."""
    for what, mine, other in (("batch rows", left.rows, right.rows), ("heads", left.heads, right.heads)):
        if mine is not None and other is not None and mine != other:
            raise PatternError(
                f"Two patterns disagree about the {'batch' if what == 'batch rows' else what}.",
                asked=f"{left!r} {sign} {right!r}",
                found=f"{mine} {what} on the left, {other} on the right",
                because=f"both operands must have one mask for each of the {what}",
                instead=f"patterns built for the same number of {what}",
            )


def _check_grids(left: Pattern, right: Pattern, sign: str) -> None:
    """Raise for patterns that place the same tokens on different grids."""
    for one in left._list_grids():
        for other in right._list_grids():
            if one != other and one.start == other.start and one.cells == other.cells:
                raise PatternError(
                    "Two patterns disagree about the grid.",
                    asked=f"{left!r} {sign} {right!r}",
                    found=f"the same {one.cells} tokens as {one} and as {other}",
                    because="a token would have two rows and two columns",
                    instead="the (rows, columns) of your feature map in both",
                )


def _parenthesize(pattern: Pattern, loose: tuple[type, ...]) -> str:
    return f"({pattern!r})" if isinstance(pattern, loose) else repr(pattern)


@dataclass(frozen=True, repr=False)
class _BinaryPattern(Pattern):
    left: Pattern
    right: Pattern

    def __post_init__(self) -> None:
        sign = "&" if isinstance(self, And) else "|"
        _check_rows_and_heads(self.left, self.right, sign)
        _check_grids(self.left, self.right, sign)

    @property
    def rows(self) -> int | None:
        return self.left.rows if self.right.rows is None else self.right.rows

    @property
    def heads(self) -> int | None:
        return self.left.heads if self.right.heads is None else self.right.heads

    def _fold_heads(self, rows: int | None, heads: int) -> Pattern:
        return type(self)(self.left._fold_heads(rows, heads), self.right._fold_heads(rows, heads))

    def _check_lengths(self, lengths: Lengths) -> None:
        self.left._check_lengths(lengths)
        self.right._check_lengths(lengths)

    @property
    def _is_opaque(self) -> bool:
        return self.left._is_opaque or self.right._is_opaque

    def _list_grids(self) -> frozenset[Grid]:
        return self.left._list_grids() | self.right._list_grids()

    def _is_global(self, position: Array) -> Array:
        return self.left._is_global(position) | self.right._is_global(position)

    @property
    def _needs_key_length(self) -> bool:
        return self.left._needs_key_length or self.right._needs_key_length

    @property
    def _is_prefix_stable(self) -> bool:
        return self.left._is_prefix_stable and self.right._is_prefix_stable

    @property
    def _supports_left_padding(self) -> bool:
        return self.left._supports_left_padding and self.right._supports_left_padding

    @property
    def is_key_padding(self) -> bool:
        return self.left.is_key_padding and self.right.is_key_padding

    def is_shift_invariant(self, grid: Grid | None = None) -> bool:
        return self.left.is_shift_invariant(grid) and self.right.is_shift_invariant(grid)

    @property
    def fixed_length(self) -> int | None:
        return self.left.fixed_length or self.right.fixed_length


@dataclass(frozen=True, repr=False)
class And(_BinaryPattern):
    """Pairs that both patterns allow."""

    def __repr__(self) -> str:
        return f"{_parenthesize(self.left, (Or,))} & {_parenthesize(self.right, (Or, And))}"

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        return self.left._allows(i, j, row, lengths) & self.right._allows(i, j, row, lengths)

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        left = self.left._box_coverage(query, key, row, lengths)
        return np.minimum(left, self.right._box_coverage(query, key, row, lengths))

    def _find_dense_order(self) -> TokenOrder:
        # An order is valid for every subset of its pattern, so either side's may be used. Closed orders
        # (a query's keys lie in its own class) leave out the most.
        left, right = self.left._find_dense_order(), self.right._find_dense_order()
        return max((left, right), key=lambda order: order.preference)

    def _split_union(self) -> tuple[Pattern, ...]:
        lefts, rights = self.left._split_union(), self.right._split_union()
        if len(lefts) == len(rights) == 1 or len(lefts) * len(rights) > MOST_ALTERNATIVES:
            return (self,)
        return tuple(And(left, right) for left in lefts for right in rights)

    def _split_intersection(self) -> tuple[Pattern, ...]:
        return (*self.left._split_intersection(), *self.right._split_intersection())

    def _find_key_intervals(self, lengths: Lengths) -> tuple[Array, Array] | None:
        left, right = self.left._find_key_intervals(lengths), self.right._find_key_intervals(lengths)
        if left is None or right is None:
            return None
        return np.maximum(left[0], right[0]), np.minimum(left[1], right[1])

    @property
    def _is_scattered(self) -> bool:
        return self.left._is_scattered or self.right._is_scattered

    @property
    def _hides_future(self) -> bool:
        return self.left._hides_future or self.right._hides_future

    @property
    def _shows_future(self) -> bool:
        return self.left._shows_future and self.right._shows_future

    @property
    def reach(self) -> int | None:
        return min((far for far in (self.left.reach, self.right.reach) if far is not None), default=None)

    @property
    def is_full(self) -> bool:
        return self.left.is_full and self.right.is_full

    @property
    def is_causal(self) -> bool:
        causal = self.left.is_causal, self.right.is_causal
        return any(causal) and (causal[0] or self.left.is_full) and (causal[1] or self.right.is_full)

    @property
    def sliding_window(self) -> int | None:
        simplified = self._simplify()
        return None if isinstance(simplified, And) else simplified.sliding_window

    @property
    def max_keys_per_query(self) -> int | None:
        bounds = (self.left.max_keys_per_query, self.right.max_keys_per_query)
        return min((bound for bound in bounds if bound is not None), default=None)

    def _simplify(self) -> Pattern:
        left, right = self.left._simplify(), self.right._simplify()
        for one, other in ((left, right), (right, left)):
            plain = one._intersect(other)
            if plain is not None:
                return plain
        return And(left, right)


@dataclass(frozen=True, repr=False)
class Or(_BinaryPattern):
    """Pairs that either pattern allows."""

    def __repr__(self) -> str:
        return f"{self.left!r} | {_parenthesize(self.right, (Or,))}"

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        return self.left._allows(i, j, row, lengths) | self.right._allows(i, j, row, lengths)

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        left = self.left._box_coverage(query, key, row, lengths)
        return np.maximum(left, self.right._box_coverage(query, key, row, lengths))

    def _find_dense_order(self) -> TokenOrder:
        left, right = self.left._find_dense_order(), self.right._find_dense_order()
        if left == right:
            return left
        sortings = [order for order in (left, right) if not order.closed]
        return max(sortings, key=lambda order: order.preference) if len(sortings) == 2 else NATURAL_ORDER

    def _split_union(self) -> tuple[Pattern, ...]:
        return (*self.left._split_union(), *self.right._split_union())

    def _find_key_intervals(self, lengths: Lengths) -> tuple[Array, Array] | None:
        left, right = self.left._find_key_intervals(lengths), self.right._find_key_intervals(lengths)
        # Two intervals are one if they overlap or touch; empty ones are not treated separately.
        if left is None or right is None or (np.maximum(left[0], right[0]) > np.minimum(left[1], right[1])).any():
            return None
        return np.minimum(left[0], right[0]), np.maximum(left[1], right[1])

    @property
    def _is_scattered(self) -> bool:
        return True

    @property
    def _hides_future(self) -> bool:
        return self.left._hides_future and self.right._hides_future

    @property
    def _shows_future(self) -> bool:
        return self.left._shows_future or self.right._shows_future

    @property
    def reach(self) -> int | None:
        left, right = self.left.reach, self.right.reach
        return None if left is None or right is None else max(left, right)

    @property
    def is_full(self) -> bool:
        return self.left.is_full or self.right.is_full

    @property
    def is_causal(self) -> bool:
        return self._hides_future and (self.left.is_causal or self.right.is_causal)

    def _pair_count_formulas(self, queries: Any, keys: Any, lengths: tuple[int, int] | None = None) -> Iterator[Any]:
        from regard.patterns.pair_counts import union

        return union(self.left, self.right, queries, keys, lengths)


@dataclass(frozen=True, repr=False)
class Not(Pattern):
    """Pairs that the pattern forbids."""

    pattern: Pattern

    def __repr__(self) -> str:
        return f"~{_parenthesize(self.pattern, (And, Or))}"

    def __invert__(self) -> Pattern:
        return self.pattern

    @property
    def rows(self) -> int | None:
        return self.pattern.rows

    @property
    def heads(self) -> int | None:
        return self.pattern.heads

    def _fold_heads(self, rows: int | None, heads: int) -> Pattern:
        return Not(self.pattern._fold_heads(rows, heads))

    def _check_lengths(self, lengths: Lengths) -> None:
        self.pattern._check_lengths(lengths)

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        return ~self.pattern._allows(i, j, row, lengths)

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        return (ALL - self.pattern._box_coverage(query, key, row, lengths)).astype(np.int8)

    @property
    def _is_opaque(self) -> bool:
        return self.pattern._is_opaque

    def _list_grids(self) -> frozenset[Grid]:
        return self.pattern._list_grids()

    @property
    def _needs_key_length(self) -> bool:
        return self.pattern._needs_key_length

    @property
    def _hides_future(self) -> bool:
        return self.pattern._shows_future

    @property
    def _shows_future(self) -> bool:
        return self.pattern._hides_future

    @property
    def _is_prefix_stable(self) -> bool:
        return self.pattern._is_prefix_stable

    @property
    def _supports_left_padding(self) -> bool:
        return self.pattern._supports_left_padding

    @property
    def is_key_padding(self) -> bool:
        return self.pattern.is_key_padding

    def is_shift_invariant(self, grid: Grid | None = None) -> bool:
        return self.pattern.is_shift_invariant(grid)

    @property
    def fixed_length(self) -> int | None:
        return self.pattern.fixed_length

    def _count_pairs(self, lengths: Lengths) -> int | None:
        inner = self.pattern._count_pairs(lengths)
        everything = lengths.queries * lengths.keys * (self.rows or 1) * (self.heads or 1)
        return None if inner is None else everything - inner

    def _pair_count_formulas(self, queries: Any, keys: Any, lengths: tuple[int, int] | None = None) -> Iterator[Any]:
        if self.rows is not None or self.heads is not None:
            return  # their forms add up rows and heads
        for form in self.pattern._simplify()._pair_count_formulas(queries, keys, lengths):
            yield form._replace(formula=queries * keys - form.formula)
