"""Regard inside models of Hugging Face and timm on the CPU, against the best that these libraries have built in.

python -m benchmarks.integrations [--rounds N] [--seconds S] [--repeat R] [--only TEXT] [--out FILE]

Both sides have the same weights and inputs, and their outputs or first losses are compared before they are timed. A
case that loses is printed like any other, with a mark. The exit code says whether every case ran and was correct.
"""

from __future__ import annotations

import sys

from benchmarks.runner import bind_threads, make_parser

MOST_ERROR = 1e-3  # relative: float32 through a dozen layers


def main() -> int:
    args = make_parser(__doc__, rounds=3, seconds=8.0, out="out/benchmarks/integrations.json").parse_args()
    bind_threads()

    from benchmarks.integration_cases import CASES
    from benchmarks.model_contest import run_contests

    return run_contests(CASES, args, most_error=MOST_ERROR, warm_up=1)


if __name__ == "__main__":
    sys.exit(main())
