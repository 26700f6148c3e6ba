"""Sheets with fresh sizes, their key, and the table of a class."""

from __future__ import annotations

import json
import re

import pytest

from regard.book.homework import grade_folder, make_homework, pdf
from regard.book.homework.assignment import make_assignment, read_assignment
from regard.book.homework.latex import to_latex
from regard.book.homework.sheet import make_sheet
from regard.book.homework.submissions import read_answers
from regard.book.questions import get_question, list_questions
from regard.errors import InputError

PROBLEMS = ["udl-12.1/biases", "udl-12.9", "nyu-1.1b/values", "nyu-1.1a"]


def fill(sheet: str, answers: dict[str, str]) -> str:
    for name, answer in answers.items():
        sheet = re.sub(rf"^answer {re.escape(name)}:$", f"answer {name}: {answer}", sheet, flags=re.MULTILINE)
    return sheet


def test_a_class_is_made_and_graded(tmp_path):
    folder = tmp_path / "homework"
    written, _ = make_homework(PROBLEMS, 7, folder, ["ada", "bela", "cyd"], pdf=False)
    assert {path.name for path in written} == {"homework.json", "key.md", "sheet.md", "sheet.ipynb"}
    key = (folder / "key.md").read_text()
    section = key.partition("## ada")[2].partition("## bela")[0]
    number = re.search(r"`udl-12\.9`.*?: (\d+)`", section)[1]
    vector = re.search(r"`nyu-1\.1b/values`: `(\[.*?\])`", section)[1]
    ada = folder / "ada"
    answers = {"udl-12.1/biases": "3D", "udl-12.9": number, "nyu-1.1b/values": vector, "nyu-1.1a": "own.py:attention"}
    (ada / "sheet.md").write_text(fill((ada / "sheet.md").read_text(), answers))
    (ada / "own.py").write_text("raise SystemExit('run')")
    # The numbers of another student are wrong for this one, a formula is not.
    bela = folder / "bela"
    (bela / "sheet.md").unlink()
    notebook = (bela / "sheet.ipynb").read_text()
    for name, answer in answers.items():
        notebook = notebook.replace(
            f'answers[\\"{name}\\"] = \\"\\"', f'answers[\\"{name}\\"] = {json.dumps(answer)[1:-1]!r}'
        )
    (bela / "sheet.ipynb").write_text(notebook)
    (folder / "dora.json").write_text(json.dumps({"udl-12.1/biases": "3", "udl-12.9": "2*N**2*C"}))
    (folder / "evil.json").write_text("[" * 100_000)

    grades = grade_folder(folder)
    marks = {name: [row[question].grade for question in PROBLEMS] for name, row in grades.verdicts.items()}
    assert marks["ada"] == ["right", "right", "right", "unread"]  # a Python file is not run unasked
    assert marks["bela"] == ["right", "wrong", "wrong", "unread"]
    assert marks["cyd"] == ["unread"] * 4
    assert marks["dora"] == ["wrong", "convention", "unread", "unread"]
    assert marks["evil"] == ["unread"] * 4
    assert "run a Python file" in grades.verdicts["ada"]["nyu-1.1a"].because
    assert "3/7" in str(grades.to_table())
    assert grades.to_csv().splitlines()[1].startswith("ada,right,right,")


def test_code_is_run_only_when_it_is_asked_for(tmp_path):
    make_homework(["nyu-1.1a"], 7, tmp_path / "h", ["ada"], pdf=False)
    ada = tmp_path / "h" / "ada"
    (ada / "sheet.md").write_text("answer nyu-1.1a: own.py:attention\n")
    (ada / "own.py").write_text(
        "import numpy\ndef attention(Q, K, V, beta):\n    e = numpy.exp(beta * K.T @ Q)\n"
        "    return V @ (e / e.sum(0))\n"
    )
    assert grade_folder(tmp_path / "h", run_code=True).verdicts["ada"]["nyu-1.1a"].grade == "right"
    (ada / "sheet.md").write_text("answer nyu-1.1a: ../../own.py:attention\n")
    assert "not in the folder" in grade_folder(tmp_path / "h", run_code=True).verdicts["ada"]["nyu-1.1a"].because


def test_students_have_sizes_of_their_own_and_the_same_in_every_run():
    assignment = make_assignment(["udl-12.9"], 7, ["ada", "bela"])
    assert assignment == make_assignment(["udl-12.9"], 7, ["ada", "bela"])
    question = get_question("udl-12.9")
    drawn = [question.fresh_sizes(assignment.find_seed(name)) for name in ("ada", "bela")]
    assert drawn[0] != drawn[1]
    assert drawn[0]["N"] != drawn[0]["C"]
    assert drawn == [question.fresh_sizes(assignment.find_seed(name)) for name in ("ada", "bela")]
    assert len(assignment.questions) == 3  # a problem stands for all its questions


@pytest.mark.parametrize("name", ["../out", "", "a/b", ".hidden"])
def test_a_name_that_is_no_folder_is_refused(name):
    with pytest.raises(InputError, match="folder"):
        make_assignment(["udl-12.1"], 7, [name])


