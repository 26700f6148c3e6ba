"""One size of a tensor as an expression in the symbols, recognised from its values in a few runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import sympy

LARGEST_DENOMINATOR = 64  # of the coefficient of a single product
FACTORS = (1, 2, 3, 4, -1)  # coefficients of sums
LARGEST_CONSTANT = 16  # beside a sum


def recognise_size(
    column: tuple[int, ...], variables: list[tuple[sympy.Expr, list[int]]], with_sums: bool = True
) -> sympy.Expr | None:
    """The expression that has these values at all points, or None. A sum is looked for unless `with_sums` is false.

    >>> from regard.cost_model.symbols import size_symbol
    >>> n, d = size_symbol("N"), size_symbol("D")
    >>> recognise_size((30, 154, 442), [(n, [5, 7, 13]), (d, [3, 11, 17])]), recognise_size((11, 15), [(n, [5, 7])])
    (2*D*N, 2*N + 1)
    >>> recognise_size((60, 90, 150), [(n, [2, 3, 5])])
    30*N
    """
    if (found := _recognise_product(column, variables)) is not None or not with_sums:
        return found
    for factor, rest in _list_quotients(column, variables):
        if (sums := _recognise_sum(list(rest), variables)) is not None:
            return factor * sums
    return None


def _list_quotients(
    column: tuple[int, ...], variables: list[tuple[sympy.Expr, list[int]]]
) -> Iterator[tuple[sympy.Expr, tuple[int, ...]]]:
    """Products of variables that divide the values at all points, and what is left; the largest products first."""
    for place, (expression, values) in enumerate(variables):
        if any(column) and _divides(values, column) and any(each != 1 for each in values):
            rest = tuple(value // each for value, each in zip(column, values, strict=True))
            for factor, left in _list_quotients(rest, variables[place:]):
                yield expression * factor, left
    yield sympy.Integer(1), column


def _recognise_product(column: tuple[int, ...], variables: list[tuple[sympy.Expr, list[int]]]) -> sympy.Expr | None:
    """A number times powers of the variables. A number such as 30 may itself be divisible by a variable everywhere."""
    quotients = _list_quotients(column, variables)
    return next((factor * rest[0] for factor, rest in quotients if all(each == rest[0] for each in rest)), None)


def recognise_rounded(
    column: tuple[int, ...],
    variables: list[tuple[sympy.Expr, list[int]]],
    roundings: list[list[tuple[sympy.Expr, list[int]]]],
) -> sympy.Expr | None:
    """A product of the variables and of at most one expression of each of several lists, or None.

    >>> from regard.cost_model.symbols import size_symbol
    >>> b, r = size_symbol("B"), size_symbol("R")
    >>> windows = [(r, [7, 8, 10]), (sympy.ceiling(r / 3), [3, 3, 4])]
    >>> recognise_rounded((18, 45, 84), [(b, [2, 5, 7])], [windows])
    3*B*ceiling(R/3)
    """
    fitting = [
        [(sympy.Integer(1), [1] * len(column)), *(each for each in some if _divides(each[1], column))]
        for some in roundings
    ]
    for several in sorted(itertools.product(*fitting), key=lambda each: sum(one[0] != 1 for one in each)):
        factors = [math.prod(each) for each in zip(*(values for _, values in several), strict=True)]
        if not _divides(factors, column):
            continue
        rest = tuple(value // factor for value, factor in zip(column, factors, strict=True))
        if (found := recognise_size(rest, variables, with_sums=False)) is not None:
            return sympy.Mul(found, *(expression for expression, _ in several))
    return None


def _divides(factors: Iterable[int], column: Iterable[int]) -> bool:
    return all(factor and value % factor == 0 for factor, value in zip(factors, column, strict=True))


def _recognise_sum(values: list[int], variables: list[tuple[sympy.Expr, list[int]]]) -> sympy.Expr | None:
    """A constant and one variable, or sums of two and three, or of products of two.

    Sums have small coefficients only: three equations and any coefficients would often be solved by chance.
    """
    rises = [value - values[0] for value in values[1:]]
    singles = [_Term(expression, at[0], [each - at[0] for each in at[1:]]) for expression, at in variables]
    for term in singles:
        if (found := _scale_term(term, values[0], rises, LARGEST_DENOMINATOR)) is not None:
            return found
    if len(values) < 4:
        return None
    products = [_Term(expression, at[0], [each - at[0] for each in at[1:]]) for expression, at in _products(variables)]
    if (found := _combine_terms(singles, (2, 3), values[0], rises)) is not None:
        return found
    for term in products:
        found = _scale_term(term, values[0], rises, LARGEST_DENOMINATOR**2)
        if found is not None and abs(found.as_coeff_Add()[0]) <= LARGEST_CONSTANT:
            return found
    if (found := _combine_terms([*singles, *products], (2,), values[0], rises)) is not None:
        return found
    for several in itertools.combinations([*singles, *products], 3):
        if sum(each.start for each in several) == values[0] and all(
            sum(each.rises[place] for each in several) == rise for place, rise in enumerate(rises)
        ):
            return sympy.Add(*(each.expression for each in several))
    return None


class _Term(NamedTuple):
    """An expression, its value at the first point, and by how much it is larger at the others."""

    expression: sympy.Expr
    start: int
    rises: list[int]


def _scale_term(term: _Term, start: int, rises: list[int], denominator: int) -> sympy.Expr | None:
    """`c0 + c1 m`: every rise is c1 times that of m, so that they are in the same proportion."""
    run, *others = term.rises
    if not run or any(rise * run != rises[0] * other for rise, other in zip(rises[1:], others, strict=True)):
        return None
    slope = Fraction(rises[0], run)
    if slope.denominator > denominator:
        return None
    return _rational(start - slope * term.start) + _rational(slope) * term.expression


def _combine_terms(terms: list[_Term], counts: tuple[int, ...], start: int, rises: list[int]) -> sympy.Expr | None:
    """The sum with the smallest constant and coefficients, if there is one."""
    every = [factors for count in counts for factors in itertools.product(FACTORS, repeat=count)]
    found: list[tuple[Any, ...]] = []
    for factors in every:
        for several in itertools.combinations(terms, len(factors)):
            if any(
                sum(c * each.rises[place] for c, each in zip(factors, several, strict=True)) != rise
                for place, rise in enumerate(rises)
            ):
                continue
            constant = start - sum(c * each.start for c, each in zip(factors, several, strict=True))
            if abs(constant) <= LARGEST_CONSTANT:
                found.append((abs(constant) + sum(map(abs, factors)), len(found), constant, factors, several))
    if not found:
        return None
    *_, constant, factors, several = min(found, key=lambda each: each[:2])
    return constant + sympy.Add(*(c * each.expression for c, each in zip(factors, several, strict=True)))


def _products(variables: list[tuple[sympy.Expr, list[int]]]) -> Iterable[tuple[sympy.Expr, list[int]]]:
    for (one, first), (other, second) in itertools.combinations(variables, 2):
        yield one * other, [a * b for a, b in zip(first, second, strict=True)]


def _rational(number: Fraction) -> sympy.Expr:
    return sympy.Rational(number.numerator, number.denominator)
