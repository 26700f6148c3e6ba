"""Whole models on the CPU against Hugging Face and timm, each ratio beside the bar it has to reach.

python -m benchmarks.models [--rounds N] [--seconds S] [--repeat R] [--only TEXT] [--out FILE]

Both sides have the same weights and inputs, and their outputs are compared before they are timed. A case that loses is
printed like any other, with a mark. The exit code says whether every case ran and was correct.
"""

from __future__ import annotations

import sys
import warnings

from benchmarks.runner import bind_threads, make_parser, run_cases, save

MOST_ERROR = 1e-3  # relative: float32 through a dozen layers


def main() -> int:
    args = make_parser(__doc__, rounds=5, seconds=10.0, out="out/benchmarks/models.json").parse_args()
    bind_threads()

    from benchmarks import limits, machine, report
    from benchmarks.machine import Watch
    from benchmarks.model_cases import CASES, ModelCase
    from benchmarks.results import OURS, Result, Verdict
    from benchmarks.timing import race

    warnings.filterwarnings("ignore")
    names = [name for name in CASES if args.only.lower() in name.lower()]
    if not names:
        print(f"no case contains {args.only!r}; the cases are {', '.join(CASES)}")
        return 2
    described, reached = machine.describe(), limits.measure()
    print(report.header(described, reached, "auto"), flush=True)

    def contest(case: ModelCase) -> Result:
        if not case.error < MOST_ERROR:
            return Result(case.name, failed=f"outputs differ by {case.error:.1e}")
        result = Result(case.name, case.about, gflop=case.gflop, errors={}, notes=list(case.notes))
        result.notes.append(f"outputs differ by {case.error:.0e} of the largest")
        with Watch() as watch:
            result.timings = race({OURS: case.ours} | case.peers, rounds=args.rounds, seconds=args.seconds, warm_up=1)
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

    repeats = run_cases(names, lambda name: contest(CASES[name]()), args.repeat, reached)
    return save(args.out, described, reached, repeats)


if __name__ == "__main__":
    sys.exit(main())
