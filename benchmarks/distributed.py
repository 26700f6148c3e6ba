"""Two processes of one thread against one process of two threads: what spreading a run over processes costs.

python -m benchmarks.distributed [--rounds N] [--seconds S] [--repeat R] [--only TEXT] [--out FILE]

The machine is the same, so 1.0 would mean that nothing is lost to messages and to work done twice. Both sides compute
the same step or the same attention; outputs are compared before they are timed. A case that loses is printed like any
other, with a mark.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import ExitStack

from benchmarks.runner import make_parser, run_cases, save


def main() -> int:
    args = make_parser(__doc__, rounds=5, seconds=20.0, out="out/benchmarks/distributed.json").parse_args()
    os.environ.pop("OMP_PROC_BIND", None)  # of two processes, both would bind their thread to the first core

    from benchmarks import distributed_cases as cases
    from benchmarks import limits, machine, report
    from benchmarks.results import Result, Verdict
    from benchmarks.timing import race
    from tests.distributed.processes import start_processes

    warnings.filterwarnings("ignore")
    names = [name for name in (*cases.SPEED, *cases.MEMORY) if args.only.lower() in name.lower()]
    if not names:
        print(f"no case contains {args.only!r}; the cases are {', '.join((*cases.SPEED, *cases.MEMORY))}")
        return 2
    described, reached = machine.describe(), limits.measure()
    print(report.header(described, reached, "auto"), flush=True)

    with ExitStack() as stack:
        one = stack.enter_context(start_processes(1, threads=os.cpu_count() or 1))
        two = stack.enter_context(start_processes(2))
        four = stack.enter_context(start_processes(4)) if any(name in cases.MEMORY for name in names) else None

        def contest(name: str) -> Result:
            case = cases.SPEED[name]
            for processes in (one, two):
                processes.run(cases.prepare, case=case)
            single, shared = one.run(cases.run_once), two.run(cases.run_once)
            error = cases.compare(case, single, shared)
            if not error < case.tolerance:
                return Result(name, failed=f"the results differ by {error:.1e}")
            result = Result(name, case.about, notes=[f"results differ by {error:.0e}"])
            runs = {"2 processes": lambda: two.run(cases.step), "1 process": lambda: one.run(cases.step)}
            result.timings = race(runs, rounds=args.rounds, seconds=args.seconds)
            times = {who: timing.seconds for who, timing in result.timings.items()}
            result.verdicts = [Verdict(name, "1 process", times["1 process"] / times["2 processes"], case.bar)]
            return result

        def measure(name: str) -> Result:
            if name in cases.SPEED:
                return contest(name)
            assert four is not None
            case = cases.MEMORY[name]
            peaks = [max(processes.run(cases.measure_peak, case=case)) for processes in (one, four)]
            result = Result(name, case.about)
            result.notes.append(f"{peaks[1] / 1e6:.1f} MB for each of 4 processes against {peaks[0] / 1e6:.1f} MB")
            result.verdicts = [Verdict(name, "1 process", peaks[1] / peaks[0], case.bar, at_least=False)]
            return result

        repeats = run_cases(names, measure, args.repeat, reached)
    return save(args.out, described, reached, repeats)


if __name__ == "__main__":
    sys.exit(main())
