"""Grading of formulas: by values with fifty digits at many sizes, and by sympy where it can expand both."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from regard.book.expression import Formula, OutsideDomain, context, parse_formula
from regard.book.questions.base import DOMAINS, Question, Sizes, to_exact, to_numbers
from regard.book.verdict import Verdict, format_case, format_number

SMALL = (1, 2, 3, 4)
MOST_SMALL, MOST_RANDOM = 120, 20
CLOSE = context.mpf(10) ** -25
_CASES: dict[tuple[str, str], list[Sizes]] = {}


def grade_formula(question: Question, text: str) -> Verdict:
    """The verdict on a formula; raises `AnswerError` if it is none."""
    answer = parse_formula(text, [symbol.name for symbol in question.symbols])
    expected = _parse(question, question.expected)
    difference = find_difference(question, answer, expected)
    if difference is None:
        return Verdict("right", _describe_proof(question, answer, expected))
    for name, other in question.conventions.items():
        if find_difference(question, answer, _parse(question, other)) is None:
            return Verdict("convention", name)
    case, found, wanted = difference
    return Verdict("wrong", _explain(question, answer, expected), case, wanted, found)


def grade_number_of_formula(question: Question, value: Any, sizes: Sizes) -> Verdict:
    """The verdict on a number that answers a formula question for given sizes."""
    case = format_case(sizes)
    expected = _value(_parse(question, question.expected), sizes)
    if is_close(value, expected, question.tolerance):
        return Verdict("right", f"for {case}")
    for name, other in question.conventions.items():
        if is_close(value, _value(_parse(question, other), sizes), question.tolerance):
            return Verdict("convention", name)
    because = ""
    for other, why in question.mistakes.items():
        if is_close(value, _value(_parse(question, other), sizes), question.tolerance):
            because = why
            break
    return Verdict("wrong", because, case, format_number(expected), format_number(value))


def is_close(value: Any, expected: Any, tolerance: float) -> bool:
    """Whole numbers exactly, others within a relative tolerance."""
    if value is None or expected is None:
        return value is expected
    if expected == context.nint(expected) and expected:
        return abs(value - expected) <= CLOSE * abs(expected)
    return abs(value - expected) <= tolerance * abs(expected)


def find_difference(question: Question, answer: Formula, expected: Formula) -> tuple[str, str, str] | None:
    """The smallest case where two formulas differ, with both values; None if they agree in all."""
    for sizes in list_cases(question):
        wanted = _value(expected, sizes)
        if wanted is None:
            continue
        found = _value(answer, sizes)
        if found is None or abs(found - wanted) > CLOSE * max(abs(found), abs(wanted)):
            return format_case(sizes), format_number(found), format_number(wanted)
    return None


def list_cases(question: Question) -> list[Sizes]:
    """The cases of a question, drawn once."""
    name = question.id, question.expected
    if name not in _CASES:
        _CASES[name] = list(draw_cases(question))
    return _CASES[name]


def draw_cases(question: Question) -> Iterator[Sizes]:
    """Small sizes in the order of their sum, then large ones at random, the same in every run."""
    choices = [SMALL if symbol.domain == "count" else DOMAINS[symbol.domain][:4] for symbol in question.symbols]
    names = [symbol.name for symbol in question.symbols]
    small = [dict(zip(names, values, strict=True)) for values in itertools.islice(itertools.product(*choices), 20_000)]
    small.sort(key=lambda sizes: sum(abs(value) for value in to_numbers(sizes).values()))
    yield from itertools.islice((sizes for sizes in small if question.holds(to_numbers(sizes))), MOST_SMALL)
    chosen = random.Random(question.id)
    found = 0
    for _ in range(4_000):
        sizes = {symbol.name: _draw(chosen, symbol.domain) for symbol in question.symbols}
        if question.holds(to_numbers(sizes)):
            yield sizes
            found += 1
        if found == MOST_RANDOM:
            return


def _draw(chosen: random.Random, domain: str) -> Any:
    if domain == "count":
        return chosen.choice((chosen.randint(1, 12), chosen.randint(1, 12) * 8, chosen.randint(1, 997)))
    share = f"{chosen.randint(1, 96)}/97"
    if domain == "share":
        return share
    return share if domain == "positive" or chosen.random() < 0.5 else f"-{share}"


def _parse(question: Question, text: str) -> Formula:
    return parse_formula(text, [symbol.name for symbol in question.symbols])


def _value(formula: Formula, sizes: Sizes) -> Any:
    try:
        return formula.evaluate(to_exact(sizes))
    except OutsideDomain:
        return None


def _describe_proof(question: Question, answer: Formula, expected: Formula) -> str:
    left, right = answer.to_sympy(), expected.to_sympy()
    if left is not None and right is not None:
        import sympy

        if sympy.expand(left - right) == 0:
            return "the same formula for all sizes"
    return f"the same value at {len(list_cases(question))} sizes, to 25 digits"


def _explain(question: Question, answer: Formula, expected: Formula) -> str:
    """What is forgotten or confused: a known mistake, or a symbol that does not occur."""
    for other, why in question.mistakes.items():
        if find_difference(question, answer, _parse(question, other)) is None:
            return why
    missing, extra = sorted(expected.used - answer.used), sorted(answer.used - expected.used)
    if missing:
        return f"it does not depend on {' and '.join(missing)}"
    return f"it depends on {' and '.join(extra)}" if extra else ""
