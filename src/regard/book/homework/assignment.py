"""An assignment: the questions, one seed for the class, and a seed for each student; kept as homework.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from regard.book.questions import find_questions, get_question, list_questions
from regard.book.questions.base import Question
from regard.errors import InputError

FILE = "homework.json"


@dataclass(frozen=True)
class Assignment:
    """Ids of questions, the seed, and the names of the students; without names all have the same sizes."""

    questions: tuple[str, ...]
    seed: int
    students: tuple[str, ...] = ()

    def get_questions(self) -> list[Question]:
        return [get_question(name) for name in self.questions]

    def find_seed(self, student: str = "") -> int:
        """The seed of a student: the same on every machine, and different from that of others."""
        if student not in self.students:
            return self.seed
        digest = hashlib.sha256(f"{self.seed} {student}".encode()).digest()
        return int.from_bytes(digest[:4], "big")

    def to_json(self) -> str:
        fields = {"questions": list(self.questions), "seed": self.seed, "students": list(self.students)}
        return json.dumps(fields, indent=2) + "\n"


def make_assignment(problems: Sequence[str], seed: int, students: Sequence[str] = ()) -> Assignment:
    """The assignment of these problems; `udl-12.1` stands for all its questions, `udl-12.1/biases` for one."""
    chosen: dict[str, None] = {}
    for name in problems:
        found = [get_question(name)] if "/" in name else find_questions(name) or [get_question(name)]
        chosen |= dict.fromkeys(question.id for question in found)
    for student in students:
        if not student or student.startswith(".") or set(student) & set('/\\:*?"<>|\n\0'):
            raise InputError(
                f"{student!r} cannot be the name of a folder.",
                because="each student has a folder of that name",
                instead="--students ada,bela",
            )
    if len(set(students)) != len(students):
        raise InputError("A student is named twice.", because="each has a folder", instead="different names")
    return Assignment(tuple(chosen), seed, tuple(students))


def read_assignment(folder: Path) -> Assignment:
    """The assignment that a folder was made for."""
    file = folder / FILE
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        found = Assignment(tuple(fields["questions"]), int(fields["seed"]), tuple(fields["students"]))
        unknown = set(found.questions) - set(list_questions())
        if unknown:
            raise ValueError(f"unknown questions {sorted(unknown)}")
        return found
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise InputError(
            f"{folder} is not the folder of a homework.",
            found=f"{type(failure).__name__}: {failure}"[:200],
            because=f"{FILE}, which says what was asked, cannot be read",
            instead="regard homework make --problems udl-12.1 --seed 7 --folder FOLDER",
        ) from failure
