"""A page with what every command of `regard` says with --help."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

WIDTH = 96


def make_page() -> str:
    from regard.cli import make_parser

    os.environ["COLUMNS"] = str(WIDTH)
    parts = ["# Command line", "What each command says with `--help`."]
    for name, parser in walk(make_parser()):
        parts += [f"## {name}", f"```text\n{parser.format_help().rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


def walk(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A parser and those of its commands, in order."""
    yield parser.prog, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in dict.fromkeys(action.choices.values()):
                yield from walk(child)
