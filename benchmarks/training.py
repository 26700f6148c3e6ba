"""Training on the CPU: tokens per second against plain torch and Hugging Face, and the memory that dropout costs.

python -m benchmarks.training [--rounds N] [--seconds S] [--repeat R] [--only TEXT] [--out FILE]

Both sides begin with the same weights and read the same data, and their first losses are compared before they are
timed. A case that loses is printed like any other, with a mark. The exit code says whether every case ran and was
correct.
"""

from __future__ import annotations

import sys

from benchmarks.runner import bind_threads, make_parser

MOST_ERROR = 1e-4  # relative, of a loss in float32
MEMORY = "BERT, dropout 0.1, 2,048 tokens"


def main() -> int:
    args = make_parser(__doc__, rounds=5, seconds=20.0, out="out/benchmarks/training.json").parse_args()
    bind_threads()

    from benchmarks.model_contest import run_contests
    from benchmarks.training_cases import CASES

    figures = {MEMORY: measure_dropout_memory}
    return run_contests(CASES, args, most_error=MOST_ERROR, warm_up=2, figures=figures)


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
    result = Result(MEMORY, "peak of a training step over the same without dropout")
    result.notes.append(f"{peaks[0.1] / 1e6:.1f} MB against {peaks[0.0] / 1e6:.1f} MB")
    result.verdicts = [Verdict(MEMORY, "dropout 0", peaks[0.1] / peaks[0.0], 1.1, at_least=False)]
    return result


if __name__ == "__main__":
    sys.exit(main())
