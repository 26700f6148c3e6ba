"""What a pattern is, and how patterns compose."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.errors import PatternError
from regard.patterns.arguments import whole_number
from regard.patterns.box import ALL, NONE, SOME, Array, Box, Lengths
from regard.patterns.draw import Drawing
from regard.patterns.order import NATURAL, Order

MOST_ALTERNATIVES = 16  # parts that an `&` of unions may fall apart into; beyond that it stays one part


class Pattern(ABC):
    """Which pairs of a query and a key may interact: a set of pairs `(i, j)` of absolute positions.

    Patterns are values: equal when they were built from equal arguments, hashable, and printed as the expression that
    rebuilds them. They compose with `&`, `|` and `~`.

    A new pattern is a frozen dataclass in a file of its own with

    - `_allows(i, j, row, lengths)`: the definition, elementwise in torch;
    - `_relation(query, key, row, lengths)`: *none*, *some* or *all* of the pairs between two boxes of positions.
      A cautious answer is right but slow; the default answers *some* to everything;
    - `_pairs(lengths)` when the number of pairs has a closed form;
    - `_order()` when sorting the tokens makes the pattern dense;
    - `_check(lengths)` when it does not fit every length.
    """

    @property
    def rows(self) -> int | None:
        """How many batch rows the pattern tells apart; `None` when all rows see the same pairs."""
        return None

    # What a pattern defines

    @abstractmethod
    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor: ...

    def _relation(self, query: Box, key: Box, row: Array, lengths: Lengths) -> Array:
        return np.full(query.first.shape, SOME)

    def _pairs(self, lengths: Lengths) -> int | None:
        return None

    def _order(self) -> Order:
        return NATURAL

    def _global(self, position: Array) -> Array:
        """Queries that see far more than their neighbours: in a shared tile they would drag the others along."""
        return np.zeros(position.shape, dtype=bool)

    def _alternatives(self) -> tuple[Pattern, ...]:
        """Patterns whose union this is, when each of them wants an order of its own."""
        return (self,)

    def _check(self, lengths: Lengths) -> None:
        return None

    @property
    def _opaque(self) -> bool:
        """Whether `_relation` knows nothing, so that a planner has to look at the pairs themselves."""
        return False

    @property
    def _needs_keys(self) -> bool:
        """Whether `allows` cannot answer without knowing how many keys there are."""
        return False

    # What everybody uses

    def allows(self, query_index: Tensor | int, key_index: Tensor | int, *, keys: int | None = None) -> Tensor:
        """Whether the query at absolute position `i` may see the key at `j`, elementwise over broadcast indices.

        A pattern that tells batch rows apart answers with a leading axis of `rows`. `keys` is the number of keys, which
        only `Random` and left `Padding` have to know.

            >>> Causal().allows(3, torch.arange(5)).tolist()
            [True, True, True, True, False]
        """
        i, j = torch.as_tensor(query_index), torch.as_tensor(key_index)
        if keys is None:
            if self._needs_keys:
                raise PatternError(
                    f"{self!r} cannot answer without the number of keys.",
                    asked="allows(i, j)",
                    because="which pairs it allows depends on how many keys there are",
                    instead="allows(i, j, keys=...)",
                )
            keys = int(max(i.max(), j.max())) + 1 if i.numel() and j.numel() else 0
        lowest = int(i.min()) if i.numel() else 0
        lengths = Lengths(keys - min(lowest, 0), keys)
        shape = torch.broadcast_shapes(i.shape, j.shape)
        if self.rows is None:
            return self._allows(i, j, torch.zeros((), dtype=torch.long), lengths).expand(shape)
        row = torch.arange(self.rows).reshape(-1, *(1,) * len(shape))
        return self._allows(i, j, row, lengths).expand(self.rows, *shape)

    def matrix(self, queries: int, keys: int | None = None, *, device: torch.device | str = "cpu") -> Tensor:
        """The dense boolean mask `(query, key)`, or `(row, query, key)` for a pattern that tells rows apart.

        This is the square that backends avoid; it is for study, for tests and for the reference.
        """
        lengths = self.lengths(queries, keys)
        i = torch.arange(lengths.queries, device=device)[:, None] + lengths.offset
        j = torch.arange(lengths.keys, device=device)
        shape = (lengths.queries, lengths.keys)
        if self.rows is None:
            return self._allows(i, j, torch.zeros((), dtype=torch.long, device=device), lengths).expand(shape)
        row = torch.arange(self.rows, device=device)[:, None, None]
        return self._allows(i, j, row, lengths).expand(self.rows, *shape)

    def pairs(self, queries: int, keys: int | None = None) -> int:
        """The exact number of allowed pairs, summed over batch rows where the pattern tells them apart.

        >>> Causal().pairs(1024)
        524800
        """
        from regard.plan import plan

        lengths = self.lengths(queries, keys)
        closed_form = self._pairs(lengths)
        return plan(self, *lengths).pairs if closed_form is None else closed_form

    def density(self, queries: int, keys: int | None = None) -> float:
        """The share of all pairs that is allowed."""
        lengths = self.lengths(queries, keys)
        whole = lengths.queries * lengths.keys * (self.rows or 1)
        return self.pairs(*lengths) / whole if whole else 0.0

    def draw(self, queries: int, keys: int | None = None) -> Drawing:
        """A picture of the pattern: text in a terminal, SVG in a notebook, `.save(path)` for a file."""
        mask = self.matrix(queries, keys)
        if mask.ndim == 2:
            return Drawing(mask, title=repr(self))
        return Drawing(mask[0], title=repr(self), caption=f"batch row 0 of {len(mask)}")

    def lengths(self, queries: int, keys: int | None = None) -> Lengths:
        """The lengths as a value, refused when this pattern does not fit them."""
        queries = whole_number("A sequence", "queries", queries)
        lengths = Lengths(queries, queries if keys is None else whole_number("A sequence", "keys", keys))
        if lengths.queries < 0 or lengths.keys < 0:
            raise PatternError(
                "A number of tokens is negative.",
                asked=f"{lengths.queries} queries and {lengths.keys} keys",
                because="a length is a whole number, zero or more",
                instead="pattern.matrix(queries, keys) with lengths of zero or more",
            )
        self._check(lengths)
        return lengths

    def __repr__(self) -> str:
        # The expression that rebuilds it: arguments without a default by place, the others by name when they differ.
        parts = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, tuple) and field.name != "grid" and value[0] == value[1]:
                value = value[0]  # one number stands for both axes
            if field.default is dataclasses.MISSING:
                parts.append(repr(value))
            elif value != field.default:
                parts.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def __and__(self, other: Pattern) -> Pattern:
        return And(self, other) if isinstance(other, Pattern) else NotImplemented

    def __or__(self, other: Pattern) -> Pattern:
        return Or(self, other) if isinstance(other, Pattern) else NotImplemented

    def __invert__(self) -> Pattern:
        return self.pattern if isinstance(self, Not) else Not(self)


def _common_rows(left: Pattern, right: Pattern, sign: str) -> int | None:
    if left.rows is not None and right.rows is not None and left.rows != right.rows:
        raise PatternError(
            "Two patterns disagree about the batch.",
            asked=f"{left!r} {sign} {right!r}",
            found=f"{left.rows} batch rows on the left, {right.rows} on the right",
            because="every batch row needs one answer from each of them",
            instead="patterns built for the same number of batch rows",
        )
    return left.rows if right.rows is None else right.rows


def _wrap(pattern: Pattern, loose: tuple[type, ...]) -> str:
    return f"({pattern!r})" if isinstance(pattern, loose) else repr(pattern)


@dataclass(frozen=True, repr=False)
class _Pair(Pattern):
    left: Pattern
    right: Pattern

    def __post_init__(self) -> None:
        _common_rows(self.left, self.right, "and" if isinstance(self, And) else "or")

    @property
    def rows(self) -> int | None:
        return self.left.rows if self.right.rows is None else self.right.rows

    @property
    def _opaque(self) -> bool:
        return self.left._opaque or self.right._opaque

    @property
    def _needs_keys(self) -> bool:
        return self.left._needs_keys or self.right._needs_keys

    def _check(self, lengths: Lengths) -> None:
        self.left._check(lengths)
        self.right._check(lengths)

    def _global(self, position: Array) -> Array:
        return self.left._global(position) | self.right._global(position)


@dataclass(frozen=True, repr=False)
class And(_Pair):
    """Pairs that both patterns allow."""

    def __repr__(self) -> str:
        return f"{_wrap(self.left, (Or,))} & {_wrap(self.right, (Or, And))}"

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        return self.left._allows(i, j, row, lengths) & self.right._allows(i, j, row, lengths)

    def _relation(self, query: Box, key: Box, row: Array, lengths: Lengths) -> Array:
        left = self.left._relation(query, key, row, lengths)
        return np.minimum(left, self.right._relation(query, key, row, lengths))

    def _order(self) -> Order:
        # An order is sound for every subset of the pattern that asked for it, so either side's will do. Closed orders
        # (a query's keys lie in its own class) leave out the most.
        left, right = self.left._order(), self.right._order()
        return max((left, right), key=lambda order: order.preference)

    def _alternatives(self) -> tuple[Pattern, ...]:
        lefts, rights = self.left._alternatives(), self.right._alternatives()
        if len(lefts) == len(rights) == 1 or len(lefts) * len(rights) > MOST_ALTERNATIVES:
            return (self,)
        return tuple(And(left, right) for left in lefts for right in rights)


@dataclass(frozen=True, repr=False)
class Or(_Pair):
    """Pairs that either pattern allows."""

    def __repr__(self) -> str:
        return f"{self.left!r} | {_wrap(self.right, (Or,))}"

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        return self.left._allows(i, j, row, lengths) | self.right._allows(i, j, row, lengths)

    def _relation(self, query: Box, key: Box, row: Array, lengths: Lengths) -> Array:
        left = self.left._relation(query, key, row, lengths)
        return np.maximum(left, self.right._relation(query, key, row, lengths))

    def _order(self) -> Order:
        left, right = self.left._order(), self.right._order()
        if left == right:
            return left
        sortings = [order for order in (left, right) if not order.closed]
        return max(sortings, key=lambda order: order.preference) if len(sortings) == 2 else NATURAL

    def _alternatives(self) -> tuple[Pattern, ...]:
        return (*self.left._alternatives(), *self.right._alternatives())


@dataclass(frozen=True, repr=False)
class Not(Pattern):
    """Pairs that the pattern forbids."""

    pattern: Pattern

    def __repr__(self) -> str:
        return f"~{_wrap(self.pattern, (And, Or))}"

    @property
    def rows(self) -> int | None:
        return self.pattern.rows

    @property
    def _opaque(self) -> bool:
        return self.pattern._opaque

    @property
    def _needs_keys(self) -> bool:
        return self.pattern._needs_keys

    def _check(self, lengths: Lengths) -> None:
        self.pattern._check(lengths)

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        return ~self.pattern._allows(i, j, row, lengths)

    def _relation(self, query: Box, key: Box, row: Array, lengths: Lengths) -> Array:
        return (ALL - self.pattern._relation(query, key, row, lengths)).astype(np.int8)

    def _pairs(self, lengths: Lengths) -> int | None:
        inner = self.pattern._pairs(lengths)
        return None if inner is None else lengths.queries * lengths.keys * (self.rows or 1) - inner


__all__ = ["ALL", "NONE", "SOME", "And", "Array", "Box", "Lengths", "Not", "Or", "Pattern"]
