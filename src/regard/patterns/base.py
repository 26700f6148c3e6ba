"""What a pattern is, and the questions that it answers about itself."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from regard.caching import lru_cache_small, outside_modes
from regard.errors import PatternError
from regard.patterns.arguments import whole_number
from regard.patterns.box import ALL, NONE, SOME, Array, Box, Grid, Lengths
from regard.patterns.draw import Drawing
from regard.patterns.order import NATURAL, Order

if TYPE_CHECKING:
    import sympy

    from regard.patterns.pair_counts import Form


class Pattern(ABC):
    """Which pairs of a query and a key may interact: a set of pairs `(i, j)` of absolute positions.

    Patterns are values: equal when they were built from equal arguments, hashable, and printed as the expression that
    rebuilds them. They compose with `&`, `|` and `~`.

    A new pattern is a frozen dataclass with one method, `_allows(i, j, row, lengths)`: the definition, elementwise in
    torch. Everything else is a question that a pattern answers about itself. The defaults are right for any pattern, at
    worst slow or cautious; a pattern overrides those that it can answer better. No code outside `regard.patterns` asks
    for the type of a pattern.
    """

    @property
    def rows(self) -> int | None:
        """How many batch rows the pattern tells apart; `None` when all rows see the same pairs."""
        return None

    @property
    def heads(self) -> int | None:
        """How many heads the pattern tells apart; `None` when all heads see the same pairs."""
        return None

    @abstractmethod
    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        """The definition: whether the query at `i` may see the key at `j`, elementwise over tensors that broadcast.

        `row` is the batch row; for a pattern that tells heads apart it is `batch row * heads + head`.
        """

    def _check(self, lengths: Lengths) -> None:
        """Refuse lengths that the pattern does not fit."""
        return None

    # What planners ask

    def _relation(self, query: Box, key: Box, row: Array, lengths: Lengths) -> Array:
        """Of all pairs between two boxes of positions: are *none*, *some* or *all* allowed? *Some* is always right."""
        return np.full(query.first.shape, SOME)

    @property
    def _opaque(self) -> bool:
        """Whether `_relation` knows nothing, so that a planner has to look at the pairs themselves."""
        return type(self)._relation is Pattern._relation

    def _order(self) -> Order:
        """The order of the tokens in which the pattern is dense."""
        return NATURAL

    def _global(self, position: Array) -> Array:
        """Queries that see far more than their neighbours: in a shared tile they would drag the others along."""
        return np.zeros(position.shape, dtype=bool)

    def _alternatives(self) -> tuple[Pattern, ...]:
        """Patterns whose union this is, when each of them wants an order of its own."""
        return (self,)

    def _factors(self) -> tuple[Pattern, ...]:
        """Patterns whose intersection this is."""
        return (self,)

    def _grids(self) -> frozenset[Grid]:
        """The grids on which the pattern lays its tokens."""
        return frozenset()

    def _heads_as_rows(self, rows: int | None, heads: int) -> Pattern:
        """The same pairs for `rows * heads` batch rows, of which number `row * heads + head` is one head of one row."""
        from regard.patterns.heads import HeadRows

        return self if self.rows is None and self.heads is None else HeadRows(self, rows, heads)

    @property
    def _by_head(self) -> Pattern:
        """The pattern with its heads as batch rows; itself when it tells no heads apart."""
        return self if self.heads is None else self._heads_as_rows(self.rows, self.heads)

    # What decoding asks

    def _interval(self, lengths: Lengths) -> tuple[Array, Array] | None:
        """Start and stop of the keys that each query sees, `(row or 1, query)`, where a formula says so.

        They may lie outside of the keys, and start may exceed stop where nothing is seen.
        """
        return None

    @property
    def _is_scattered(self) -> bool:
        """Whether the keys of a query are seldom neighbours, so that looking for one interval is a waste."""
        return False

    @property
    def _needs_keys(self) -> bool:
        """Whether which pairs are allowed depends on how many keys there are."""
        return _reads_lengths(self)

    @property
    def has_past(self) -> bool:
        """Whether tokens can be decoded one by one from a KV cache with the result of the whole sequence.

        That is so when every query sees only keys at or before it, `allows(i, j)` implies `j <= i`, and when what it
        sees does not change as later tokens are appended: `allows(i, j)` does not depend on the number of keys. `True`
        is a promise, `False` may be cautious; `Causal() & pattern` settles the first half for any pattern.

        Appended tokens are real ones: the facts about a batch's rows grow with them. `Padding([3, 5], side="left")`,
        whose first real key stays where it is, counts as the same padding with `[4, 6]` after one more token, and so do
        `Segments` with one more id and a `Mask` with one more row and column. `Random` draws from all keys there are,
        so it has a past only when `tokens` fixes how many.

            >>> (Causal() & Axial((4, 6))).has_past, Window(4, 1).has_past, (Causal() & Random(2, 5)).has_past
            (True, False, False)
        """
        return self._hides_future and self._is_stable

    @property
    def _hides_future(self) -> bool:
        """Whether surely no pair with `j > i` is allowed."""
        return self.is_causal or self.sliding_window is not None

    @property
    def _shows_future(self) -> bool:
        """Whether surely every pair with `j > i` is allowed: the mirror image that `~` needs."""
        return self.is_full

    @property
    def _is_stable(self) -> bool:
        """Whether a pair, once allowed or not, stays so when tokens are appended."""
        return not self._needs_keys

    @property
    def reach(self) -> int | None:
        """How far back a query can see: no allowed pair has `i - j` larger than this; `None` when there is no limit.

        A rolling KV cache keeps `reach` keys before the query's own. An upper bound: the smaller one for `&`, the
        larger one for `|`, no limit for `~`. Keys after the query do not count.

            >>> (Causal() & Window(4, 9, step=3)).reach, (Causal() & Blocks(6)).reach, (Causal() & Strided(2)).reach
            (12, 5, None)
        """
        return None

    @property
    def _fits_padded_rows(self) -> bool:
        """Whether it is right for rows that begin later: it looks at distances, or is told about each row's columns."""
        return self.is_shift_invariant()

    # What backends and costs ask

    @property
    def is_full(self) -> bool:
        """Whether every pair is allowed; `False` may be cautious."""
        return False

    @property
    def is_causal(self) -> bool:
        """Whether exactly the pairs with `j <= i` are allowed; `False` may be cautious."""
        return False

    @property
    def sliding_window(self) -> int | None:
        """The `w` for which exactly the pairs with `0 <= i - j <= w` are allowed; `None` may be cautious."""
        return None

    @property
    def is_key_padding(self) -> bool:
        """Whether all queries of a batch row see the same keys, as with padding; `False` may be cautious."""
        return self.is_full

    def is_shift_invariant(self, grid: Grid | None = None) -> bool:
        """Whether only the distance counts: `allows(i, j)` equals `allows(i + n, j + n)` for every shift `n`.

        Then positions may be counted from anywhere, as they are in a row that is padded on the left and in a KV cache
        that has dropped its oldest keys. With `grid`, whether only the distances in rows and in columns count between
        the tokens of that grid. `False` may be cautious.

            >>> (Causal() & ~Strided(3)).is_shift_invariant(), (Causal() & Blocks(6)).is_shift_invariant()
            (True, False)
        """
        return self.is_full

    @property
    def fixed_length(self) -> int | None:
        """How many tokens a pattern is made for, if it is made for one number."""
        return None

    @property
    def max_keys_per_query(self) -> int | None:
        """How many keys one query sees at most, whatever the lengths; `None` when there is no limit."""
        return None

    @property
    def _running_sum_reads(self) -> int | None:
        """Additions for each query with which sums over its keys are read off running sums of all keys.

        Zero where the sets of keys are nested or disjoint, two for an interval; `None` where there is no such way.
        """
        return None

    def _pairs(self, lengths: Lengths) -> int | None:
        """The exact number of allowed pairs, where a formula says so; otherwise the plan is counted."""
        return None

    def _pair_forms(
        self, queries: sympy.Expr, keys: sympy.Expr, lengths: tuple[int, int] | None = None
    ) -> Iterator[Form]:
        """Closed forms of the number of pairs, with the conditions under which they hold; the plainest first."""
        return iter(())

    def _simplified(self) -> Pattern:
        """The same pairs by a plainer expression, where one is obvious."""
        return self

    def _intersection(self, other: Pattern) -> Pattern | None:
        """One plain pattern that allows what both allow, where that is obvious."""
        return other if self.is_full or self == other else None

    # What users call

    def allows(self, query_index: Tensor | int, key_index: Tensor | int, *, keys: int | None = None) -> Tensor:
        """Whether the query at absolute position `i` may see the key at `j`, elementwise over broadcast indices.

        A pattern that tells batch rows apart answers with a leading axis of `rows`, one that tells heads apart with
        leading axes `(rows or 1, heads)`. `keys` is the number of keys, which only a few patterns have to know.

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
        return self._evaluate(i, j, Lengths(keys - min(lowest, 0), keys))

    def matrix(self, queries: int, keys: int | None = None, *, device: torch.device | str = "cpu") -> Tensor:
        """The dense boolean mask `(query, key)`; `(row, query, key)` for a pattern that tells batch rows apart, and
        `(row or 1, head, query, key)` for one that tells heads apart.

        This is the square that backends avoid; it is for study, for tests and for the reference.
        """
        lengths = self.lengths(queries, keys)
        i = torch.arange(lengths.queries, device=device)[:, None] + lengths.offset
        return self._evaluate(i, torch.arange(lengths.keys, device=device), lengths)

    def _evaluate(self, i: Tensor, j: Tensor, lengths: Lengths) -> Tensor:
        """The definition at these positions, for every batch row and head that the pattern tells apart."""
        shape = torch.broadcast_shapes(i.shape, j.shape)
        pattern = self._by_head
        if pattern.rows is None:
            return pattern._allows(i, j, torch.zeros((), dtype=torch.long, device=i.device), lengths).expand(shape)
        row = torch.arange(pattern.rows, device=i.device).reshape(-1, *(1,) * len(shape))
        answer = pattern._allows(i, j, row, lengths).expand(pattern.rows, *shape)
        return answer if self.heads is None else answer.unflatten(0, (self.rows or 1, self.heads))

    def pairs(self, queries: int, keys: int | None = None) -> int:
        """The exact number of allowed pairs, summed over the batch rows and heads that the pattern tells apart.

        >>> Causal().pairs(1024)
        524800
        """
        from regard.planner import plan

        lengths = self.lengths(queries, keys)
        closed_form = self._pairs(lengths)
        return plan(self, *lengths).pairs if closed_form is None else closed_form

    def density(self, queries: int, keys: int | None = None) -> float:
        """The share of all pairs that is allowed."""
        lengths = self.lengths(queries, keys)
        whole = lengths.queries * lengths.keys * (self.rows or 1) * (self.heads or 1)
        return self.pairs(*lengths) / whole if whole else 0.0

    def draw(self, queries: int, keys: int | None = None) -> Drawing:
        """A picture of the pattern: text in a terminal, SVG in a notebook, `.save(path)` for a file."""
        mask = self.matrix(queries, keys)
        if mask.ndim == 2:
            return Drawing(mask, title=repr(self))
        caption = f"batch row 0 of {len(mask)}" if self.rows is not None else ""
        if self.heads is not None:
            caption, mask = f"{caption}, head 0 of {self.heads}".lstrip(", "), mask[0]
        return Drawing(mask[0], title=repr(self), caption=caption)

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

    def __bool__(self) -> bool:
        raise PatternError(
            "A pattern is neither true nor false.",
            asked=f"the truth of {self!r}, as `and`, `or`, `not` and `if` need it",
            because="Python's `a and b` would silently drop one of the two patterns",
            instead="a & b, a | b and ~a; `pattern is None` to test for a missing one",
        )

    def __and__(self, other: Pattern) -> Pattern:
        from regard.patterns.compose import And

        return And(self, other) if isinstance(other, Pattern) else NotImplemented

    def __or__(self, other: Pattern) -> Pattern:
        from regard.patterns.compose import Or

        return Or(self, other) if isinstance(other, Pattern) else NotImplemented

    def __invert__(self) -> Pattern:
        from regard.patterns.compose import Not

        return Not(self)


@lru_cache_small(maxsize=256)
def _reads_lengths(pattern: Pattern) -> bool:
    """Whether the definition looks at the lengths, found by a trial; also where it cannot be tried."""
    with outside_modes():
        position, no_lengths = torch.arange(4), object()
        try:
            pattern._allows(position[:, None], position, torch.zeros((), dtype=torch.long), no_lengths)  # type: ignore[arg-type]
        except Exception:  # a definition may be a user's: whatever it raises, the cautious answer is right
            return True
    return False


__all__ = ["ALL", "NONE", "SOME", "Array", "Box", "Lengths", "Pattern"]
