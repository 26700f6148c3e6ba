"""Writing of a homework: sheets for everyone, a key for the teacher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from regard.book.homework.assignment import FILE, make_assignment
from regard.book.homework.pdf import write_pdf
from regard.book.homework.sheet import make_key, make_notebook, make_sheet
from regard.errors import InputError
from regard.render.files import write_file


def make_homework(
    problems: Sequence[str], seed: int, folder: Path, students: Sequence[str] = (), *, pdf: bool = True
) -> tuple[list[Path], str]:
    """Write sheets (Markdown, notebook, PDF), homework.json and key.md; returns the files and why there is no PDF.

    problems: ids of problems or of single questions.
    students: each gets a folder with sizes of their own; without them there is one sheet.
    """
    assignment = make_assignment(problems, seed, students)
    if (folder / FILE).exists():
        raise InputError(
            f"{folder} has a homework already.",
            because="answers in it may belong to other sizes",
            instead="another --folder",
        )
    questions = assignment.get_questions()
    written = [write_file(folder / FILE, assignment.to_json())]
    seeds = {student: assignment.find_seed(student) for student in students or [""]}
    written.append(write_file(folder / "key.md", make_key(questions, seeds)))
    missing = "" if pdf else "not asked for"
    for student, own in seeds.items():
        place = folder / student
        sheet = make_sheet(questions, own, student)
        written.append(write_file(place / "sheet.md", sheet))
        written.append(write_file(place / "sheet.ipynb", make_notebook(questions, own, student)))
        if not missing:
            missing = write_pdf(sheet, f"Homework {student}".strip(), place / "sheet.pdf")
            written += [] if missing else [place / "sheet.pdf"]
    return written, missing
