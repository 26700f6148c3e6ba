"""Where two costs are equal.

Formulas that are polynomials in the symbol are solved as such, so that an answer is a formula too: softmax and linear
attention meet at `N = d + 1`. Others have steps in them (logarithms rounded up, a text filled up to whole chunks) or
count pairs that have no formula: there a search among whole numbers finds the first at which the order has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import sympy

from regard.cost_model.quantity import Quantity
from regard.cost_model.symbols import MEANINGS, find_common_values, fix_differing, read_symbol, size_symbol
from regard.errors import CostError

if TYPE_CHECKING:
    from regard.cost_model.cost import Cost

FARTHEST = 1 << 40  # where a search in formulas ends
LONGEST = 1 << 14  # where one ends that has to lay out a pattern for every length it tries
READABLE = 40  # operations in a formula that people still read; a longer root is given as its number

# Numbers that were counted at one size: they say nothing about another.
_COUNTED = {size_symbol("P"), size_symbol("Z")}


def find_crossings(cost: Cost, name: str | sympy.Symbol, equals: Any, of: str) -> list[Quantity]:
    """Every positive value of a symbol at which a quantity of `cost` is that of another, or a number; smallest first.

    Values need not be whole: between 64 and 65 one is cheaper at 64 tokens, and the other at 65. A symbol that has no
    number stays in the answer.
    """
    symbol = read_symbol(name)
    mine, theirs = _find_quantity(cost, of), _find_quantity(equals, of)
    # The symbol itself is free on both sides, whatever it was there.
    values, others = _drop_symbol(mine.values, symbol), _drop_symbol(theirs.values, symbol)
    common = find_common_values(values, others)
    left, right = (
        fix_differing(mine.formula, values, common),
        fix_differing(theirs.formula, others, common),
    )
    difference = sympy.expand(left - right)
    if (difference.free_symbols & _COUNTED) and str(symbol) in ("N", "M"):
        return _search_recomputed(cost, equals, symbol, of)
    _check_difference(difference, symbol, left, right)
    if difference.is_rational_function(symbol):
        found = _find_roots(difference, symbol, common)
    else:
        found = [sympy.Integer(root) for root in _find_sign_changes(_make_sign(difference, symbol, common), FARTHEST)]
    roots = _sort_roots([Quantity(_simplify_root(root, common), common) for root in found])
    if _is_limited(cost) or _is_limited(equals):
        roots = [root for root in roots if _is_valid_root(root, cost, equals, symbol, of)]
    return roots


def _find_quantity(thing: Any, of: str) -> Quantity:
    from regard.cost_model.cost import QUANTITIES, Cost

    if isinstance(thing, Quantity):
        return thing
    if isinstance(thing, Cost):
        if of not in QUANTITIES:
            raise CostError(
                f"A cost has no quantity {of!r}.",
                asked=f"of={of!r}",
                because=f"there are {', '.join(QUANTITIES)}",
                instead='of="macs"',
            )
        return thing.quantity(of)
    if isinstance(thing, int | float | sympy.Expr) and not isinstance(thing, bool):
        return Quantity(sympy.nsimplify(thing) if isinstance(thing, float) else thing)
    raise CostError(
        "There is nothing to compare with.",
        asked=f"equals={thing!r}",
        because=f"a {type(thing).__name__} is no cost and no number",
        instead="another cost, one of its quantities, or a number",
    )


def _check_difference(difference: sympy.Expr, symbol: sympy.Symbol, left: sympy.Expr, right: sympy.Expr) -> None:
    if difference == 0:
        raise CostError(
            "Both cost the same everywhere.",
            asked=f"where {left} = {right}",
            because="the formulas are equal",
            instead="two that differ",
        )
    if symbol not in difference.free_symbols:
        rest = ", ".join(sorted(map(str, difference.free_symbols)))
        raise CostError(
            f"The difference does not depend on {symbol}.",
            asked=f"where {left} = {right}",
            because=f"{symbol} is in neither formula, or falls out",
            instead=f"one of {rest}" if rest else "costs with symbols; these two are numbers",
        )


def _drop_symbol(values: Any, symbol: sympy.Symbol) -> Any:
    return {each: number for each, number in values.items() if each != symbol}


# Algebra


def _find_roots(difference: sympy.Expr, symbol: sympy.Symbol, values: Any) -> list[sympy.Expr]:
    """Positive roots, factor by factor: as formulas up to squares, beyond them as numbers."""
    # Sizes are whole, and sympy would drop a root that is not: here the symbol may be any number.
    numerator = sympy.numer(sympy.together(difference)).subs(symbol, any_number := sympy.Dummy(str(symbol)))
    found: list[sympy.Expr] = []
    for factor, _ in sympy.factor_list(numerator)[1]:
        if any_number not in factor.free_symbols:
            continue
        polynomial = sympy.Poly(factor, any_number)
        if polynomial.degree() <= 2:
            found += sympy.solve(factor, any_number)
        else:
            roots: Any = sympy.Poly(_substitute_others(factor, any_number, values), any_number).real_roots()
            found += [root if root.is_rational else root.evalf(15) for root in roots]
    return [root for root in dict.fromkeys(found) if _is_positive(root, values)]


def _is_positive(root: sympy.Expr, values: Any) -> bool:
    """Whether a root is a size: positive for certain, or not known to be otherwise."""
    number = root.subs(values)
    if number.is_number:
        return bool(number.is_real) and bool(number > 0)
    return number.is_real is not False and number.is_positive is not False


def _simplify_root(root: sympy.Expr, values: Any) -> sympy.Expr:
    if sympy.count_ops(root) <= READABLE:
        return sympy.simplify(root)
    number = root.subs(values)
    return sympy.nsimplify(number) if number.is_rational else number.evalf(15) if number.is_number else root


def _sort_roots(roots: list[Quantity]) -> list[Quantity]:
    """Smallest first; those without a number last, as they came."""

    def place(root: Quantity) -> tuple[bool, float]:
        number = _find_number(root)
        return (False, float(number)) if number.is_number else (True, 0.0)

    return sorted(roots, key=place)


def _find_number(root: Quantity) -> Any:
    values: Any = root.values
    return root.formula.subs(values)


def _substitute_others(formula: sympy.Expr, symbol: sympy.Symbol, values: Any) -> sympy.Expr:
    """A formula in one symbol alone."""
    known = formula.subs(_drop_symbol(values, symbol))
    if missing := known.free_symbols - {symbol}:
        names = ", ".join(sorted(map(str, missing)))
        raise CostError(
            "No algebra solves this, and there is no number to search with.",
            asked=f"where {formula} = 0",
            because=f"nothing says how large {names} is",
            instead="the sizes as keywords of cost(...)",
        )
    return known


# Search


def _make_sign(difference: sympy.Expr, symbol: sympy.Symbol, values: Any) -> Callable[[int], int]:
    known = _substitute_others(difference, symbol, values)
    return lambda number: _sign(known.xreplace({symbol: sympy.Integer(number)}))


def _sign(number: Any) -> int:
    return int(sympy.sign(number))


def _find_sign_changes(sign: Callable[[int], int], farthest: int, points: int = 8) -> Iterator[int]:
    """The first whole number of every stretch in which another one costs less, or both cost the same."""
    last, before = 1, sign(1)
    if before == 0:
        yield 1
    for number in _list_search_points(farthest, points):
        here = sign(number)
        if here == before:
            continue
        low, high = last, number
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sign(middle) == before else (low, middle)
        if before != 0:  # where equality ends, the order is known already
            yield high
        # Equal for one number, or for a stretch that ended on the way here.
        before, last = here, number


def _list_search_points(farthest: int, points: int) -> Iterator[int]:
    """Every number up to eight times as many as are tried in each doubling after that."""
    base = 8 * points
    yield from range(2, base + 1)
    while base < farthest:
        yield from (base + base * part // points for part in range(1, points + 1))
        base *= 2


def _search_recomputed(cost: Any, equals: Any, symbol: sympy.Symbol, of: str) -> list[Quantity]:
    """Pairs without a formula: both sides are computed anew at every length, which is why the search is short."""
    if not all(
        _is_recomputable(each) or not (_find_quantity(each, of).formula.free_symbols & _COUNTED)
        for each in (cost, equals)
    ):
        raise CostError(
            f"Pairs were counted for one number of {MEANINGS[str(symbol)][0]} only.",
            asked=f"for which {symbol} two costs are equal",
            because="the pattern has no formula, and this cost cannot be computed again at other sizes",
            instead="the costs as cost(...) returned them",
        )

    def sign(number: int) -> int:
        return _sign(_evaluate_at(cost, symbol, number, of) - _evaluate_at(equals, symbol, number, of))

    return [Quantity(root) for root in _find_sign_changes(sign, LONGEST, points=2)]


def _is_recomputable(thing: Any) -> bool:
    return getattr(thing, "_recompute", None) is not None


def _evaluate_at(thing: Any, symbol: sympy.Symbol, number: int, of: str) -> Any:
    """A quantity at another size."""
    if _is_recomputable(thing):
        return thing.at(**{MEANINGS[str(symbol)][0]: number}).quantity(of).value
    quantity = _find_quantity(thing, of)
    return quantity.at({symbol: number}).value


def _is_limited(thing: Any) -> bool:
    """Whether a formula holds for some sizes only, and can be computed at others."""
    return _is_recomputable(thing) and any(" holds for " in note for note in thing.notes)


def _is_valid_root(root: Quantity, cost: Any, equals: Any, symbol: sympy.Symbol, of: str) -> bool:
    """Whether a root lies where the formulas hold: computed on both sides of it, the order changes."""
    number = _find_number(root)
    if not number.is_number or str(symbol) not in MEANINGS:
        return True
    low, high = int(sympy.floor(number)), int(sympy.ceiling(number))
    signs = {
        _sign(_evaluate_at(cost, symbol, each, of) - _evaluate_at(equals, symbol, each, of))
        for each in {max(low, 1), high}
    }
    return 0 in signs or len(signs) > 1
