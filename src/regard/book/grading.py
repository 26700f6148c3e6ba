"""Grading of an answer of any kind."""

from __future__ import annotations

from regard.book.expression import parse_formula, parse_number
from regard.book.formula_grading import grade_formula, grade_number_of_formula, is_close
from regard.book.functions import grade_function, is_function
from regard.book.matrices import grade_matrix, read_matrix
from regard.book.questions.base import Question
from regard.book.verdict import Verdict, format_case, format_number
from regard.errors import AnswerError


def grade(question: Question, text: str, seed: int | None = None, *, run_code: bool = True) -> Verdict:
    """The verdict on an answer; `seed` selects fresh sizes, and `run_code` allows a Python file to be run.

    Raises `AnswerError` for an answer that is not of the kind that the question asks for.
    """
    if question.kind == "formula":
        return _grade_formula(question, text, seed)
    if question.kind == "function":
        if not is_function(text):
            raise _refuse(question, text, "it is not file.py:function", "answer.py:attention")
        if not run_code:
            raise _refuse(question, text, "it would run a Python file", "--run-code, if you trust every file")
        return grade_function(question, text, seed)
    sizes = question.fresh_sizes(seed)
    assert sizes is not None
    assert question.solve is not None
    if question.kind == "matrix":
        return grade_matrix(question, read_matrix(text), sizes)
    value, expected = parse_number(text), question.solve(sizes)
    if is_close(value, expected, question.tolerance):
        return Verdict("right", "")
    for name, solve in question.conventions.items():
        if is_close(value, solve(sizes), question.tolerance):
            return Verdict("convention", name)
    return Verdict("wrong", "", format_case(sizes), format_number(expected), format_number(value))


def _grade_formula(question: Question, text: str, seed: int | None) -> Verdict:
    if is_function(text):
        raise _refuse(question, text, "the question asks for a formula", question.symbols[0].name)
    sizes = question.fresh_sizes(seed)
    if sizes is not None and not _has_symbols(question, text):
        return grade_number_of_formula(question, parse_number(text), sizes)
    return grade_formula(question, text)


def _has_symbols(question: Question, text: str) -> bool:
    """Whether an answer is a formula in symbols; one that cannot be read counts as a formula, whose error says more."""
    try:
        return bool(parse_formula(text, [symbol.name for symbol in question.symbols]).used)
    except AnswerError:
        return any(letter.isalpha() for letter in text[:1_000])


def _refuse(question: Question, text: str, because: str, instead: str) -> AnswerError:
    return AnswerError(
        f"The answer to {question.id} cannot be graded.", asked=text[:60], because=because, instead=instead
    )
