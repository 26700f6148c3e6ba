"""How many pairs of tokens a pattern lets meet, exactly, as a formula wherever one is honest.

A closed form comes with the conditions under which it holds: `257 N - 16512` counts a window of 128 keys on each side
only if there are as many tokens. At sizes that are known the conditions are looked at, and the result is compared with
the number that the pattern itself counts; where no form fits, the letter P stands for that number. At sizes that are
not known the first form is given. The conditions go into a remark.

Forms on one line are those of Prince, *Understanding Deep Learning*, figure 12.15; on a grid they are products of the
forms for its rows and its columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import sympy

from regard.cost.letters import letter
from regard.patterns import (
    And,
    Axial,
    Blocks,
    Causal,
    First,
    Full,
    GridStride,
    GridWindow,
    Neighborhood,
    Not,
    Or,
    Padding,
    Pattern,
    Segments,
    Selected,
    Strided,
    Window,
)
from regard.patterns.grid import GridPattern

Lengths = tuple[int, int]


class Form(NamedTuple):
    """A number of pairs, and what has to be true for it."""

    formula: sympy.Expr
    when: tuple[Any, ...] = ()


class Pairs(NamedTuple):
    """Pairs of one head over all rows of the batch; numbers of letters that only they use; remarks."""

    formula: sympy.Expr
    values: dict[sympy.Symbol, int]
    notes: tuple[str, ...] = ()


def pairs_of(
    pattern: Pattern, batch: sympy.Expr, queries: sympy.Expr, keys: sympy.Expr, lengths: Lengths | None, values: Any
) -> Pairs:
    """The pairs of a pattern between `queries` and `keys`, which are `lengths` if those are known.

    values: the numbers of the letters in `queries` and `keys`.
    """
    pattern = simplified(pattern)
    grid = _grid_values(pattern)
    if pattern.rows is not None:
        return _over_rows(pattern, queries, lengths)
    # Replaced and not substituted: sympy's subs looks at much more, and layers ask for pairs again and again.
    known = {symbol: sympy.Integer(number) for symbol, number in ({**values, **grid} if lengths else grid).items()}
    exact = None if lengths is None else pattern.pairs(*lengths)
    found = list(forms(pattern, queries, keys, lengths))
    if lengths is None:  # forms for lengths that happen to be equal come last, unless they are equal for certain
        found.sort(key=lambda form: any(isinstance(each, sympy.Eq) and queries in each.args for each in form.when))
    for form in found:
        left = [condition for condition in (_settle(each, known) for each in form.when) if condition is not sympy.true]
        if sympy.false in left or (exact is not None and left):
            continue
        if exact is not None and form.formula.xreplace(known) != exact:
            continue
        used = {symbol: number for symbol, number in grid.items() if symbol in form.formula.free_symbols}
        return Pairs(batch * form.formula, used, _range(form, bool(grid)))
    symbol = letter("P")
    if lengths is None or exact is None:
        return Pairs(batch * symbol, {}, (f"pairs: {pattern!r} has no formula; P needs the number of tokens",))
    remark = f"pairs: {pattern!r} has no formula here; P = {exact:,} was counted at {lengths[0]:,} x {lengths[1]:,}"
    return Pairs(batch * symbol, {symbol: exact}, (remark,))


def _over_rows(pattern: Pattern, queries: sympy.Expr, lengths: Lengths | None) -> Pairs:
    """Rows that see different pairs are added up, each exactly; their sum stays a number."""
    if isinstance(pattern, Padding):
        return Pairs(sum(pattern.counts) * queries, {}, ("pairs: the real tokens of all rows are one number",))
    if lengths is None:
        symbol = letter("P")
        return Pairs(letter("B") * symbol, {}, ("pairs: rows see different pairs; P needs the number of tokens",))
    return Pairs(
        sympy.Integer(pattern.pairs(*lengths)), {}, ("pairs: rows see different pairs; their sum stays a number",)
    )


def _range(form: Form, on_grid: bool) -> tuple[str, ...]:
    """For which sizes a form holds, in words; that a grid has as many tokens as cells goes without saying."""
    left = dict.fromkeys(each for each in form.when if sympy.sympify(each) is not sympy.true)
    words = [_words(each) for each in left if not (on_grid and isinstance(each, sympy.Eq))]
    return (f"pairs: {form.formula} holds for {' and '.join(words)}",) if words else ()


def _words(condition: Any) -> str:
    if isinstance(condition, sympy.Eq):
        left, right = condition.args
        if isinstance(left, sympy.Mod):
            return f"{left.args[0]} mod {left.args[1]} = {right}"
        return f"{left} = {right}"
    return str(condition)


def _settle(condition: Any, values: Any) -> Any:
    return sympy.sympify(condition).xreplace(values)


def simplified(pattern: Pattern) -> Pattern:
    """The same pairs by a plainer expression, where one is obvious."""
    if not isinstance(pattern, And):
        return pattern
    left, right = simplified(pattern.left), simplified(pattern.right)
    if isinstance(left, Full) or left == right:
        return right
    if isinstance(right, Full):
        return left
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Causal) and isinstance(other, Window):
            return Window(other.left, 0, other.step)
    if isinstance(left, Window) and isinstance(right, Window) and left.step == right.step:
        return Window(min(left.left, right.left), min(left.right, right.right), left.step)
    return And(left, right)


def natural_tokens(pattern: Pattern | None) -> int | None:
    """How many tokens a pattern is made for, if it fits no other number."""
    if isinstance(pattern, GridPattern):
        return pattern.start + pattern.grid[0] * pattern.grid[1]
    if isinstance(pattern, Segments):
        return pattern.ids.shape[1]
    if isinstance(pattern, And | Or):
        return natural_tokens(pattern.left) or natural_tokens(pattern.right)
    return natural_tokens(pattern.pattern) if isinstance(pattern, Not) else None


def longest_row(pattern: Pattern, keys: sympy.Expr, values: Any) -> sympy.Expr:
    """How many keys one query sees at most: as far as the pattern's structure says, or all there are."""
    found = _bound(simplified(pattern))
    if found is None:
        return keys
    number = keys.subs(values)
    return keys if number.is_number and number <= found else sympy.Integer(found)


