"""Do widths grow, do centres leave the query, do the heads form a grid: the answers of a run as a table."""

from __future__ import annotations

import math
import textwrap

from regard.render.table import Cell, Column, Table
from regard.train import Run
from regard.train.head_analysis import ALL_LAYERS, MEANINGS, Answer, analyze_heads

KINDS = {"yes": "strong", "no": "strong", "undecided": "faint"}
COLUMNS = 78


def answer_questions(run: Run) -> list[Answer]:
    """The answers about the heads of a run; none for models without positional heads, and before the first step."""
    first, last = run.evaluations[0].head_profiles, run.evaluations[-1].head_profiles
    return analyze_heads(first, last) if last and run.evaluations[-1].step else []


def make_answer_table(answers: list[Answer], with_reasons: bool = False) -> Table:
    """A row for each question and layer; `with_reasons` adds what each verdict rests on."""
    rows, sections, question = [], [], ""
    for answer in answers:
        is_first = answer.question != question
        if is_first:
            sections.append(len(rows))
        question = answer.question
        rows.append(
            (
                question.removeprefix("Do ").removesuffix("?") if is_first else "",
                answer.layer.removeprefix("blocks.").removesuffix(".attention"),
                _format(answer.value),
                f"{_format(answer.low)} to {_format(answer.high)}" if math.isfinite(answer.low) else "-",
                "-" if math.isnan(answer.p) else f"{answer.p:.4f}" if answer.p >= 0.001 else "<0.001",
                str(answer.heads),
                Cell(answer.verdict, KINDS[answer.verdict]),
                *([Cell(answer.reason, "faint")] if with_reasons else []),
            )
        )
    columns = [Column("do"), Column("layer"), Column("value", "right"), Column("95 %", "right"), Column("p", "right")]
    columns += [Column("heads", "right"), Column("verdict"), *([Column("because")] if with_reasons else [])]
    return Table(columns, rows, sections)


def describe_values() -> list[str]:
    """What the value and the p-value of each question are."""
    return [f"{question.removeprefix('Do ').removesuffix('?')}: {text}" for question, text in MEANINGS.items()]


def print_answers(answers: list[Answer]) -> None:
    """Print the table, what its numbers are, and what the verdicts on all layers rest on."""
    from regard.render.terminal import print_fitted

    if not answers:
        return
    print()
    print_fitted(make_answer_table(answers).to_rich)
    print()
    notes = [
        *describe_values(),
        *(f"{one.question} {one.verdict}: {one.reason}" for one in answers if one.layer == ALL_LAYERS),
    ]
    for note in notes:
        print(textwrap.fill(note, COLUMNS, subsequent_indent="  "))


def _format(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
