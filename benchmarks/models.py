"""Whole models on the CPU against Hugging Face and timm, each ratio beside the bar it has to reach.

python -m benchmarks.models [--rounds N] [--seconds S] [--repeat R] [--only TEXT] [--out FILE]

Both sides have the same weights and inputs, and their outputs are compared before they are timed. A case that loses is
printed like any other, with a mark. The exit status tells whether every case could run and was right.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from pathlib import Path

from benchmarks.attention import bind_threads

MOST_ERROR = 1e-3  # relative: float32 through a dozen layers


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of every competitor, at least")
    parser.add_argument("--seconds", type=float, default=10.0, help="go on with a case for so long, at least")
    parser.add_argument("--repeat", type=int, default=1, help="run the whole table so often and show the spread")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/models.json"))
    return parser.parse_args()


def main() -> int:
    asked = options()
    bind_threads()

    from benchmarks import limits, machine, report
    from benchmarks.machine import Watch
    from benchmarks.model_cases import CASES, ModelCase
    from benchmarks.results import OURS, Result, Verdict
    from benchmarks.timing import race

    warnings.filterwarnings("ignore")
    names = [name for name in CASES if asked.only.lower() in name.lower()]
    if not names:
        print(f"no case holds {asked.only!r}; the cases are {', '.join(CASES)}")
        return 2
    described, reached = machine.describe(), limits.measure()
    print(report.header(described, reached, "auto"), flush=True)

    def measured(name: str) -> Result:
        try:
            return contest(CASES[name]())
        except Exception as reason:  # one case that fails must not hide the others
            return Result(name, failed=f"{type(reason).__name__}: {reason}")

    def contest(case: ModelCase) -> Result:
        if not case.error < MOST_ERROR:
            return Result(case.name, failed=f"outputs differ by {case.error:.1e}")
        result = Result(case.name, case.about, gflop=case.gflop, errors={}, notes=list(case.notes))
        result.notes.append(f"outputs differ by {case.error:.0e} of the largest")
        with Watch() as watch:
            result.timings = race({OURS: case.ours} | case.peers, rounds=asked.rounds, seconds=asked.seconds, warm_up=1)
        result.load = watch.load
        result.groups = dict.fromkeys(case.peers, case.against)
        if case.per_second is not None:
            count, what = case.per_second
            rates = {who: count / timing.seconds for who, timing in result.timings.items()}
            result.notes.append("; ".join(f"{who} {rate:.1f} {what}/s" for who, rate in rates.items()))
            if case.bytes_each is not None:
                bound = 1e9 * reached.read / case.bytes_each
                result.notes.append(
                    f"bound by memory: {bound:.1f} {what}/s; ours reaches {rates[OURS] / bound:.2f} of it, reading "
                    "the prompt included"
                )
        fastest = min(case.peers, key=lambda who: result.timings[who].median)
        ratio = result.timings[fastest].median / result.timings[OURS].median
        result.verdicts = [Verdict(case.name, case.against, ratio, case.bar, by=fastest)]
        return result

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
        "limits": dataclasses.asdict(reached),
        "repeats": [[result.as_json() for result in results] for results in repeats],
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1))
    print(f"\nsaved {asked.out}")
    return 1 if any(result.failed for results in repeats for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
