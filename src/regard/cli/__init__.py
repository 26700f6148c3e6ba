"""The command `regard`: check, cost, show, lab, data, train, generate, translate and the book from a shell.

    regard check mypackage.attention:Attention --claims causality,padding
    regard cost transformers:BertModel --tokens 512

Exit codes: 0 if every claim holds, 1 if one is broken, 2 for a wrong command or input, 3 for an internal error.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib import metadata

from regard.cli.arguments import USAGE, Parser
from regard.cli.book import protect_answer
from regard.errors import RegardError

INTERNAL_ERROR, INTERRUPTED = 3, 130

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
  regard lab
  regard data kjv-luther
  regard train spatial --position quadratic --folder runs/quadratic
  regard train gpt my_text.txt --folder runs/mine
  regard generate runs/mine "Once upon"
  regard problem udl-12.1
  regard answer udl-12.1 "3*D**2 + 3*D"
  regard homework make --problems udl-12.1,udl-12.4 --seed 7
"""


def make_parser() -> Parser:
    """The parser of the whole command line."""
    from regard.cli import book, check, cost, cost_questions, data, errata, generate, lab, show, train

    parser = Parser(
        prog="regard",
        description="Check attention modules against laws, with the smallest counterexample; compute their cost as\n"
        "formulas and numbers; plot their attention maps; train models on text and images, and use them;\n"
        "show solved problems, and grade answers.",
        epilog=f"{EPILOG}\ntextbook questions, each with --help:\n  regard cost {cost_questions.format_questions()}\n",
    )
    parser.add_argument("--version", action="version", version=f"regard {_find_version()}")
    commands = parser.add_subparsers(
        dest="command",
        metavar="check | laws | cost | show | lab | data | train | generate | translate | "
        "problem | answer | homework | errata",
        required=True,
        parser_class=Parser,
    )
    check.add(commands)
    laws = commands.add_parser("laws", help="list every law with its equation")
    laws.set_defaults(run=check.list_laws)
    cost.add(commands)
    show.add(commands)
    lab.add(commands)
    data.add(commands)
    train.add(commands)
    generate.add(commands)
    book.add(commands)
    errata.add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, and return its exit code."""
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        args = make_parser().parse_args(protect_answer(words))
    except SystemExit as end:  # help, version, or a usage error
        return int(end.code or 0)
    try:
        return args.run(args)
    except RegardError as failure:
        print(f"regard: {failure}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("regard: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it
        sys.stderr.close()
        return INTERRUPTED
    except Exception:  # a bug in Regard: show the traceback
        traceback.print_exc()
        return INTERNAL_ERROR


def _find_version() -> str:
    try:
        return metadata.version("regard")
    except metadata.PackageNotFoundError:
        return "(not installed)"