def test_a_homework_is_not_overwritten_and_a_strange_folder_is_refused(tmp_path):
    make_homework(["udl-12.1"], 7, tmp_path, pdf=False)
    with pytest.raises(InputError, match="already"):
        make_homework(["udl-12.1"], 8, tmp_path, pdf=False)
    assert read_assignment(tmp_path).seed == 7
    (tmp_path / "homework.json").write_text('{"questions": ["no-1"], "seed": 1, "students": []}')
    with pytest.raises(InputError, match="unknown questions"):
        grade_folder(tmp_path)


def test_notebooks_are_read_and_not_run(tmp_path):
    cells = ['answers["udl-12.1"] = "3*D"', 'answers["a-1"] = print("run")', 'answers["udl-12.9"] = 7', "syntax error("]
    notebook = {"cells": [{"cell_type": "code", "source": cell} for cell in cells]}
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook))
    assert read_answers(tmp_path / "a.ipynb") == {"udl-12.1": "3*D", "udl-12.9": "7"}


def test_strange_submissions_are_named_and_stop_nobody_else(tmp_path):
    folder = tmp_path / "h"
    make_homework(["udl-12.1/biases", "udl-12.9/ratio"], 7, folder, ["ada", "bela", "cyd", "dora", "emil"], pdf=False)
    (folder / "ada" / "sheet.md").write_text("answer udl-12.1/biases: 3D\nanswer udl-12.1/biases: 3 * D\n")  # twice
    (folder / "ada" / "again.json").write_text(json.dumps({"udl-12.9/ratio": "C/N"}))
    (folder / "ada.md").write_text("answer udl-12.9/ratio: N/C\n")  # another answer, in another file
    (folder / "bela" / "sheet.ipynb").write_text('{"cells": [')
    (folder / "bela" / "sheet.md").write_text("answer udl-12.9/ratio: C/N\nanswer udl-12.77: 4\n")
    for file in (folder / "cyd").iterdir():
        file.unlink()
    (folder / "dora" / "sheet.md").write_bytes(b"\xff\xfe\x00\x81")
    (folder / "emil" / "sheet.md").write_text("")
    (folder / "fritz.txt").write_text("answer udl-12.1/biases: 3*D\n")

    grades = grade_folder(folder)
    found = {name: [verdict.grade for verdict in row.values()] for name, row in grades.verdicts.items()}
    assert found["ada"] == ["unread", "unread"]
    assert "twice" in grades.verdicts["ada"]["udl-12.1/biases"].because
    assert found["bela"] == ["unread", "right"]
    assert found["fritz"] == ["right", "unread"]
    remarks = {name: " | ".join(grades.list_remarks(name)) for name in grades.verdicts}
    assert "sheet.ipynb cannot be read: it is no JSON" in remarks["bela"]
    assert "'udl-12.77' was not asked" in remarks["bela"]
    assert remarks["cyd"] == "nothing was handed in"
    assert "it is no text" in remarks["dora"]
    assert remarks["emil"] == ""
    assert "not a student" in remarks["fritz"]
    lines = grades.to_csv().splitlines()
    assert lines[3] == "cyd,no answer,no answer,0,nothing was handed in"
    assert len(lines) == 7


def test_the_same_answer_in_two_files_is_one_answer(tmp_path):
    make_homework(["udl-12.9/ratio"], 7, tmp_path / "h", ["ada"], pdf=False)
    for name in ("a.md", "b.txt"):
        (tmp_path / "h" / "ada" / name).write_text("answer udl-12.9/ratio: C/N\n")
    assert grade_folder(tmp_path / "h").count_points("ada") == 1


PRINTERS = {"Chromium": "ENGINES", "LaTeX": "BROWSERS"}  # a printer, and where the names of the other are


@pytest.mark.parametrize("printer", PRINTERS)
@pytest.mark.slow
def test_the_sheet_is_printed_as_pdf(tmp_path, monkeypatch, printer):
    monkeypatch.setattr(pdf, PRINTERS[printer], ())
    if pdf.find_program(pdf.BROWSERS + pdf.ENGINES) is None:
        pytest.skip(f"no {printer} is installed")
    written, missing = make_homework(["udl-12.1", "nyu-1.1b"], 7, tmp_path)
    assert missing == ""
    assert (tmp_path / "sheet.pdf").read_bytes().startswith(b"%PDF")
    assert tmp_path / "sheet.pdf" in written


def test_without_a_printer_there_is_no_pdf_and_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(pdf, "BROWSERS", ())
    monkeypatch.setattr(pdf, "ENGINES", ())
    written, missing = make_homework(["udl-12.1"], 7, tmp_path)
    assert "neither" in missing
    assert not any(path.suffix == ".pdf" for path in written)


def test_every_question_can_be_written_as_latex():
    made = to_latex(make_sheet(list(list_questions().values()), 7, "Ada & Bela_50%"))
    assert made.isascii()  # what every engine can print
    assert r"\section*{Homework of Ada \& Bela\_50\%}" in made
    assert r"\texttt{answer udl-12.1:} \hrulefill" in made
    assert made.count("{") == made.count("}")
    body = made.partition(r"\begin{document}")[2]
    assert "`" not in body
    assert not re.search(r"(?<!\\)[#&%_]", body)