def _bound(pattern: Pattern) -> int | None:
    if isinstance(pattern, Window):
        return pattern.left + pattern.right + 1
    if isinstance(pattern, Blocks):
        return pattern.size
    if isinstance(pattern, Neighborhood):
        return (2 * pattern.radii[0] + 1) * (2 * pattern.radii[1] + 1)
    if isinstance(pattern, GridWindow):
        height, width, *_ = pattern._sides
        return height * width
    if isinstance(pattern, GridStride):
        rows, columns = (-(-size // step) for size, step in zip(pattern.grid, pattern.steps, strict=True))
        return rows * columns
    if isinstance(pattern, Axial):
        return sum(pattern.grid) - 1
    if isinstance(pattern, And):
        bounds = [bound for bound in (_bound(pattern.left), _bound(pattern.right)) if bound is not None]
        return min(bounds, default=None)
    return None


# Forms


def forms(pattern: Pattern, q: sympy.Expr, m: sympy.Expr, lengths: Lengths | None = None) -> Iterator[Form]:
    """Closed forms of a pattern for q queries, the last of which sits on the last of m keys; the plainest first."""
    if isinstance(pattern, Full):
        yield Form(q * m)
    elif isinstance(pattern, Causal):
        yield from _causal(q, m)
    elif isinstance(pattern, Window):
        yield from _window(pattern, q, m)
    elif isinstance(pattern, Strided):
        yield from _strided(pattern.step, q, m, lengths)
    elif isinstance(pattern, First):
        yield from _first(pattern.count, q, m)
    elif isinstance(pattern, Selected) and lengths is not None:
        asked = sum(lengths[1] - lengths[0] <= index < lengths[1] for index in pattern.indices)
        seen = sum(index < lengths[1] for index in pattern.indices)
        yield Form(sympy.expand(q * m - (q - asked) * (m - seen)))
    elif isinstance(pattern, Blocks):
        yield Form(pattern.size * q, (sympy.Eq(q, m), sympy.Eq(sympy.Mod(q, pattern.size), 0)))
        if lengths is not None:
            rest = lengths[0] % pattern.size
            here = sympy.Eq(sympy.Mod(q, pattern.size), rest)
            yield Form(sympy.expand(pattern.size * (q - rest) + rest**2), (sympy.Eq(q, m), here))
    elif isinstance(pattern, GridPattern):
        yield from _grid(pattern, q, m)
    elif isinstance(pattern, Not):
        for form in forms(simplified(pattern.pattern), q, m, lengths):
            yield Form(q * m - form.formula, form.when)
    elif isinstance(pattern, Or):
        yield from _either(pattern, q, m, lengths)


def _causal(q: sympy.Expr, m: sympy.Expr) -> Iterator[Form]:
    """Query number n from the end sees m - n keys."""
    yield Form(q * (2 * m - q + 1) / 2, (sympy.Ge(m, q),))
    yield Form(m * (m + 1) / 2, (sympy.Lt(m, q),))


def _window(window: Window, q: sympy.Expr, m: sympy.Expr) -> Iterator[Form]:
    """For each offset in the window, the queries that have a key there."""
    left, right, step = window.left, window.right, window.step
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


def _strided(step: int, q: sympy.Expr, m: sympy.Expr, lengths: Lengths | None) -> Iterator[Form]:
    """Classes of residues, `t` of which have one token more than the others: (N^2 + t (s - t)) / s pairs."""
    same = sympy.Eq(q, m)
    yield Form(q**2 / step, (same, sympy.Eq(sympy.Mod(q, step), 0)))
    if lengths is not None:
        rest = lengths[1] % step
        here = sympy.Eq(sympy.Mod(m, step), rest)
        yield Form((q**2 + rest * (step - rest)) / step, (same, here))
        yield Form((m + -lengths[1] % step) / step, (sympy.Eq(q, 1), here))
    yield Form(sympy.ceiling(m / step), (sympy.Eq(q, 1),))


def _first(count: int, q: sympy.Expr, m: sympy.Expr) -> Iterator[Form]:
    yield Form(2 * count * q - count**2, (sympy.Eq(q, m), sympy.Ge(q, count)))
    yield Form(q * count, (sympy.Ge(m - q, count),))
    yield Form(q * m, (sympy.Le(m, count),))


def _either(pattern: Or, q: sympy.Expr, m: sympy.Expr, lengths: Lengths | None) -> Iterator[Form]:
    """Global tokens with a window, or with a grid that begins after them: what is not global counts for itself."""
    for one, other in ((pattern.left, pattern.right), (pattern.right, pattern.left)):
        if not isinstance(one, First):
            continue
        if isinstance(other, Window):
            inner = forms(other, q - one.count, m - one.count)
        elif isinstance(other, GridPattern) and other.start >= one.count:
            inner = forms(other, q, m, lengths)
        else:
            continue
        for form in inner:
            whole = 2 * one.count * q - one.count**2 + form.formula
            yield Form(sympy.expand(whole), (sympy.Eq(q, m), sympy.Gt(q, one.count), *form.when))


# Grids: as many pairs as along the rows, times as many as along the columns


def _grid_values(pattern: Pattern) -> dict[sympy.Symbol, int]:
    if isinstance(pattern, GridPattern):
        return {letter("R"): pattern.grid[0], letter("W"): pattern.grid[1]}
    if isinstance(pattern, And | Or):
        return {**_grid_values(pattern.left), **_grid_values(pattern.right)}
    return _grid_values(pattern.pattern) if isinstance(pattern, Not) else {}


def _grid(pattern: GridPattern, q: sympy.Expr, m: sympy.Expr) -> Iterator[Form]:
    sides = letter("R"), letter("W")
    whole = (sympy.Eq(q, m), sympy.Eq(q, pattern.start + sides[0] * sides[1]))
    if isinstance(pattern, Axial):
        yield Form(sides[0] * sides[1] * (sides[0] + sides[1] - 1), whole)
        return
    product, when = sympy.Integer(1), list(whole)
    for axis, side in enumerate(sides):
        form = _axis(pattern, axis, side)
        if form is None:
            return
        product, when = product * form.formula, [*when, *form.when]
    yield Form(product, tuple(when))


def _axis(pattern: GridPattern, axis: int, side: sympy.Symbol) -> Form | None:
    """The pairs along rows (0) or columns (1)."""
    size = pattern.grid[axis]
    if isinstance(pattern, Neighborhood):
        radius, step = pattern.radii[axis], pattern.step
        if pattern.edges == "shift":
            return Form((2 * radius + 1) * side)
        return Form((2 * radius + 1) * side - step * radius * (radius + 1), (sympy.Ge(side, radius * step),))
    if isinstance(pattern, GridWindow):
        window, shift = pattern._sides[axis], pattern._sides[axis + 2]
        rest = (size - shift) % window
        return Form(window * (side - shift - rest) + rest**2 + shift**2, (sympy.Ge(side, shift),))
    if isinstance(pattern, GridStride):
        step = pattern.steps[axis]
        rest = size % step
        return Form((side**2 + rest * (step - rest)) / step)
    return None
