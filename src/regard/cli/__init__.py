"""The command `regard`: check what an attention claims, say what it costs, and train, from a shell.

    regard check mypackage.attention:Attention --claims causality,padding
    regard cost transformers:BertModel --tokens 512

Ends with 0 if every claim holds, 1 if one is broken, 2 if the question cannot be asked, 3 if the command itself failed.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata

from regard.errors import RegardError

HOLDS, BROKEN, USAGE, OWN_FAULT, INTERRUPTED = 0, 1, 2, 3, 130

EPILOG = """examples:
  regard check mypackage.attention:Attention
  regard check mypackage.attention:attend --kind operator --claims causality,padding
  regard check transformers:GPT2LMHeadModel --html report.html
  regard check timm:vit_tiny_patch16_224 --probe
  regard laws
  regard cost transformers:BertModel --tokens 512
  regard cost curve "Full()" "Window(128, 0)" linear --dim 64 --picture out.svg
  regard cost attention --tokens 256 --width 512
  regard show runs/quadratic -o heads.svg
  regard train spatial --position quadratic --folder runs/quadratic
"""


class Parser(argparse.ArgumentParser):
    """argparse, with errors in the words of this house."""

    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"regard: {message}.\n  instead  {self.prog} --help", file=sys.stderr)
        raise SystemExit(USAGE)


def parser() -> argparse.ArgumentParser:
    """The words that the command understands."""
    from regard.cli import check, cost, cost_words, show, train

    whole = Parser(
        prog="regard",
        description="Check attention against its laws: the smallest case in which a claim does not hold; and say what\n"
        "attentions, layers and models cost: formulas, numbers and the parts they are made of.",
        epilog=f"{EPILOG}\ntextbook questions, each with --help:\n  regard cost {cost_words.textbook_questions()}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"regard {_version()}")
    commands = whole.add_subparsers(
        dest="command", metavar="check | laws | cost | show | train", required=True, parser_class=Parser
    )
    check.add(commands)
    laws = commands.add_parser("laws", help="list every law with its equation")
    laws.set_defaults(run=check.list_laws)
    cost.add(commands)
    show.add(commands)
    train.add(commands)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return what the shell is told."""
    try:
        words = parser().parse_args(arguments)
    except SystemExit as end:  # help, version, or words that make no sense
        return int(end.code or 0)
    try:
        return words.run(words)
    except RegardError as failure:
        print(f"regard: {failure}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("regard: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
        return INTERRUPTED
    except Exception:  # not the user's fault; a traceback is what helps to mend it
        traceback.print_exc()
        return OWN_FAULT


def _version() -> str:
    try:
        return metadata.version("regard")
    except metadata.PackageNotFoundError:
        return "(not installed)"
