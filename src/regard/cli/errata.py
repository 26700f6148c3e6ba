"""`regard errata [ID]`: mistakes of the problem sets, the case in which each fails, and its correction."""

from __future__ import annotations

import argparse
from typing import Any

DESCRIPTION = """List the mistakes of the problem sets, or show and run those of ID: an entry, a problem or a source.

An entry is run on cases of rising size: the claim must fail in one of them, the correction must hold in all.
"""
BROKEN = 1


def add(commands: Any) -> None:
    """Add the command `errata`."""
    parser = commands.add_parser(
        "errata",
        help="list the mistakes of the problem sets, and run them",
        description=DESCRIPTION,
        epilog="examples:\n  regard errata\n  regard errata udl-12.1\n  regard errata --run",
    )
    parser.add_argument("id", metavar="ID", nargs="?", help="an entry, a problem or a source")
    parser.add_argument(
        "--run", dest="run_entries", action="store_true", help="run all entries, and print what was found"
    )
    parser.set_defaults(run=run_errata)


def run_errata(args: argparse.Namespace) -> int:
    """Print the list, or entries with what running them shows; 1 if one could not be proved."""
    from regard.book.errata import list_errata
    from regard.book.errata.report import format_entry, format_list

    entries = list_errata(args.id)
    if args.id is None and not args.run_entries:
        print(format_list(entries))
        print(f"\n{len(entries)} entries; regard errata ID shows and runs one, regard errata --run all of them")
        return 0
    proved = 0
    for number, entry in enumerate(entries):
        outcome = entry.run()
        proved += outcome.is_proved
        print(("\n" if number else "") + format_entry(entry, outcome))
    if len(entries) > 1:
        print(f"\n{proved} of {len(entries)}: the claim fails and the correction holds")
    return 0 if proved == len(entries) else BROKEN
