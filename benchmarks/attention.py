"""Attention on the CPU against its peers, the machine and itself, each figure beside the bar it has to reach.

python -m benchmarks.attention [--rounds N] [--seconds S] [--repeat R] [--only TEXT] [--no-flex] [--out FILE]

Every competitor's result is checked before it is timed. A case that loses is printed like any other, with a mark. The
exit status tells whether every case could run and was right, not whether it was fast.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path

BACKEND = "native"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="turns of every competitor, at least")
    parser.add_argument("--seconds", type=float, default=3.0, help="go on with a case for so long, at least")
    parser.add_argument("--repeat", type=int, default=1, help="run the whole table so often and show the spread")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--backend", default=BACKEND, help="our backend (linear attention always uses its own)")
    parser.add_argument("--no-flex", action="store_true", help="do not compile FlexAttention; its bars stay unmeasured")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/attention.json"))
    return parser.parse_args()


def bind_threads() -> None:
    """Start again with every thread on a core of its own.

    The scheduler may keep two threads on one core for long spells, which doubles every time. The OpenMP library reads
    this once, when it is loaded, so torch must not have been imported yet.
    """
    if "OMP_PROC_BIND" not in os.environ:
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, os.environ | {"OMP_PROC_BIND": "true"})


def main() -> int:
    asked = options()
    bind_threads()

    from benchmarks import limits, machine, plot, report
    from benchmarks.cases import table
    from benchmarks.contest import Settings, contest, flex_is_off
    from benchmarks.figures import FIGURES
    from benchmarks.results import Result

    cases = {case.name: case for case in table()}
    names = [name for name in (*cases, *FIGURES) if asked.only.lower() in name.lower()]
    if asked.list or not names:
        print("\n".join(names or (f"no case holds {asked.only!r}; the cases are", *cases, *FIGURES)))
        return 0 if names else 2
    # torch reports on its compiler's choices; the table is for figures.
    warnings.filterwarnings("ignore", module="torch")
    described, reached = machine.describe(), limits.measure()
    settings = Settings(asked.backend, asked.rounds, asked.seconds, reached, flex_is_off(not asked.no_flex))
    print(report.header(described, reached, asked.backend), flush=True)

    def measured(name: str) -> Result:
        try:
            return contest(cases[name], settings) if name in cases else FIGURES[name](settings)
        except Exception as reason:  # one case that fails must not hide the others
            return Result(name, failed=f"{type(reason).__name__}: {reason}")

    repeats: list[list[Result]] = []
    for number in range(asked.repeat):
        if asked.repeat > 1:
            print(f"\n--- repeat {number + 1} of {asked.repeat}")
        repeats.append([])
        for name in names:
            repeats[-1].append(measured(name))
            print(report.case(repeats[-1][-1], reached), flush=True)
    print(report.summary(repeats))

    found = {
        "machine": described,
        "backend": asked.backend,
        "limits": dataclasses.asdict(reached),
        "repeats": [[result.as_json() for result in results] for results in repeats],
        "ratios": [
            {"case": case, "against": against, "bar": verdicts[0].bar, "values": [v.value for v in verdicts]}
            for (case, against), verdicts in report.collect(repeats).items()
        ],
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1))
    picture = asked.out.with_suffix(".png")
    missing = plot.draw(
        repeats, f"regard {asked.backend}, {described['processor']}, torch {described['torch']}", picture
    )
    print(f"\nsaved {asked.out}" + (f"; no picture: {missing}" if missing else f" and {picture}"))
    return 1 if any(result.failed for results in repeats for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
