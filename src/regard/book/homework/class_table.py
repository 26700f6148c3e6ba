"""Grading of a class: a table with a row for each student."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass, field
from pathlib import Path

from regard.book.functions import is_function
from regard.book.grading import grade
from regard.book.homework.assignment import Assignment, read_assignment
from regard.book.homework.submissions import CONFLICT, find_submissions, read_answers
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
    """The verdicts of a class by student and question, and what is strange about a submission.

    Attributes:
        remarks: by student: files that cannot be read, answers to questions that were not asked, unknown names.
    """

    assignment: Assignment
    verdicts: dict[str, dict[str, Verdict]]
    remarks: dict[str, list[str]] = field(default_factory=dict)

    def count_points(self, student: str) -> int:
        """Answers that are right, with or without a convention."""
        return sum(verdict.grade in ("right", "convention") for verdict in self.verdicts[student].values())

    def list_remarks(self, student: str) -> list[str]:
        """Why answers are not right, and what is strange about the submission."""
        own = [f"{name}: {verdict.because}" for name, verdict in self.verdicts[student].items() if _has_remark(verdict)]
        return own + self.remarks.get(student, [])

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
            marks = [_name_mark(verdicts[name]) for name in self.assignment.questions]
            remarks = "; ".join(self.list_remarks(student))
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
    verdicts, remarks = {}, {}
    for student in students:
        answers, faults = _collect(found.get(student, []))
        seed = assignment.find_seed(student)
        verdicts[student] = {
            question.id: _grade(question, answers.get(question.id), seed, run_code, faults) for question in questions
        }
        others = sorted(set(answers) - set(assignment.questions))
        nothing = [] if found.get(student) else ["nothing was handed in"]
        remarks[student] = nothing + faults + [f"{name[:60]!r} was not asked" for name in others]
        if assignment.students and student not in assignment.students:
            remarks[student].append("not a student of this homework: graded with the sizes of the class")
    return ClassGrades(assignment, verdicts, remarks)


def _collect(files: list[Path]) -> tuple[dict[str, tuple[str, Path]], list[str]]:
    """The answers of all files of a student and the folder of each; also why a file cannot be read."""
    answers: dict[str, tuple[str, Path]] = {}
    faults = []
    for file in files:
        try:
            for name, answer in read_answers(file).items():
                before = answers.get(name, (answer, file.parent))[0]
                answers[name] = (answer if before == answer else CONFLICT, file.parent)
        except (OSError, ValueError, RecursionError) as failure:
            faults.append(f"{file.name} cannot be read: {_describe(failure)}")
    return answers, faults


def _describe(failure: Exception) -> str:
    known = {"JSONDecodeError": "it is no JSON", "UnicodeDecodeError": "it is no text", "RecursionError": "too deep"}
    return known.get(type(failure).__name__, str(failure).split("\n")[0][:100])


def _grade(
    question: Question, answer: tuple[str, Path] | None, seed: int, run_code: bool, faults: list[str]
) -> Verdict:
    if answer is None:
        return Verdict("unread", "") if faults else NO_ANSWER
    text, folder = answer
    if text == CONFLICT:
        return Verdict("unread", "answered twice, differently")
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


def _name_mark(verdict: Verdict) -> str:
    return NO_ANSWER.because if verdict is NO_ANSWER else MARKS[verdict.grade]


def _has_remark(verdict: Verdict) -> bool:
    return verdict.grade != "right" and verdict.because not in ("", NO_ANSWER.because)


def _plain(text: str) -> str:
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
