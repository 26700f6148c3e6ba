"""How many pairs a pattern allows, exactly, as a formula wherever one is correct.

A closed form comes with the conditions under which it holds: `257 N - 16512` counts a window of 128 keys on each side
only if there are as many tokens. At sizes that are known the conditions are checked, and the result is compared with
the number that the pattern itself counts; where no form fits, the symbol P stands for that number. At sizes that are
not known the first form is given. The conditions go into a remark. The forms themselves are the patterns' own:
`regard.patterns.pair_counts`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import sympy

from regard.cost_model.attention.shape import Shape
from regard.cost_model.symbols import replace_terms, size_symbol, substitute_numbers
from regard.patterns import Pattern
from regard.patterns.pair_counts import SIDES, Form

Lengths = tuple[int, int]


class AllowedPairs(NamedTuple):
    """Pairs of one head over all rows of the batch; numbers of symbols that only they use; remarks."""

    formula: sympy.Expr
    values: dict[sympy.Symbol, int]
    notes: tuple[str, ...] = ()


def count_allowed_pairs(pattern: Pattern, shape: Shape) -> AllowedPairs:
    """The pairs of a pattern in an attention of this shape."""
    return count_pairs(pattern, shape.batch, shape.queries, shape.keys, shape.lengths, shape.values, sides=shape.sides)


def count_pairs(
    pattern: Pattern,
    batch: sympy.Expr,
    queries: sympy.Expr,
    keys: sympy.Expr,
    lengths: Lengths | None,
    values: Any,
    sides: tuple[Any, ...] = (),
) -> AllowedPairs:
    """The pairs of a pattern between `queries` and `keys`, which are `lengths` if those are known.

    values: the numbers of the symbols in `queries` and `keys`.
    sides: rows and columns of the pattern's grid in the same symbols; without them R and W are those of the grid.
    """
    pattern = pattern._simplify()
    own_sides = find_grid_sides(pattern)
    grid: dict[sympy.Symbol, int] = {} if sides or not own_sides else dict(zip(SIDES, own_sides, strict=True))
    if pattern.rows is not None or pattern.heads is not None:
        return _add_rows(pattern, batch, queries, keys, lengths)
    # Replaced and not substituted: sympy's subs compares subexpressions, and layers count pairs many times.
    known = {symbol: sympy.Integer(number) for symbol, number in ({**values, **grid} if lengths else grid).items()}
    exact = None if lengths is None else pattern.pairs(*lengths)
    found = _list_forms(pattern, queries, keys, lengths, sides)
    if lengths is None:  # forms for lengths that happen to be equal come last, unless they are equal for certain
        found.sort(key=lambda form: any(isinstance(each, sympy.Eq) and queries in each.args for each in form.when))
    for form in found:
        left = [
            condition for condition in (_substitute(each, known) for each in form.when) if condition is not sympy.true
        ]
        if sympy.false in left or (exact is not None and left):
            continue
        if exact is not None and form.formula.xreplace(known) != exact:
            continue
        used = {symbol: number for symbol, number in grid.items() if symbol in form.formula.free_symbols}
        return AllowedPairs(batch * form.formula, used, _describe_range(form, bool(own_sides)))
    symbol = size_symbol("P")
    if lengths is None or exact is None:
        return AllowedPairs(batch * symbol, {}, (f"pairs: {pattern!r} has no formula; P needs the number of tokens",))
    remark = f"pairs: {pattern!r} has no formula here; P = {exact:,} was counted at {lengths[0]:,} x {lengths[1]:,}"
    return AllowedPairs(batch * symbol, {symbol: exact}, (remark,))


def find_grid_sides(pattern: Pattern) -> tuple[int, ...]:
    """Rows and columns of the grid that a pattern is about, or nothing."""
    grids = sorted(pattern._list_grids(), key=lambda grid: grid.start)
    return (grids[-1].rows, grids[-1].columns) if grids else ()


def _list_forms(
    pattern: Pattern, queries: sympy.Expr, keys: sympy.Expr, lengths: Lengths | None, sides: tuple[Any, ...]
) -> list[Form]:
    """The closed forms of a pattern. Its forms call the sides of its grid R and W, which `sides` replaces."""
    if not sides:
        return list(pattern._pair_count_formulas(queries, keys, lengths))
    apart = {symbol: sympy.Dummy(str(symbol), positive=True, integer=True) for symbol in SIDES}
    queries, keys = (replace_terms(each, apart) for each in (queries, keys))
    inner: Any = dict(zip(SIDES, map(sympy.sympify, sides), strict=True)) | {new: old for old, new in apart.items()}
    return [
        Form(replace_terms(form.formula, inner), tuple(_substitute(each, inner) for each in form.when))
        for form in pattern._pair_count_formulas(queries, keys, lengths)
    ]


def _add_rows(
    pattern: Pattern, batch: sympy.Expr, queries: sympy.Expr, keys: sympy.Expr, lengths: Lengths | None
) -> AllowedPairs:
    """Rows and heads that see different pairs are added up, each exactly; their sum stays a number."""
    plain = [form for form in pattern._pair_count_formulas(queries, keys, lengths) if not form.when]
    if plain:
        return AllowedPairs(plain[0].formula, {}, ("pairs: the real tokens of all rows are one number",))
    who = "rows" if pattern.heads is None else "heads"
    if lengths is None:
        symbol = size_symbol("P")
        return AllowedPairs(
            size_symbol("B") * symbol, {}, (f"pairs: {who} see different pairs; P needs the number of tokens",)
        )
    one_head = sympy.Rational(pattern.pairs(*lengths), pattern.heads or 1)  # on average, where heads differ
    whole = one_head if pattern.rows is not None else batch * one_head
    return AllowedPairs(whole, {}, (f"pairs: {who} see different pairs; their sum stays a number",))


def _describe_range(form: Form, on_grid: bool) -> tuple[str, ...]:
    """For which sizes a form holds, in words; that a grid has as many tokens as cells goes without saying."""
    left = dict.fromkeys(each for each in form.when if sympy.sympify(each) is not sympy.true)
    words = [_describe_condition(each) for each in left if not (on_grid and _fills_grid(each))]
    return (f"pairs: {form.formula} holds for {' and '.join(words)}",) if words else ()


def _fills_grid(condition: Any) -> bool:
    return isinstance(condition, sympy.Eq) and not condition.has(sympy.Mod)


def _describe_condition(condition: Any) -> str:
    if isinstance(condition, sympy.Eq):
        left, right = condition.args
        if isinstance(left, sympy.Mod):
            return f"{left.args[0]} mod {left.args[1]} = {right}"
        return f"{left} = {right}"
    return str(condition)


def _substitute(condition: Any, values: Any) -> Any:
    return sympy.sympify(condition).xreplace(values)


def find_longest_row(pattern: Pattern, keys: sympy.Expr, values: Any) -> sympy.Expr:
    """How many keys one query sees at most: as far as the pattern's structure says, or all there are."""
    found = pattern._simplify().max_keys_per_query
    if found is None:
        return keys
    number = substitute_numbers(keys, values)
    return keys if number.is_number and number <= found else sympy.Integer(found)
