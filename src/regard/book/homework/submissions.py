"""Answers that were handed in: sheets, notebooks and JSON files, read and never executed."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

LINE = re.compile(r"^\s*\**answer\s+([a-z]+-[\w.]+(?:/[\w-]+)?)\**\s*:\**[ \t]*(.*)$", re.IGNORECASE | re.MULTILINE)
MOST_BYTES = 20_000_000
READERS = (".md", ".txt", ".ipynb", ".json")
NOT_ANSWERS = {"key.md", "homework.json"}
CONFLICT = "\0two different answers"


def read_answers(file: Path) -> dict[str, str]:
    """The answers in a file by question; an empty answer is left out. Raises ValueError if it cannot be read.

    A question that is answered twice differently has no answer but `CONFLICT`.
    """
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(f"{file.name} has more than {MOST_BYTES:,} bytes")
    text = file.read_text(encoding="utf-8-sig")
    if file.suffix.lower() == ".ipynb":
        found = _read_notebook(json.loads(text))
    elif file.suffix.lower() == ".json":
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"{file.name} is not an object with an answer for each question")
        found = {str(name): value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    else:
        found = {}
        for name, answer in LINE.findall(text):
            add_answer(found, name, answer.strip().strip("`").strip())
    answers: dict[str, str] = {}
    for name, answer in found.items():
        add_answer(answers, name.lower(), answer)
    return answers


def add_answer(answers: dict[str, str], name: str, answer: str) -> None:
    """Add an answer that is not empty; another one to the same question makes both void."""
    answer = answer.strip()
    if answer:
        answers[name] = answer if answers.get(name, answer) == answer else CONFLICT


def _read_notebook(notebook: object) -> dict[str, str]:
    """`answers["udl-12.1"] = "..."` in cells of code: constants only, nothing is run."""
    if not isinstance(notebook, dict) or not isinstance(notebook.get("cells"), list):
        raise ValueError("it is not a notebook")
    found: dict[str, str] = {}
    for cell in notebook["cells"]:
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        source = cell.get("source", "")
        try:
            tree = ast.parse("".join(source) if isinstance(source, list) else str(source))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in tree.body:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
                target = node.targets[0]
                if isinstance(target.value, ast.Name) and target.value.id == "answers":
                    _put(found, target.slice, node.value)
    return found


def _put(found: dict[str, str], name: ast.expr, value: ast.expr) -> None:
    try:
        key, answer = ast.literal_eval(name), ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return
    if isinstance(key, str):
        add_answer(found, key, answer if isinstance(answer, str) else json.dumps(answer))


def find_submissions(folder: Path) -> dict[str, list[Path]]:
    """The files of each student: those in a folder of their name, and files of their name beside it."""
    found: dict[str, list[Path]] = {}
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            found.setdefault(entry.name, []).extend(sorted(file for file in entry.iterdir() if _is_answer(file)))
        elif _is_answer(entry):
            found.setdefault(entry.stem, []).append(entry)
    return found


def _is_answer(file: Path) -> bool:
    return file.is_file() and file.suffix.lower() in READERS and file.name not in NOT_ANSWERS
