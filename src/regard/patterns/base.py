"""The interface of patterns: one definition, and properties with safe defaults that a pattern may sharpen."""

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
from regard.patterns.arguments import check_integer
from regard.patterns.box import ALL, NONE, SOME, Array, Grid, Lengths, TokenBox
from regard.patterns.drawing import Drawing
from regard.patterns.token_order import NATURAL_ORDER, TokenOrder

if TYPE_CHECKING:
    import sympy

    from regard.patterns.pair_counts import Form


class Pattern(ABC):
    """Which pairs of a query and a key may interact: a set of pairs `(i, j)` of absolute positions.

    Patterns are values: equal when they were built from equal arguments, hashable, and printed as the expression that
    rebuilds them. They compose with `&`, `|` and `~`.

    A new pattern is a frozen dataclass with one method, `_allows(i, j, row, lengths)`: the definition, elementwise in
    torch. All other methods have defaults that are correct for any pattern, at worst slow or conservative; a pattern
    overrides those it can compute better. No code outside `regard.patterns` tests the type of a pattern.
    """

    @property
    def rows(self) -> int | None:
        """Number of batch rows with a mask of their own; `None` when all rows share one mask."""
        return None

    @property
    def heads(self) -> int | None:
        """Number of heads with a mask of their own; `None` when all heads share one mask."""
        return None

    @abstractmethod
    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        """The definition: whether the query at `i` may see the key at `j`, elementwise over tensors that broadcast.

        `row` is the batch row; for a pattern that differs between heads it is `batch row * heads + head`.
        """

    def _check_lengths(self, lengths: Lengths) -> None:
        """Raise `PatternError` for lengths that the pattern does not fit."""
        return None

    # For the planner

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        """Whether *none*, *some* or *all* pairs of two boxes of positions are allowed; *some* is always correct."""
        return np.full(query.first.shape, SOME)

    @property
    def _is_opaque(self) -> bool:
        """Whether there is no `_box_coverage`, so that a planner has to evaluate the pairs themselves."""
        return type(self)._box_coverage is Pattern._box_coverage

    def _find_dense_order(self) -> TokenOrder:
        """The order of the tokens in which the pattern is dense."""
        return NATURAL_ORDER

    def _is_global(self, position: Array) -> Array:
        """Which queries see far more keys than their neighbours: sharing a tile, they would widen it for the others."""
        return np.zeros(position.shape, dtype=bool)

    def _split_union(self) -> tuple[Pattern, ...]:
        """Patterns whose union this is, where each of them is dense in an order of its own."""
        return (self,)

    def _split_intersection(self) -> tuple[Pattern, ...]:
        """Patterns whose intersection this is."""
        return (self,)

    def _list_grids(self) -> frozenset[Grid]:
        """The grids that the pattern places tokens on."""
        return frozenset()

    def _fold_heads(self, rows: int | None, heads: int) -> Pattern:
        """The same pairs for `rows * heads` batch rows, of which number `row * heads + head` is one head of one row."""
        from regard.patterns.folded_heads import FoldedHeads

        return self if self.rows is None and self.heads is None else FoldedHeads(self, rows, heads)

    @property
    def _with_folded_heads(self) -> Pattern:
        """The pattern with its heads as batch rows; itself when it is the same for all heads."""
        return self if self.heads is None else self._fold_heads(self.rows, self.heads)

    # For decoding

    def _find_key_intervals(self, lengths: Lengths) -> tuple[Array, Array] | None:
        """Start and stop of the keys that each query sees, `(row or 1, query)`, where a formula gives them.

        They may lie outside of the keys, and start may exceed stop where nothing is seen.
        """
        return None

    @property
    def _is_scattered(self) -> bool:
        """Whether the keys of a query are rarely contiguous, so that a search for one interval is not worthwhile."""
        return False

    @property
    def _needs_key_length(self) -> bool:
        """Whether which pairs are allowed depends on how many keys there are."""
        return _reads_lengths(self)

    @property
    def supports_kv_cache(self) -> bool:
        """Whether tokens can be decoded one by one from a KV cache with the result of the whole sequence.

        That is so when every query sees only keys at or before it, `allows(i, j)` implies `j <= i`, and when what it
        sees does not change as later tokens are appended: `allows(i, j)` does not depend on the number of keys. `True`
        is guaranteed, `False` may be conservative; `Causal() & pattern` fulfils the first condition for any pattern.

        Appended tokens are real ones, and per-row arguments grow with them: `Padding([3, 5], side="left")` becomes
        `[4, 6]` after one more token, `Segments` gets one more id and a `Mask` one more row and column. `Random` draws
        from all keys, so it supports a cache only when `tokens` fixes their number.

            >>> (Causal() & Axial((4, 6))).supports_kv_cache, Window(4, 1).supports_kv_cache
            (True, False)
        """
        return self._hides_future and self._is_prefix_stable

    @property
    def _hides_future(self) -> bool:
        """Whether no pair with `j > i` is allowed; `False` may be conservative."""
        return self.is_causal or self.sliding_window is not None

    @property
    def _shows_future(self) -> bool:
        """Whether every pair with `j > i` is allowed, which `~` needs; `False` may be conservative."""
        return self.is_full

    @property
    def _is_prefix_stable(self) -> bool:
        """Whether appending tokens never changes whether an existing pair is allowed."""
        return not self._needs_key_length

    @property
    def reach(self) -> int | None:
        """The largest look-back distance: no allowed pair has `i - j` larger than this; `None` when there is no limit.

        A rolling KV cache keeps `reach` keys before the query's own. An upper bound: the smaller one for `&`, the
        larger one for `|`, no limit for `~`. Keys after the query do not count.

            >>> (Causal() & Window(4, 9, step=3)).reach, (Causal() & Blocks(6)).reach, (Causal() & Strided(2)).reach
            (12, 5, None)
        """
        return None

    @property
    def _supports_left_padding(self) -> bool:
        """Whether rows that are padded on the left see the right keys: only distances count, or it is given per row."""
        return self.is_shift_invariant()

    # For backends and the cost model

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

        Zero where the sets of keys are nested or disjoint, two for an interval; `None` where running sums do not apply.
        """
        return None

    def _count_pairs(self, lengths: Lengths) -> int | None:
        """The exact number of allowed pairs, where a formula gives it; otherwise the plan is counted."""
        return None

    def _pair_count_formulas(
        self, queries: sympy.Expr, keys: sympy.Expr, lengths: tuple[int, int] | None = None
    ) -> Iterator[Form]:
        """Closed forms of the number of pairs, with the conditions under which they hold; the plainest first."""
        return iter(())

    def _simplify(self) -> Pattern:
        """An equal pattern with a simpler expression, where there is an obvious one."""
        return self

    def _intersect(self, other: Pattern) -> Pattern | None:
        """One simple pattern equal to `self & other`, where there is an obvious one."""
        return other if self.is_full or self == other else None

    # What users call

    def allows(self, query_index: Tensor | int, key_index: Tensor | int, *, keys: int | None = None) -> Tensor:
        """Whether the query at absolute position `i` may see the key at `j`, elementwise over broadcast indices.

        The result of a pattern that differs between batch rows has a leading axis of `rows`, that of one that differs
        between heads leading axes `(rows or 1, heads)`. `keys` is the number of keys, which a few patterns depend on.

            >>> Causal().allows(3, torch.arange(5)).tolist()
            [True, True, True, True, False]
        """
        i, j = torch.as_tensor(query_index), torch.as_tensor(key_index)
        if keys is None:
            if self._needs_key_length:
                raise PatternError(
                    f"{self!r} needs the number of keys.",
                    asked="allows(i, j)",
                    because="which pairs it allows depends on how many keys there are",
                    instead="allows(i, j, keys=...)",
                )
            keys = int(max(i.max(), j.max())) + 1 if i.numel() and j.numel() else 0
        lowest = int(i.min()) if i.numel() else 0
        return self._evaluate_pairs(i, j, Lengths(keys - min(lowest, 0), keys))

    def matrix(self, queries: int, keys: int | None = None, *, device: torch.device | str = "cpu") -> Tensor:
        """The dense boolean mask `(query, key)`; `(row, query, key)` for a pattern that differs between batch rows, and
        `(row or 1, head, query, key)` for one that differs between heads.

        Backends never build this matrix; it is for inspection, tests and the reference backend.
        """
        lengths = self.lengths(queries, keys)
        i = torch.arange(lengths.queries, device=device)[:, None] + lengths.offset
        return self._evaluate_pairs(i, torch.arange(lengths.keys, device=device), lengths)

    def _evaluate_pairs(self, i: Tensor, j: Tensor, lengths: Lengths) -> Tensor:
        """The definition at these positions, for every batch row and head that the pattern distinguishes."""
        shape = torch.broadcast_shapes(i.shape, j.shape)
        pattern = self._with_folded_heads
        if pattern.rows is None:
            return pattern._allows(i, j, torch.zeros((), dtype=torch.long, device=i.device), lengths).expand(shape)
        row = torch.arange(pattern.rows, device=i.device).reshape(-1, *(1,) * len(shape))
        allowed = pattern._allows(i, j, row, lengths).expand(pattern.rows, *shape)
        return allowed if self.heads is None else allowed.unflatten(0, (self.rows or 1, self.heads))

    def pairs(self, queries: int, keys: int | None = None) -> int:
        """The exact number of allowed pairs, summed over the batch rows and heads that the pattern distinguishes.

        >>> Causal().pairs(1024)
        524800
        """
        from regard.planner import plan

        lengths = self.lengths(queries, keys)
        closed_form = self._count_pairs(lengths)
        return plan(self, *lengths).pairs if closed_form is None else closed_form

    def density(self, queries: int, keys: int | None = None) -> float:
        """The fraction of all pairs that is allowed."""
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
        """The two lengths as a value; raises `PatternError` if the pattern does not fit them."""
        queries = check_integer("A sequence", "queries", queries)
        lengths = Lengths(queries, queries if keys is None else check_integer("A sequence", "keys", keys))
        if lengths.queries < 0 or lengths.keys < 0:
            raise PatternError(
                "A number of tokens is negative.",
                asked=f"{lengths.queries} queries and {lengths.keys} keys",
                because="a length is a whole number, zero or more",
                instead="pattern.matrix(queries, keys) with lengths of zero or more",
            )
        self._check_lengths(lengths)
        return lengths

    def __repr__(self) -> str:
        # The expression that rebuilds it: arguments without a default are positional, others keywords if they differ.
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
    """Whether the definition reads the lengths, found by a trial call; `True` where that raises."""
    with outside_modes():
        position, no_lengths = torch.arange(4), object()
        try:
            pattern._allows(position[:, None], position, torch.zeros((), dtype=torch.long), no_lengths)  # type: ignore[arg-type]
        except Exception:  # the definition may be a user's: whatever it raises, `True` is safe
            return True
    return False


__all__ = ["ALL", "NONE", "SOME", "Array", "Lengths", "Pattern", "TokenBox"]
