"""Closed forms of the number of pairs, for `Pattern._pair_count_formulas`.

A form comes with the conditions under which it holds: `257 N - 16512` counts a window of 128 keys on each side only if
there are as many tokens. There are `q` queries and `m` keys, the last query aligned with the last key. Forms on one
line are those of Prince, *Understanding Deep Learning*, figure 12.15; on a grid they are products of the forms for its
rows and its columns.

Patterns import this module inside their methods, since importing sympy takes longer than importing Regard.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy

from regard.patterns.grid import GridPattern
from regard.patterns.sequence import First, Window

if TYPE_CHECKING:
    from regard.patterns.base import Pattern

Lengths = tuple[int, int]

# The sides of a grid, as the letters of `regard.cost`.
SIDES = sympy.symbols("R W", positive=True, integer=True)


class Form(NamedTuple):
    """A number of pairs, and what has to be true for it."""

    formula: sympy.Expr
    when: tuple[Any, ...] = ()


def causal(q: sympy.Expr, m: sympy.Expr) -> Iterator[Form]:
    """Query number n from the end sees m - n keys."""
    yield Form(q * (2 * m - q + 1) / 2, (sympy.Ge(m, q),))
    yield Form(m * (m + 1) / 2, (sympy.Lt(m, q),))


def window(left: int, right: int, step: int, q: sympy.Expr, m: sympy.Expr) -> Iterator[Form]:
    """For each offset in the window, the queries that have a key there."""
    same = sympy.Eq(q, m)
    # To the right every offset loses one query a step; so does every one to the left if lengths are equal.
    after = Form(right * q - sympy.Rational(step * right * (right + 1), 2), (sympy.Ge(q, right * step),))
    before = Form((left + 1) * q - sympy.Rational(step * left * (left + 1), 2), (same, sympy.Ge(q, left * step)))
    cached = Form((left + 1) * q, (sympy.Ge(m - q, left * step),))
    # A window wider than the text is the triangle on that side.
    triangle = Form(q * (q - 1) / 2, (sympy.Le(q, right + 1), sympy.Eq(step, 1)))
    past = Form(q * (2 * m - q + 1) / 2, (sympy.Ge(m, q), sympy.Le(m, left + 1), sympy.Eq(step, 1)))
    for one in (before, cached, past):
        for other in (after, triangle) if right else (Form(sympy.Integer(0)),):
            yield Form(sympy.expand(one.formula + other.formula), (*one.when, *other.when))


def strided(step: int, q: sympy.Expr, m: sympy.Expr, lengths: Lengths | None) -> Iterator[Form]:
    """Classes of residues, `t` of which have one token more than the others: (N^2 + t (s - t)) / s pairs."""
    same = sympy.Eq(q, m)
    yield Form(q**2 / step, (same, sympy.Eq(sympy.Mod(q, step), 0)))
    if lengths is not None:
        rest = lengths[1] % step
        here = sympy.Eq(sympy.Mod(m, step), rest)
        yield Form((q**2 + rest * (step - rest)) / step, (same, here))
        yield Form((m + -lengths[1] % step) / step, (sympy.Eq(q, 1), here))
    yield Form(sympy.ceiling(m / step), (sympy.Eq(q, 1),))


def first(count: int, q: sympy.Expr, m: sympy.Expr) -> Iterator[Form]:
    yield Form(2 * count * q - count**2, (sympy.Eq(q, m), sympy.Ge(q, count)))
    yield Form(q * count, (sympy.Ge(m - q, count),))
    yield Form(q * m, (sympy.Le(m, count),))


def selected(indices: tuple[int, ...], q: sympy.Expr, m: sympy.Expr, lengths: Lengths | None) -> Iterator[Form]:
    """The number of selected tokens among the queries and keys follows from the lengths."""
    if lengths is not None:
        among_queries = sum(lengths[1] - lengths[0] <= index < lengths[1] for index in indices)
        among_keys = sum(index < lengths[1] for index in indices)
        yield Form(sympy.expand(q * m - (q - among_queries) * (m - among_keys)))


def blocks(size: int, q: sympy.Expr, m: sympy.Expr, lengths: Lengths | None) -> Iterator[Form]:
    yield Form(size * q, (sympy.Eq(q, m), sympy.Eq(sympy.Mod(q, size), 0)))
    if lengths is not None:
        rest = lengths[0] % size
        here = sympy.Eq(sympy.Mod(q, size), rest)
        yield Form(sympy.expand(size * (q - rest) + rest**2), (sympy.Eq(q, m), here))


def union(left: Pattern, right: Pattern, q: sympy.Expr, m: sympy.Expr, lengths: Lengths | None) -> Iterator[Form]:
    """Global tokens with a window, or with a grid that begins after them: what is not global counts for itself."""
    for one, other in ((left, right), (right, left)):
        if not isinstance(one, First):
            continue
        if isinstance(other, Window):
            inner = other._pair_count_formulas(q - one.count, m - one.count)
        elif isinstance(other, GridPattern) and other.start >= one.count:
            inner = other._pair_count_formulas(q, m, lengths)
        else:
            continue
        for form in inner:
            whole = 2 * one.count * q - one.count**2 + form.formula
            yield Form(sympy.expand(whole), (sympy.Eq(q, m), sympy.Gt(q, one.count), *form.when))


# Grids: as many pairs as along the rows, times as many as along the columns


def fills_grid(start: int, q: sympy.Expr, m: sympy.Expr) -> tuple[Any, ...]:
    """The conditions that queries and keys are all tokens of the grid and those before it."""
    return sympy.Eq(q, m), sympy.Eq(q, start + SIDES[0] * SIDES[1])


def axial(start: int, q: sympy.Expr, m: sympy.Expr) -> Iterator[Form]:
    yield Form(SIDES[0] * SIDES[1] * (SIDES[0] + SIDES[1] - 1), fills_grid(start, q, m))


def product(start: int, axes: tuple[list[Form], list[Form]], q: sympy.Expr, m: sympy.Expr) -> Iterator[Form]:
    """Pairs along the rows times pairs along the columns."""
    for rows, columns in itertools.product(*axes):
        yield Form(rows.formula * columns.formula, (*fills_grid(start, q, m), *rows.when, *columns.when))


def neighbors(side: sympy.Symbol, radius: int, step: int, edges: str) -> list[Form]:
    """Along one axis of a neighbourhood."""
    if edges == "shift":
        return [Form((2 * radius + 1) * side)]
    return [Form((2 * radius + 1) * side - step * radius * (radius + 1), (sympy.Ge(side, radius * step),))]


def windows(side: sympy.Symbol, window: int, shift: int) -> list[Form]:
    """Along one axis, cut into windows after the first `shift` tokens; the last window may be smaller."""
    rest = sympy.Mod(side - shift, window)
    whole = Form(window * (side - shift) + shift**2, (sympy.Eq(rest, 0), sympy.Ge(side, shift)))
    cut = Form(window**2 * sympy.floor((side - shift) / sympy.Integer(window)) + rest**2 + shift**2, whole.when[1:])
    return [whole, cut] if window > 1 else [Form(side)]


def residues(side: sympy.Symbol, step: int) -> list[Form]:
    """Along one axis, classes of residues; as `strided`."""
    rest = sympy.Mod(side, step)
    even = Form(side**2 / step, (sympy.Eq(rest, 0),))
    return [even, Form((side**2 + rest * (step - rest)) / step)] if step > 1 else [Form(side**2)]
