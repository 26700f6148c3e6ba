"""`regard problem`, `regard answer` and `regard homework`: the book, its grader, and sheets for a class."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from regard.errors import InputError

ANSWER_LIMIT = 2_000_000  # characters that are read from a pipe
PROBLEM_EPILOG = """examples:
  regard problem                          all problems, by source and by topic
  regard problem udl-12.1                 the question, the answer, and the code that computes it
  regard problem udl-12.1 --open          the same in a browser, with its pictures
  regard problem udl-12.1 --seed 7        its graded questions, with fresh sizes
"""
ANSWER_EPILOG = """examples:
  regard answer udl-12.1 "3*D**2 + 3*D"           a formula
  regard answer udl-12.1/biases 21 --seed 7       a number for the sizes of `regard problem udl-12.1 --seed 7`
  regard answer udl-12.4 jacobian.csv             a matrix: .csv, .npy, .json or "[[1, 2], [3, 4]]"
  regard answer nyu-1.1a answer.py:attention      a Python function of yours, which is run
  regard answer udl-12.1 - < answer.txt           from a file

Exit codes: 0 right, 0 right but for a convention, 1 wrong, 2 for an answer that cannot be read."""
HOMEWORK_EPILOG = """examples:
  regard homework make --problems udl-12.1,udl-12.4,nyu-1.1b --seed 7 --students ada,bela
  regard homework grade homework
  regard homework grade homework --run-code --csv grades.csv
