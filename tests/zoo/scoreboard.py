"""Which faults are caught, and which twins are falsely reported: `python tests/zoo/scoreboard.py [--seeds 20]`.

With `--file lines.jsonl` each exhibit is written there as it is done, and a second run goes on after the last one.
`--shard 1/2` takes every second exhibit, beginning with the first.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # not this folder: its names are plain words

import torch
from zoo.catalogue import EXHIBITS
from zoo.exhibit import Exhibit

from regard.laws import check
from regard.laws.catalog import LAWS


@dataclass
class Score:
    """What the laws say of one exhibit.

    Attributes:
        caught: each law that must catch the fault, and the seeds at which it does.
        accused: the twin's broken or flaky laws, in words.
        checks: the number of the twin's laws that were checked.
        absent: laws that are not in the catalog.
    """

    exhibit: Exhibit
    seeds: int
    caught: dict[str, int] = field(default_factory=dict)
    found: dict[str, str] = field(default_factory=dict)
    accused: list[str] = field(default_factory=list)
    idle: set[str] = field(default_factory=set)
    checks: int = 0
    absent: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def missed(self) -> list[str]:
        return [
            f"{law} ({count} of {self.seeds}: {self.found[law]})"
            for law, count in self.caught.items()
            if count < self.seeds
        ]


def score(exhibit: Exhibit, seeds: int = 1, fast: bool = True, alone: bool = False) -> Score:
    """Check the faulty one and its twin, at each seed."""
    known = {law.slug for law in LAWS}
    claims = [claim for claim in exhibit.claims if claim in known]
    laws = [law for law in exhibit.law if law in known]
    result = Score(exhibit, seeds, dict.fromkeys(laws, 0), dict.fromkeys(laws, ""))
    result.absent = sorted(set(exhibit.claims) - known)
    start = time.perf_counter()
    for seed in range(seeds):
        if laws:
            given = laws if alone else claims
            faulty = check(
                exhibit.build("faulty"), kind=exhibit.kind, claims=given, seed=seed, fast=fast, **exhibit.options
            )
            for law in laws:
                broken = faulty.verdicts[law].outcome == "broken"
                result.caught[law] += broken
                if not broken:
                    result.found[law] = str(faulty.verdicts[law])
        if claims:
            twin = check(
                exhibit.build("twin"), kind=exhibit.kind, claims=claims, seed=seed, fast=fast, **exhibit.options
            )
            result.checks += len(twin.verdicts)
            result.accused += [f"seed {seed}: {verdict}" for verdict in twin.failed]
            result.idle |= {f"{v.slug}: {v.reason}" for v in twin.verdicts if v.outcome == "not applicable"}
    result.seconds = time.perf_counter() - start
    return result


def as_line(found: Score) -> dict:
    """A score as it is written to a file, with the name of its exhibit."""
    return {**vars(found), "exhibit": found.exhibit.id, "idle": sorted(found.idle)}


def read_lines(file: Path | None, exhibits: list[Exhibit], seeds: int) -> list[Score | None]:
    """The scores that a file already has for as many seeds, in the order of the exhibits."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file is not None and file.exists() else []
    known = {line["exhibit"]: line for line in lines if line["seeds"] == seeds}
    return [
        Score(**{**known[each.id], "exhibit": each, "idle": set(known[each.id]["idle"])}) if each.id in known else None
        for each in exhibits
    ]


def totals(scores: list[Score]) -> str:
    caught = sum(not score.missed and bool(score.caught) for score in scores)
    accused, checks = sum(len(score.accused) for score in scores), sum(score.checks for score in scores)
    return f"caught {caught} of {len(scores)}, falsely accused {accused} of {checks} checks"


def table(scores: list[Score]) -> None:
    rows = []
    for each in scores:
        caught = ", ".join(law for law, count in each.caught.items() if count == each.seeds)
        accused = "; ".join(each.accused[:2]) + (f" and {len(each.accused) - 2} more" if len(each.accused) > 2 else "")
        absent = f"not written: {', '.join(each.absent)}" if each.absent else ""
        missed = "; ".join(filter(None, ["; ".join(each.missed), absent]))
        rows.append((each.exhibit.id, caught, missed, accused, f"{each.seconds:.1f}"))
    heading = ("exhibit", "caught by", "missed", "twin falsely accused", "s")
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [heading, *rows]) for i in range(len(heading))]
        for row in [heading, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    else:
        drawn = Table(*heading)
        for row in rows:
            drawn.add_row(*row)
        Console(width=160 if not sys.stdout.isatty() else None).print(drawn)


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--seeds", type=int, default=1)
    words.add_argument("--full", action="store_true", help="the whole search, not the fast one")
    words.add_argument("--alone", action="store_true", help="check faults against their law alone")
    words.add_argument("--idle", action="store_true", help="tell which of the twins' claims say nothing about them")
    words.add_argument("--shard", default="1/1", help="the part of the exhibits to look at, as in 1/2")
    words.add_argument("--file", type=Path, help="one line for each exhibit; those that stand there are not repeated")
    words.add_argument("names", nargs="*", help="exhibits; all if none are named")
    given = words.parse_args()
    torch.set_num_threads(1)
    chosen = [exhibit for exhibit in EXHIBITS if not given.names or exhibit.id in given.names]
    shard, shards = map(int, given.shard.split("/"))
    chosen = chosen[shard - 1 :: shards]
    scores = []
    for exhibit, known in zip(chosen, read_lines(given.file, chosen, given.seeds), strict=True):
        scores.append(known or score(exhibit, given.seeds, not given.full, given.alone))
        if given.file is not None and known is None:
            with given.file.open("a") as file:
                file.write(json.dumps(as_line(scores[-1])) + "\n")
    table(scores)
    if given.idle:
        for each in scores:
            for words_ in sorted(each.idle):
                print(f"{each.exhibit.id}: {words_}")
    print(totals(scores))
    return int(any(each.missed or each.accused for each in scores))


if __name__ == "__main__":
    raise SystemExit(main())
