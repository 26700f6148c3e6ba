"""Save what the library computes on fixed inputs, and compare two such records bit for bit.

    python tools/results save before            # a few minutes of one core; --all adds the zoo and docs/findings.md
    python tools/results save after
    python tools/results compare before after   # ends with 1 if anything differs

A change that should not alter results is proved by it: outputs and gradients of every backend, layer and model, cached
decoding and generated text, conversions, cost formulas, verdicts of the laws, and the pixels of pictures.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: sums depend on the number of threads

PARTS = {
    "attention": "attention.record_attention",
    "layers": "modules.record_layers",
    "models": "modules.record_models",
    "convert": "modules.record_conversions",
    "cost": "cost.record_costs",
    "pictures": "pictures.record_pictures",
    "laws": "verdicts.record_verdicts",
    "zoo": "verdicts.record_zoo",
    "findings": "verdicts.record_findings",
}
ON_REQUEST = ("zoo", "findings")  # many minutes


def save(folder: Path, only: list[str], everything: bool) -> int:
    import torch
    from record import Record

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = only or [name for name in PARTS if everything or name not in ON_REQUEST]
    record = Record()
    for name in chosen:
        begin = time.perf_counter()
        module, function = PARTS[name].split(".")
        getattr(importlib.import_module(module), function)(record)
        print(f"{name:12} {time.perf_counter() - begin:6.1f} s", file=sys.stderr)
    record.save(folder)
    print(f"{len(record.tensors):,} tensors and {len(record.facts):,} facts in {folder}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="results", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    saving = commands.add_parser("save", help="compute and write everything into a folder")
    saving.add_argument("folder", type=Path)
    saving.add_argument("--only", nargs="+", choices=PARTS, default=[], help="these parts alone")
    saving.add_argument("--all", action="store_true", help="the zoo and the commands of docs/findings.md too")
    comparing = commands.add_parser("compare", help="what differs between two folders")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--show", type=int, default=20, metavar="N", help="differences to print for each section")
    words = parser.parse_args()
    if words.command == "save":
        return save(words.folder, words.only, words.all)
    from compare import compare

    return compare(words.old, words.new, words.show)


if __name__ == "__main__":
    raise SystemExit(main())
