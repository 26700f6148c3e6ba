"""What the benchmark programs share: options, bound threads, the loop over cases, and the results file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch must not be imported before `bind_threads`
    from benchmarks.limits import Limits
    from benchmarks.results import Result


def make_parser(description: str | None, *, rounds: int, seconds: float, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="minimum number of timings of every competitor")
    parser.add_argument("--seconds", type=float, default=seconds, help="minimum time for a case")
    parser.add_argument("--repeat", type=int, default=1, help="run the whole table this many times and show the spread")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    parser.add_argument("--out", type=Path, default=Path(out))
    return parser


def bind_threads() -> None:
    """Restart the program with every thread bound to a core of its own.

    The scheduler may keep two threads on one core for long spells, which doubles every time. The OpenMP library reads
    this setting once, when it is loaded, so torch must not have been imported yet.
    """
    if "OMP_PROC_BIND" not in os.environ:
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, os.environ | {"OMP_PROC_BIND": "true"})


def run_cases(
    names: Iterable[str], measure: Callable[[str], Result], repeat: int, limits: Limits
) -> list[list[Result]]:
    """Measure every case, `repeat` times in turn, and print each result as it is ready."""
    from benchmarks import report
    from benchmarks.results import Result

    def measure_or_fail(name: str) -> Result:
        try:
            return measure(name)
        except Exception as reason:  # one case that fails must not hide the others
            return Result(name, failed=f"{type(reason).__name__}: {reason}")

    repeats: list[list[Result]] = []
    for number in range(repeat):
        if repeat > 1:
            print(f"\n--- repeat {number + 1} of {repeat}")
        repeats.append([])
        for name in names:
            repeats[-1].append(measure_or_fail(name))
            print(report.case(repeats[-1][-1], limits), flush=True)
    print(report.summary(repeats))
    return repeats


def save(path: Path, machine: dict[str, Any], limits: Limits, repeats: list[list[Result]], **more: Any) -> int:
    """Write the results as JSON, and return the exit code: 1 if a case failed."""
    found = {
        "machine": machine,
        "limits": dataclasses.asdict(limits),
        "repeats": [[result.as_json() for result in results] for results in repeats],
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1))
    print(f"\nsaved {path}")
    return 1 if any(result.failed for results in repeats for result in results) else 0
