"""The sheet of an assignment as Markdown and as a notebook, and its key."""

from __future__ import annotations

import json
from collections.abc import Sequence

from regard.book.library import list_page_ids, load_page
from regard.book.prompts import describe_form, describe_sizes, describe_symbols, solve_for_key
from regard.book.questions.base import Question

FORM = "answer {id}:"
HOW = (
    "Write each answer behind its colon, and hand in this file. A formula may be written as `3*D**2` or `3D^2`. "
    "A matrix or a function is a file in the same folder, named behind the colon."
)


def title_of(question: Question) -> str:
    """The title of the page, where there is one."""
    return load_page(question.problem).title if question.problem in list_page_ids() else question.problem


def make_sheet(questions: Sequence[Question], seed: int, student: str = "") -> str:
    """The sheet as Markdown; lines that begin with `answer` are filled in and graded."""
    lines = ["# Homework" + (f" of {student}" if student else ""), HOW]
    for number, question in enumerate(questions, 1):
        lines += [f"## {number}. {title_of(question)} ({question.id})", *make_question(question, seed)]
        lines.append(FORM.format(id=question.id))
    return "\n\n".join(lines) + "\n"


def make_question(question: Question, seed: int) -> list[str]:
    """Paragraphs of one question: what is asked, the given numbers, the form of the answer."""
    blocks = [_escape(question.prompt)]
    given = describe_sizes(question, seed)
    if given:
        blocks.append("```text\n" + "\n".join(given) + "\n```")
    symbols = describe_symbols(question)
    form = f"Answer: {describe_form(question, question.fresh_sizes(seed) if question.kind == 'formula' else None)}."
    blocks.append(_escape(f"{form} ({symbols})" if symbols else form))
    return blocks


def make_key(questions: Sequence[Question], seeds: dict[str, int]) -> str:
    """The expected answers of every student, with the accepted conventions."""
    lines = ["# Key"]
    for student, seed in seeds.items():
        if student:
            lines.append(f"## {student}")
        for question in questions:
            accepted = "; ".join(question.conventions)
            line = f"- `{question.id}`: `{solve_for_key(question, seed)}`"
            lines.append(line + (f" (also accepted, as a convention: {_escape(accepted)})" if accepted else ""))
    return "\n\n".join(lines) + "\n"


def make_notebook(questions: Sequence[Question], seed: int, student: str = "") -> str:
    """The sheet as a notebook: a cell of text and a cell of code for each question."""
    cells = [_text_cell("# Homework" + (f" of {student}" if student else "")), _code_cell("answers = {}")]
    for number, question in enumerate(questions, 1):
        heading = f"## {number}. {title_of(question)} ({question.id})"
        cells.append(_text_cell("\n\n".join([heading, *make_question(question, seed)])))
        cells.append(_code_cell(f'answers["{question.id}"] = ""'))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _text_cell(text: str) -> dict[str, object]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}


def _code_cell(text: str) -> dict[str, object]:
    source = text.splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": source}


def _escape(text: str) -> str:
    return text.replace("*", "\\*").replace("_", "\\_") if "`" not in text else text
