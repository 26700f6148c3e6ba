"""The symbols of the formulas, and what they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy

from regard.errors import CostError

# A symbol, the keyword by which a caller gives its number, and its meaning. One symbol means one thing everywhere.
MEANINGS: dict[str, tuple[str, str]] = {
    "B": ("batch", "batch size"),
    "N": ("tokens", "query length"),
    "M": ("keys", "key length"),
    "H": ("heads", "heads"),
    "G": ("kv_heads", "key/value heads"),
    "d": ("dim", "head dim of queries and keys"),
    "e": ("value_dim", "head dim of values"),
    "r": ("features", "feature dim of the feature map, in each head"),
    "P": ("pairs", "pairs of a query and a key that the pattern allows, in each head and batch row"),
    "Z": ("visited", "pairs of a query and a key that the backend computes, in each head and batch row"),
    "D": ("width", "width (hidden size)"),
    "X": ("context_width", "width of the input of the keys"),
    "Y": ("values_width", "width of the input of the values"),
    "O": ("output_width", "width of the output"),
    "F": ("hidden", "hidden dim of the feed-forward part"),
    "L": ("layers", "layers"),
    "V": ("vocab_size", "vocabulary size"),
    "S": ("positions", "learned positions"),
    "A": ("classes", "classes"),
    "C": ("channels", "channels"),
    "R": ("rows", "rows of the grid"),
    "W": ("columns", "columns of the grid"),
    "p": ("patch", "patch size (pixels along a side)"),
    "w": ("window", "window size (tokens along a side)"),
    "u": ("window_columns", "columns of a window that is not square; its rows are w"),
    "T": ("context_tokens", "sequence length of the encoder"),
    "K": ("devices", "devices"),
    "c": ("context", "devices that share a sequence"),
    "b": ("link", "bytes that a device can send in a second"),
    "f": ("device_flops", "FLOPs of a device in a second"),
}
ALONE = {"N": "sequence length"}  # where no other symbol is a length of keys


def size_symbol(name: str, index: int | str | None = None) -> sympy.Symbol:
    """The sympy symbol of a name, perhaps of one stage among several: `D`, `D_2`."""
    name, _, stage = name.partition("_")
    index = stage or index
    if name not in MEANINGS:
        raise KeyError(name)
    return sympy.Symbol(name if index is None else f"{name}_{index}", positive=True, integer=True)


def size_symbols(names: str) -> tuple[sympy.Symbol, ...]:
    """Several at once: `B, N, D = size_symbols("B N D")`."""
    return tuple(size_symbol(name) for name in names.split())


def meaning(symbol: sympy.Basic) -> str:
    """What a symbol stands for, in words."""
    name, _, index = str(symbol).partition("_")
    words = MEANINGS[name][1] if name in MEANINGS else str(symbol)
    return f"{words}, stage {index}" if index else words


def name_size(name: str) -> str:
    """The keyword of a symbol: `tokens` for N, `width of stage 2` for D_2."""
    first, _, stage = name.partition("_")
    return MEANINGS[first][0] + (f" of stage {stage}" if stage else "")


def read_symbol(name: str | sympy.Symbol) -> sympy.Symbol:
    """A symbol by its name, `"N"`, or by its keyword, `"tokens"`."""
    if isinstance(name, sympy.Symbol):
        return name
    for key, (keyword, _) in MEANINGS.items():
        if name in (key, keyword):
            return size_symbol(key)
    first, _, index = name.partition("_")
    if first in MEANINGS and index:
        return size_symbol(first, index)
    raise CostError(
        f"No formula has a symbol {name!r}.",
        asked=f"{name!r}",
        because="a symbol has one meaning in every formula, and this one has none",
        instead=", ".join(f"{key} or {keyword}" for key, (keyword, _) in list(MEANINGS.items())[:6]) + ", ...",
    )


Values = Mapping[sympy.Symbol, Any]


def find_common_values(*several: Values) -> dict[sympy.Symbol, Any]:
    """The symbols that have one value wherever they have any."""
    found: dict[sympy.Symbol, set[Any]] = {}
    for values in several:
        for symbol, value in values.items():
            found.setdefault(symbol, set()).add(value)
    return {symbol: next(iter(values)) for symbol, values in found.items() if len(values) == 1}


def substitute_numbers(formula: Any, values: Values) -> Any:
    """A formula with numbers for its symbols: faster than sympy's `subs`, which also compares subexpressions."""
    formula = sympy.sympify(formula)
    numbers: Any = {symbol: sympy.sympify(values[symbol]) for symbol in formula.free_symbols if symbol in values}
    return formula.xreplace(numbers) if numbers else formula


def replace_terms(formula: Any, terms: Any) -> Any:
    """A formula with exact terms replaced; sympy's own `xreplace` is annotated as returning more than formulas."""
    return sympy.sympify(formula).xreplace(terms)


def fix_differing(formula: sympy.Expr, values: Values, common: Values) -> sympy.Expr:
    """A formula in which every symbol that means another number elsewhere is replaced by its own number."""
    return substitute_numbers(formula, {symbol: each for symbol, each in values.items() if symbol not in common})


def legend(formulas: Iterable[sympy.Expr], values: Values, step: str = "forward") -> list[tuple[str, str, Any]]:
    """Symbol, meaning and number of every symbol of some formulas, in the order of the table above."""
    order = list(MEANINGS)
    used: list[Any] = sorted(
        {symbol for formula in formulas for symbol in formula.free_symbols},
        key=lambda symbol: (order.index(str(symbol)[0]) if str(symbol)[0] in order else len(order), str(symbol)),
    )
    apart = any(str(symbol).partition("_")[0] == "M" for symbol in used)
    words = {"N": "tokens in the cache"} if step == "decode" else {} if apart else ALONE
    return [(str(symbol), words.get(str(symbol), meaning(symbol)), values.get(symbol)) for symbol in used]
