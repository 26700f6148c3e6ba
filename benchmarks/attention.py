"""Attention on the CPU against its peers, the machine and itself, each figure beside the bar it has to reach.

python -m benchmarks.attention [--rounds N] [--seconds S] [--repeat R] [--only TEXT] [--no-flex] [--out FILE]

Every competitor's result is checked before it is timed. A case that loses is printed like any other, with a mark. The
exit code says whether every case ran and was correct, not whether it was fast.
"""

from __future__ import annotations

import sys
import warnings

from benchmarks.runner import bind_threads, make_parser, run_cases, save

BACKEND = "native"


def main() -> int:
    parser = make_parser(__doc__, rounds=7, seconds=3.0, out="out/benchmarks/attention.json")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    parser.add_argument("--backend", default=BACKEND, help="our backend (linear attention always uses its own)")
    parser.add_argument("--no-flex", action="store_true", help="do not compile FlexAttention; its bars stay unmeasured")
    args = parser.parse_args()
    bind_threads()

    from benchmarks import limits, machine, plot, report
    from benchmarks.cases import table
    from benchmarks.contest import Settings, contest, flex_is_off
    from benchmarks.figures import FIGURES
    from benchmarks.results import Result

    cases = {case.name: case for case in table()}
    names = [name for name in (*cases, *FIGURES) if args.only.lower() in name.lower()]
    if args.list or not names:
        print("\n".join(names or (f"no case contains {args.only!r}; the cases are", *cases, *FIGURES)))
        return 0 if names else 2
    # torch reports on its compiler's choices; the table is for figures.
    warnings.filterwarnings("ignore", module="torch")
    described, reached = machine.describe(), limits.measure()
    settings = Settings(args.backend, args.rounds, args.seconds, reached, flex_is_off(not args.no_flex))
    print(report.header(described, reached, args.backend), flush=True)

    def measure(name: str) -> Result:
        return contest(cases[name], settings) if name in cases else FIGURES[name](settings)

    repeats = run_cases(names, measure, args.repeat, reached)
    ratios = [
        {"case": case, "against": against, "bar": verdicts[0].bar, "values": [v.value for v in verdicts]}
        for (case, against), verdicts in report.collect(repeats).items()
    ]
    status = save(args.out, described, reached, repeats, backend=args.backend, ratios=ratios)
    picture = args.out.with_suffix(".png")
    title = f"regard {args.backend}, {described['processor']}, torch {described['torch']}"
    missing = plot.draw(repeats, title, picture)
    print(f"no picture: {missing}" if missing else f"saved {picture}")
    return status


if __name__ == "__main__":
    sys.exit(main())
