"""Grading of a class: a table with a row for each student."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass
from pathlib import Path

from regard.book.functions import is_function
from regard.book.grading import grade
from regard.book.homework.assignment import Assignment, read_assignment
from regard.book.homework.submissions import find_submissions, read_answers
from regard.book.matrices import is_matrix_file
from regard.book.questions.base import Question
from regard.book.verdict import Verdict
from regard.errors import AnswerError, InputError
from regard.render.table import Cell, Column, Table

MARKS = {"right": "right", "convention": "convention", "wrong": "wrong", "unread": "not read"}
KINDS = {"right": "holds", "convention": "flaky", "wrong": "broken", "unread": "broken"}
NO_ANSWER = Verdict("unread", "no answer")


@dataclass(frozen=True)
class ClassGrades:
    """The verdicts of a class by student and question."""

    assignment: Assignment
    verdicts: dict[str, dict[str, Verdict]]

    def count_points(self, student: str) -> int:
        """Answers that are right, with or without a convention."""
        return sum(verdict.grade in ("right", "convention") for verdict in self.verdicts[student].values())

    def to_table(self) -> Table:
        """A row for each student, a column for each question, and the points."""
        questions = self.assignment.questions
        columns = [
            Column("student"),
            *(Column(name.replace("/", "/\n")) for name in questions),
            Column("points", "right"),
        ]
        rows = []
        for student, verdicts in self.verdicts.items():
            cells = [_make_cell(verdicts[name]) for name in questions]
            rows.append([student, *cells, f"{self.count_points(student)}/{len(questions)}"])
        return Table(columns, rows)

    def to_csv(self) -> str:
        """The same table for a spreadsheet, with a remark for each answer that is not right."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["student", *self.assignment.questions, "points", "remarks"])
        for student, verdicts in self.verdicts.items():
            marks = [MARKS[verdicts[name].grade] for name in self.assignment.questions]
            remarks = "; ".join(
                f"{name}: {verdict.because}" for name, verdict in verdicts.items() if _has_remark(verdict)
            )
            # A name or remark that begins with = would be a formula of the spreadsheet.
            writer.writerow([_plain(student), *marks, self.count_points(student), _plain(remarks)])
        return out.getvalue()


def grade_folder(folder: Path, *, run_code: bool = False) -> ClassGrades:
    """Grade every submission in the folder of a homework; Python files are run only with `run_code`."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder.", because="a homework is graded by folder", instead="its path")
    assignment = read_assignment(folder)
    questions = assignment.get_questions()
    found = find_submissions(folder)
    students = [*assignment.students, *(name for name in found if name not in assignment.students)]
    verdicts = {}
    for student in students:
        answers, broken = _collect(found.get(student, []))
        seed = assignment.find_seed(student)
        verdicts[student] = {
            question.id: _grade(question, answers.get(question.id), seed, run_code, broken) for question in questions
        }
    return ClassGrades(assignment, verdicts)


def _collect(files: list[Path]) -> tuple[dict[str, tuple[str, Path]], str]:
    """The answers of all files of a student and the folder of each; also why a file cannot be read."""
    answers: dict[str, tuple[str, Path]] = {}
    broken = ""
    for file in files:
        try:
            answers |= {name: (answer, file.parent) for name, answer in read_answers(file).items()}
        except (OSError, ValueError, RecursionError) as failure:
            broken = f"{file.name}: {type(failure).__name__}"
    return answers, broken


def _grade(question: Question, answer: tuple[str, Path] | None, seed: int, run_code: bool, broken: str) -> Verdict:
    if answer is None:
        return Verdict("unread", broken) if broken else NO_ANSWER
    text, folder = answer
    if is_matrix_file(text) or is_function(text):
        # A file beside the sheet, and nowhere else.
        path = (folder / text).resolve()
        if not str(path).startswith(str(folder.resolve()) + os.sep):
            return Verdict("unread", "the file is not in the folder of the answers")
        text = str(path)
    try:
        return grade(question, text, seed, run_code=run_code)
    except AnswerError as failure:
        return Verdict("unread", failure.because.split("\n")[0])


def _make_cell(verdict: Verdict) -> Cell:
    return Cell("-", "faint") if verdict is NO_ANSWER else Cell(MARKS[verdict.grade], KINDS[verdict.grade])


def _has_remark(verdict: Verdict) -> bool:
    return verdict.grade != "right" and bool(verdict.because)


def _plain(text: str) -> str:
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
