"""The text of a question with its sizes, for sheets and the terminal."""

from __future__ import annotations

from typing import Any

import numpy

from regard.book.questions.base import Question, Sizes
from regard.book.verdict import format_case

FORMS = {
    "formula": "a formula in {symbols}",
    "number": "a number",
    "matrix": "a matrix: a file .csv, .npy or .json, or [[1, 2], [3, 4]]",
    "function": "a function: file.py:function, with numpy arrays as arguments",
}


def describe_form(question: Question, sizes: Sizes | None) -> str:
    """What an answer looks like."""
    names = ", ".join(symbol.name for symbol in question.symbols)
    form = FORMS[question.kind].format(symbols=names)
    if question.kind == "formula" and sizes is not None:
        form += f", or its value for {format_case(sizes)}"
    return form


def describe_symbols(question: Question) -> str:
    """`N: tokens; D: dimension`."""
    return "; ".join(f"{symbol.name}: {symbol.meaning}" for symbol in question.symbols)


def describe_sizes(question: Question, seed: int | None) -> list[str]:
    """One line for each given number, vector or matrix; nothing for formulas and functions."""
    if question.kind not in ("number", "matrix"):
        return []
    return [f"{name} = {format_array(value)}" for name, value in (question.fresh_sizes(seed) or {}).items()]


def format_array(value: Any) -> str:
    """Numbers as JSON writes them, which can be copied into a program."""
    if not numpy.ndim(value):
        return str(value)
    return str(numpy.asarray(value).tolist())


def solve_for_key(question: Question, seed: int | None) -> str:
    """The expected answer, for the key of a teacher."""
    sizes = question.fresh_sizes(seed)
    if question.kind == "formula":
        from regard.book.expression import parse_formula
        from regard.book.questions.base import to_exact
        from regard.book.verdict import format_number

        if sizes is None:
            return question.expected
        formula = parse_formula(question.expected, [symbol.name for symbol in question.symbols])
        return f"{question.expected}; for {format_case(sizes)}: {format_number(formula.evaluate(to_exact(sizes)))}"
    if question.kind == "function":
        return "compared with the definition on random inputs"
    assert question.solve is not None
    assert sizes is not None
    return format_array(question.solve(sizes))
