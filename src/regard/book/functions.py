"""Answers that are Python functions, `file.py:name`: run in a process of their own with limits on time and memory.

The limits stop mistakes, such as a loop that never ends. They are no sandbox: a file is run only when its owner
names it on the command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy

from regard.book.matrices import as_array, compare_arrays
from regard.book.questions.base import Question, Sizes
from regard.book.verdict import Verdict
from regard.errors import AnswerError

SECONDS = 30
MEMORY = 8 << 30  # bytes of addresses; torch alone reserves several
MOST_OUTPUT = 16 << 20
CASES = 5
FORM = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
# Prints go to stderr, so that the results are alone on stdout.
RUNNER = """
import json, sys, runpy
import numpy
results, sys.stdout = sys.stdout, sys.stderr
asked = json.load(sys.stdin)
function = runpy.run_path(asked["file"])[asked["name"]]
made = []
for case in asked["cases"]:
    values = [numpy.array(value) if isinstance(value, list) else value for value in case]
    made.append(numpy.asarray(function(*values), dtype=float).tolist())
json.dump(made, results)
"""


def is_function(text: str) -> bool:
    """Whether an answer is `file.py:function`."""
    return len(text) < 4_096 and FORM.fullmatch(text.strip()) is not None


def grade_function(question: Question, text: str, seed: int | None) -> Verdict:
    """Run the function on cases of growing size, and compare each result."""
    assert question.draw is not None
    assert question.solve is not None
    seeds = [*range(CASES), *([seed] if seed is not None else [])]
    cases = [question.draw(numpy.random.default_rng(number)) for number in seeds]
    results = run_function(text, cases)
    agreed: set[str] | None = None
    for sizes, result in zip(cases, results, strict=True):
        shapes = ", ".join(f"{name} {numpy.shape(value)}" for name, value in sizes.items() if numpy.ndim(value))
        others = {name: as_array(solve(sizes)) for name, solve in question.conventions.items()}
        verdict = compare_arrays(question, as_array(result), as_array(question.solve(sizes)), others, shapes)
        if verdict.grade == "wrong":
            return verdict
        names = {verdict.because} if verdict.grade == "convention" else {""}
        agreed = names if agreed is None else agreed & names
        if not agreed:
            return Verdict("wrong", "its convention changes from case to case", shapes, "one convention", "several")
    name = next(iter(agreed or {""}))
    return Verdict("convention", name) if name else Verdict("right", f"all {len(cases)} cases")


def run_function(text: str, cases: list[Sizes]) -> list[Any]:
    """The results of a function on each case."""
    match = FORM.fullmatch(text.strip())
    assert match is not None
    file = Path(match["file"]).resolve()
    if not file.is_file():
        raise _refuse(text, "there is no such file")
    arguments = [[numpy.asarray(value).tolist() for value in case.values()] for case in cases]
    asked = json.dumps({"file": str(file), "name": match["name"], "cases": arguments})
    with (
        tempfile.TemporaryDirectory() as folder,
        open(Path(folder) / "out", "w+b") as out,
        open(Path(folder) / "err", "w+b") as err,
    ):
        command = [sys.executable, "-I", "-c", RUNNER]
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": folder, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            cwd=folder,
            env=environment,
            start_new_session=True,  # a group of its own, which ends as a whole
            preexec_fn=_limit if os.name == "posix" else None,
        )
        try:
            process.communicate(asked.encode(), timeout=SECONDS)
        except subprocess.TimeoutExpired as failure:
            raise _refuse(text, f"it did not end within {SECONDS} seconds") from failure
        finally:
            _end(process)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            last = err.read()[-2_000:].decode(errors="replace").strip().split("\n")[-1]
            raise _refuse(text, last[:200] or f"the process ended with code {process.returncode}")
        return json.loads(out.read())


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _limit() -> None:
    import resource

    for kind, most in (
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, MOST_OUTPUT),
    ):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _refuse(text: str, because: str) -> AnswerError:
    return AnswerError(
        "The function cannot be run.",
        asked=text[:80],
        because=because,
        instead="file.py:function, a function of the arrays that the question names, which returns an array",
    )