"""


def add(commands: Any) -> None:
    """Add the commands `problem`, `answer` and `homework`."""
    problem = commands.add_parser(
        "problem", help="show a problem, solved by running it", description="Show a problem.", epilog=PROBLEM_EPILOG
    )
    problem.add_argument("problem", metavar="ID", nargs="?", help="the problem; without it all are listed")
    problem.add_argument("--open", action="store_true", help="open the page in a browser")
    problem.add_argument("--seed", type=int, metavar="N", help="show its graded questions with fresh sizes")
    problem.add_argument("-o", "--out", type=Path, metavar="FILE.html", help="write the page as one HTML file")
    problem.set_defaults(run=show_problem)

    answer = commands.add_parser("answer", help="grade an answer", description="Grade an answer.", epilog=ANSWER_EPILOG)
    answer.add_argument("question", metavar="ID", help="the question: udl-12.1, or a part of it, udl-12.1/biases")
    answer.add_argument(
        "answer", metavar="ANSWER", help="a formula, a number, a matrix, file.py:function, or - for stdin"
    )
    answer.add_argument("--seed", type=int, metavar="N", help="the seed that the sizes were drawn from")
    answer.set_defaults(run=grade_answer)

    homework = commands.add_parser(
        "homework", help="make and grade homework", description="Make and grade homework.", epilog=HOMEWORK_EPILOG
    )
    actions = homework.add_subparsers(dest="action", metavar="make | grade", required=True, parser_class=type(homework))
    make = actions.add_parser("make", help="write sheets and a key")
    make.add_argument("--problems", required=True, metavar="ID,ID,...", help="problems, or single questions")
    make.add_argument("--seed", type=int, required=True, metavar="N", help="of the sizes")
    make.add_argument(
        "--students", default="", metavar="NAME,... | FILE", help="names, or a file with one on each line"
    )
    make.add_argument("--folder", type=Path, default=Path("homework"), metavar="FOLDER", help="(homework)")
    make.add_argument("--no-pdf", action="store_true", help="Markdown and notebooks only")
    make.set_defaults(run=make_sheets)
    grading = actions.add_parser("grade", help="grade the answers in a folder")
    grading.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of `regard homework make`")
    grading.add_argument("--run-code", action="store_true", help="run the Python files that were handed in")
    grading.add_argument("--csv", type=Path, metavar="FILE", help="write the table for a spreadsheet")
    grading.set_defaults(run=grade_class)


def protect_answer(arguments: list[str]) -> list[str]:
    """An answer such as -y_i*y_j is no option: a leading space tells argparse so."""
    if arguments[:1] != ["answer"]:
        return arguments
    return [f" {part}" if re.match(r"-(?![-h]|$)", part) else part for part in arguments]


def show_problem(args: argparse.Namespace) -> int:
    from regard.book.library import list_page_ids, load_page, load_pages
    from regard.book.questions import find_questions, list_questions
    from regard.render.terminal import print_fitted

    if args.problem is None:
        from regard.book.terminal import make_list

        graded = {question.problem for question in list_questions().values()}
        print_fitted(lambda width: make_list(load_pages(), graded, width))
        return 0
    questions = find_questions(args.problem)
    has_page = args.problem.strip().lower() in list_page_ids()
    if args.seed is not None or not has_page:
        if not questions:
            load_page(args.problem)  # raises for an unknown problem
            raise InputError(
                f"{args.problem} has no graded question.", because="it asks for an explanation", instead="no --seed"
            )
        _print_questions(questions, args.seed)
        return 0
    from regard.book.execution import run_page

    page = load_page(args.problem)
    if page.slow:
        print(f"regard: running {page.id}, which trains models: up to a minute", file=sys.stderr)
    executed = run_page(page)
    if args.open or args.out is not None:
        from regard.book.html import to_html
        from regard.render.files import check_suffix, write_file

        path = args.out or Path(tempfile.mkdtemp(prefix="regard-")) / f"{executed.page.id}.html"
        print(write_file(check_suffix(path, (".html",)), to_html(executed)))
        if args.open:
            import webbrowser

            webbrowser.open(path.resolve().as_uri())
        return 0
    from regard.book.errata import list_errata
    from regard.book.terminal import print_page

    print_page(executed)
    if questions:
        print(f"\ngraded: {', '.join(question.id for question in questions)}; regard answer {questions[0].id} ANSWER")
    if any(entry.problem == page.id for entry in list_errata()):
        print(f"mistakes of the source, run: regard errata {page.id}")
    return 0


def grade_answer(args: argparse.Namespace) -> int:
    from regard.book.functions import SECONDS, is_function
    from regard.book.grading import grade
    from regard.book.questions import get_question

    question = get_question(args.question)
    text = sys.stdin.read(ANSWER_LIMIT) if args.answer.strip() == "-" else args.answer
    if is_function(text):
        file = text.strip().rpartition(":")[0]
        print(
            f"regard: running {file}, in a process of its own, with your rights, for {SECONDS} seconds at most",
            file=sys.stderr,
        )
    verdict = grade(question, text.strip(), args.seed)
    print(verdict)
    return 1 if verdict.grade == "wrong" else 0


def make_sheets(args: argparse.Namespace) -> int:
    from regard.book.homework import make_homework

    problems = [part.strip() for part in args.problems.split(",") if part.strip()]
    students = _read_students(args.students)
    written, missing = make_homework(problems, args.seed, args.folder, students, pdf=not args.no_pdf)
    for path in written:
        print(path)
    if missing and not args.no_pdf:
        print(f"regard: no PDF: {missing}", file=sys.stderr)
    return 0


def grade_class(args: argparse.Namespace) -> int:
    from regard.book.homework import grade_folder
    from regard.render.files import write_file
    from regard.render.terminal import print_fitted

    grades = grade_folder(args.folder, run_code=args.run_code)
    table = grades.to_table()
    print_fitted(table.to_rich)
    for student in grades.verdicts:
        for remark in grades.list_remarks(student):
            print(f"{student}: {remark}")
    if args.csv is not None:
        print(write_file(args.csv, grades.to_csv()), file=sys.stderr)
    return 0


def _read_students(text: str) -> list[str]:
    """Names between commas, or a file with one name on each line."""
    if not text:
        return []
    if "," not in text and Path(text).is_file():
        return [line.strip() for line in Path(text).read_text(encoding="utf-8").splitlines() if line.strip()]
    return [name.strip() for name in text.split(",") if name.strip()]


def _print_questions(questions: list[Any], seed: int | None) -> None:
    from regard.book.prompts import describe_form, describe_sizes, describe_symbols

    seeded = "" if seed is None else f" --seed {seed}"
    for question in questions:
        print(f"{question.id}\n  {question.prompt}")
        for line in describe_sizes(question, seed):
            print(f"    {line}")
        if question.symbols:
            print(f"  symbols  {describe_symbols(question)}")
        sizes = question.fresh_sizes(seed) if question.kind == "formula" else None
        print(f"  answer   {describe_form(question, sizes)}")
        print(f'  grade    regard answer {question.id} "..."{seeded}\n')
