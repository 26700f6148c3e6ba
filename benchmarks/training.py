"""Training on the CPU: tokens per second against plain torch and Hugging Face, and the memory that dropout costs.

python -m benchmarks.training [--rounds N] [--seconds S] [--repeat R] [--only TEXT] [--out FILE]

Both sides begin with the same weights and read the same data, and their first losses are compared before they are
timed. A case that loses is printed like any other, with a mark. The exit code says whether every case ran and was
correct.
"""

from __future__ import annotations

import sys
import warnings

from benchmarks.runner import bind_threads, make_parser, run_cases, save

MOST_ERROR = 1e-4  # relative, of a loss in float32
MEMORY = "BERT, dropout 0.1, 2,048 tokens"


def main() -> int:
    args = make_parser(__doc__, rounds=5, seconds=20.0, out="out/benchmarks/training.json").parse_args()
    bind_threads()

    from benchmarks import limits, machine, report
    from benchmarks.machine import Watch
    from benchmarks.results import OURS, Result, Verdict
    from benchmarks.timing import race
    from benchmarks.training_cases import CASES, TrainingCase

    warnings.filterwarnings("ignore")
    names = [name for name in (*CASES, MEMORY) if args.only.lower() in name.lower()]
    if not names:
        print(f"no case contains {args.only!r}; the cases are {', '.join((*CASES, MEMORY))}")
        return 2
    described, reached = machine.describe(), limits.measure()
    print(report.header(described, reached, "auto"), flush=True)

    def contest(case: TrainingCase) -> Result:
        if not case.error < MOST_ERROR:
            return Result(case.name, failed=f"the first losses differ by {case.error:.1e}")
        result = Result(case.name, case.about, gflop=case.gflop, notes=list(case.notes))
        result.notes.append(f"first losses differ by {case.error:.0e}")
        with Watch() as watch:
            result.timings = race({OURS: case.ours} | case.peers, rounds=args.rounds, seconds=args.seconds)
        result.load = watch.load
        rates = {who: case.tokens / timing.seconds for who, timing in result.timings.items()}
        result.notes.append("; ".join(f"{who} {rate:,.0f} tokens/s" for who, rate in rates.items()))
        fastest = max(case.peers, key=lambda who: rates[who])
        result.verdicts = [Verdict(case.name, fastest, rates[OURS] / rates[fastest], case.bar)]
        return result

    def measure(name: str) -> Result:
        return measure_dropout_memory() if name == MEMORY else contest(CASES[name]())

    repeats = run_cases(names, measure, args.repeat, reached)
    return save(args.out, described, reached, repeats)


def measure_dropout_memory():
    """The peak that torch's allocator gives out in a training step, with dropout over without."""
    import torch

    from benchmarks.results import Result, Verdict
    from regard.models import Bert, BertConfig
    from tests.cost_model.allocator import training_peak

    peaks = {}
    for dropout in (0.0, 0.1):
        torch.manual_seed(0)
        model = Bert(BertConfig.bert("mini", context_length=2048, dropout=dropout))
        peaks[dropout] = training_peak(model, (torch.randint(0, 30000, (1, 2048)),))
    found = Result(MEMORY, "peak of a training step over the same without dropout")
    found.notes.append(f"{peaks[0.1] / 1e6:.1f} MB against {peaks[0.0] / 1e6:.1f} MB")
    found.verdicts = [Verdict(MEMORY, "dropout 0", peaks[0.1] / peaks[0.0], 1.1, at_least=False)]
    return found


if __name__ == "__main__":
    sys.exit(main())
