"""Whole models on the CPU against Hugging Face, timm and other engines, each ratio beside the bar it has to reach.

python -m benchmarks.models [--rounds N] [--seconds S] [--repeat R] [--only TEXT] [--out FILE]

Both sides have the same weights and inputs, and their outputs are compared before they are timed. A case that loses is
printed like any other, with a mark. The exit code says whether every case ran and was correct.
"""

from __future__ import annotations

import functools
import sys

from benchmarks.runner import bind_threads, make_parser

MOST_ERROR = 1e-3  # relative: float32 through a dozen layers


def main() -> int:
    args = make_parser(__doc__, rounds=5, seconds=10.0, out="out/benchmarks/models.json").parse_args()
    bind_threads()

    from benchmarks.decode_figures import FIGURES
    from benchmarks.model_cases import CASES
    from benchmarks.model_contest import run_contests

    figures = {name: functools.partial(measure, args) for name, measure in FIGURES.items()}
    return run_contests(CASES, args, most_error=MOST_ERROR, warm_up=1, figures=figures)


if __name__ == "__main__":
    sys.exit(main())
