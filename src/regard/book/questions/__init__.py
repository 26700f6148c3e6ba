"""The graded questions of all problems; a module for each source."""

from __future__ import annotations

import functools

from regard.book.library import sort_key, unknown_problem
from regard.book.questions import bishop, eth, nyu, nyu_models, prince, prince_cost, ttic
from regard.book.questions.base import Question

MODULES = (bishop, prince, prince_cost, nyu, nyu_models, ttic, eth)


@functools.cache
def list_questions() -> dict[str, Question]:
    """All questions by their ids, in the order of the problems."""
    found = [question for module in MODULES for question in module.QUESTIONS]
    return {question.id: question for question in sorted(found, key=lambda question: sort_key(question.problem))}


def find_questions(problem: str) -> list[Question]:
    """The questions of a problem, the one without a part first."""
    return [question for question in list_questions().values() if question.problem == problem.strip().lower()]


def get_question(identifier: str) -> Question:
    """A question by its id, `udl-12.1` or `udl-12.1/biases`."""
    questions = list_questions()
    name = identifier.strip().lower()
    if name not in questions:
        # A problem may have parts only.
        parts = find_questions(name)
        if parts:
            return parts[0]
        raise unknown_problem(identifier, list(questions))
    return questions[name]
