"""`regard cost QUESTION`: tables that answer textbook questions, and published models by name."""

from __future__ import annotations

import argparse
import dataclasses
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.cli.arguments import Parser
from regard.cli.output import check_writable, write_json
from regard.errors import InputError

if TYPE_CHECKING:
    from regard.cost_model.textbook import Table


class SizeOption(NamedTuple):
    """A size as an option: its name, its symbol, its meaning and its default.

    `also` is the symbol of the textbook as a second name: `--n` is `--tokens`.
    """

    name: str
    symbol: str
    meaning: str
    default: int | None = None
    required: bool = True
    sides: int = 1
    also: str | None = None


class Question(NamedTuple):
    """A question: its help text, its sizes, an example, and the function that makes its table."""

    help: str
    sizes: tuple[SizeOption, ...]
    example: str
    make: Callable[[argparse.Namespace], Table]


TOKENS = SizeOption("tokens", "N", "sequence length", also="n")
WIDTH = SizeOption("width", "D", "width (hidden size)", also="d")
GRID = SizeOption("grid", "R W", "rows and columns of patches", sides=2)
CHANNELS = SizeOption("channels", "C", "channels of a patch")


def _make_table_function(name: str, *given: str) -> Callable[[argparse.Namespace], Table]:
    """A function that makes the table `name` from the options `given`."""

    def make(args: argparse.Namespace) -> Table:
        from regard.cost_model import textbook

        return getattr(textbook, name)(**{each: getattr(args, each) for each in given})

    return make


def _make_davit_table(args: argparse.Namespace) -> Table:
    from regard.cost_model import textbook

    return textbook.davit(tuple(args.grid), args.channels, args.window, args.group_dim)


def _make_patterns_table(args: argparse.Namespace) -> Table:
    from regard.cost_model import textbook

    return textbook.patterns(tuple(args.grid), args.channels)


def _make_encoding_table(args: argparse.Namespace) -> Table:
    from regard.cost_model import textbook

    if (args.tokens is None) == (args.grid is None):
        raise InputError(
            "the number of tokens is missing or given twice.",
            asked="neither tokens nor a grid" if args.grid is None else "both tokens and a grid",
            because="tokens are a sequence of N, or a grid of R by W",
            instead="--tokens 1024, or --grid 32 32",
        )
    return textbook.encoding(args.tokens if args.grid is None else tuple(args.grid), args.dim)


def _make_parallel_table(args: argparse.Namespace) -> Table:
    """Depth in the symbols of the source: T or X by Y tokens, J channels, K heads of U for queries and I for values."""
    from regard.cost_model import textbook
    from regard.cost_model.quantity import Quantity
    from regard.cost_model.symbols import size_symbols
    from regard.cost_model.textbook.table import Row, sizes

    sides = (args.X, args.Y)
    if (args.T is None, None in sides) not in ((True, False), (False, True)) or sides.count(None) == 1:
        raise InputError(
            "the number of tokens is missing or given twice.",
            asked=", ".join(f"{name}={getattr(args, name)}" for name in "TXY" if getattr(args, name) is not None),
            because="tokens are a sequence of T, or a grid of X by Y",
            instead="--T 1024, or --X 32 --Y 32",
        )
    if args.U is None and args.J % args.K:
        raise InputError(
            "the channels cannot be shared evenly between the heads.",
            asked=f"J={args.J}, K={args.K}",
            because=f"{args.J} is no multiple of {args.K}, and a head has J / K channels unless --U is given",
            instead=f"--U {-(-args.J // args.K)}, or a number of heads that divides the channels",
        )
    table = textbook.parallel(sides if args.T is None else args.T, args.J, args.K, args.U)
    work = table.row("work (MAC)")
    if args.I is not None:
        H, D, d, e, N, R, W = size_symbols("H D d e N R W")
        tokens = R * W if args.T is None else N
        values = work.quantity.values | sizes(d=args.U or args.J // args.K, e=args.I)
        formula = tokens * D * H * (2 * d + e) + tokens**2 * H * (d + e)
        work = Row(work.label, (Quantity(formula, values),))
    chains = "sums as chains"
    rows = [row for row in table.rows if row.label != work.label and row.label.startswith(chains) == args.serial]
    return _rename_symbols(dataclasses.replace(table, rows=(*rows, work)))


# The symbols of the source, TTIC 31230: the options of `parallel`, and printed in its table.
PARALLEL = {
    "T": "sequence length",
    "J": "width (hidden size)",
    "K": "heads",
    "U": "head dim of queries and keys",
    "I": "head dim of values",
    "X": "rows of the grid",
    "Y": "columns of the grid",
}


def _rename_symbols(table: Table) -> Table:
    """The table in the symbols of its source."""
    import sympy

    from regard.cost_model.quantity import Quantity
    from regard.cost_model.symbols import size_symbols
    from regard.cost_model.textbook.table import Row

    theirs = (sympy.Symbol(name, positive=True, integer=True) for name in PARALLEL)
    names: dict[Any, Any] = dict(zip(size_symbols("N D H d e R W"), theirs, strict=True))

    def renamed(cell: Quantity | None) -> Quantity | None:
        if cell is None:
            return None
        values = {names.get(symbol, symbol): number for symbol, number in cell.values.items()}
        return Quantity(cell.formula.xreplace(names), values, cell.unit)

    rows = tuple(Row(row.label, tuple(map(renamed, row.cells))) for row in table.rows)
    return dataclasses.replace(table, rows=rows, meanings=PARALLEL)


HEADS = SizeOption("heads", "H", "heads")
QUESTIONS: dict[str, Question | None] = {
    "attention": Question(
        "parameters of self-attention, and of a fully connected layer between as many numbers",
        (TOKENS, WIDTH),
        "--tokens 256 --width 512",
        _make_table_function("attention", "tokens", "width"),
    ),
    "mha": Question(
        "what heads cost: projections, scores, stored weights",
        (TOKENS, WIDTH, HEADS, SizeOption("head-dim", "d", "head dim; D / H if not given", required=False)),
        "--tokens 256 --width 512 --heads 8",
        _make_table_function("mha", "tokens", "width", "heads", "head_dim"),
    ),
    "append": Question(
        "one decode step after N tokens in the KV cache",
        (TOKENS._replace(meaning="tokens in the cache, before the new one"), WIDTH),
        "--tokens 255 --width 512",
        _make_table_function("append", "tokens", "width"),
    ),
    "linear": Question(
        "features instead of exponentials, beside a softmax",
        (TOKENS, WIDTH),
        "--tokens 4096 --width 64",
        _make_table_function("linear", "tokens", "width"),
    ),
    "merge": Question(
        "value and output matrices of heads, apart or multiplied into one",
        (TOKENS, WIDTH, HEADS, SizeOption("value-dim", "e", "head dim of values; D / H if not given", required=False)),
        "--tokens 256 --width 512 --heads 8",
        _make_table_function("merge", "tokens", "width", "heads", "value_dim"),
    ),
    "davit": Question(
        "patches that attend to patches, and channels to channels",
        (
            GRID,
            CHANNELS,
            SizeOption("window", "w", "window size (7)", 7, False),
            SizeOption("group-dim", "d", "channels of a group (32)", 32, False),
        ),
        "--grid 16 16 --channels 512 --window 7 --group-dim 32",
        _make_davit_table,
    ),
    "encoding": Question(
        "operations of relative scores, entry by entry and with queries and keys made once",
        (
            TOKENS._replace(required=False),
            SizeOption("dim", "D", "width (hidden size)", also="d"),
            GRID._replace(meaning="rows and columns of pixels, instead of N", required=False),
        ),
        "--tokens 1024 --dim 64",
        _make_encoding_table,
    ),
    "parallel": Question(
        "steps of self-attention if everything that can run at once does",
        (
            SizeOption("T", "T", PARALLEL["T"], required=False),
            SizeOption("J", "J", PARALLEL["J"]),
            SizeOption("K", "K", PARALLEL["K"]),
            SizeOption("U", "U", f"{PARALLEL['U']}; J / K if not given", required=False),
            SizeOption("I", "I", f"{PARALLEL['I']}; U if not given", required=False),
            SizeOption("X", "X", f"{PARALLEL['X']}, instead of T", required=False),
            SizeOption("Y", "Y", f"{PARALLEL['Y']}, instead of T", required=False),
        ),
        "--T 1024 --J 512 --K 8",
        _make_parallel_table,
    ),
    "patterns": Question(
        "sparse patterns for vision transformers: pairs, products, and layers to a full receptive field",
        (GRID, CHANNELS),
        "--grid 16 16 --channels 512",
        _make_patterns_table,
    ),
    "panels": Question(
        "pairs of the patterns that Prince draws in figure 12.15",
        (
            TOKENS,
            SizeOption("radius", "r", "of the windows to both sides (1)", 1, False),
            SizeOption("width", "w", "tokens that a window to the past holds (3)", 3, False),
            SizeOption("count", "g", "global tokens (2)", 2, False),
        ),
        "--tokens 256",
        _make_table_function("panels", "tokens", "radius", "width", "count"),
    ),
    "parameters": Question(
        "parameters of multi-head attention whose sizes are all free",
        (
            HEADS,
            SizeOption("input", "D", "width of the input"),
            SizeOption("hidden", "d", "head dim of queries and keys"),
            SizeOption("value", "e", "head dim of values"),
            SizeOption("output", "O", "width of the output"),
        ),
        "--heads 8 --input 512 --hidden 64 --value 64 --output 512",
        _make_table_function("parameters", "heads", "input", "hidden", "value", "output"),
    ),
    "model": None,
}
MODEL_HELP = "a published model by its name: gpt2, bert-base, vit-b16, davit-tiny, ..."


def format_questions() -> str:
    """The names of the textbook questions, in one line."""
    return " | ".join(name for name, word in QUESTIONS.items() if word is not None)


def list_questions() -> list[str]:
    """A line for each question."""
    return [f"{name:<12}{MODEL_HELP if word is None else word.help}" for name, word in QUESTIONS.items()]


def run(name: str, rest: list[str]) -> int:
    """Make the table of a question, print and write it; return the exit status."""
    word = QUESTIONS[name]
    if word is None:
        return _run_model(rest)
    args = make_parser(name, word).parse_args(rest)
    check_writable(args.json)
    table = word.make(args)
    if args.json is not None:
        write_json(table.to_dict(), args.json)
    if args.json != "-":
        from regard.render.terminal import print_fitted

        print_fitted(table.render)
    return 0


def make_parser(name: str, word: Question) -> argparse.ArgumentParser:
    """The parser of one question."""
    from regard.cli.cost import parse_size

    parser = Parser(
        prog=f"regard cost {name}",
        description=f"{word.help[0].upper()}{word.help[1:]}.",
        epilog=f"example:\n  regard cost {name} {word.example}",
        allow_abbrev=False,
    )
    for size in word.sizes:
        many: dict[str, Any] = {"nargs": size.sides, "metavar": tuple(size.symbol.split())} if size.sides > 1 else {}
        parser.add_argument(
            f"--{size.name}",
            *([] if size.also is None else [f"--{size.also}"]),
            **{"metavar": size.symbol, **many},
            type=parse_size,
            default=size.default,
            required=size.required,
            help=size.meaning,
        )
    if name == "parallel":
        parser.add_argument(
            "--serial", "--serial-dot", action="store_true", help="sums one after the other instead of as trees"
        )
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON; - prints it instead")
    return parser


# Published models


def _run_model(rest: list[str]) -> int:
    """`regard cost model NAME`: a published model, with the options of any other target."""
    from regard.cli import cost
    from regard.cli.published import IMAGES, MODELS, build

    args = cost.make_parser("model").parse_args(rest)
    if args.target not in MODELS:
        raise InputError(
            f"no model is called {args.target!r}.",
            asked=f"regard cost model {args.target}",
            because="a published model has one of the names below",
            instead="\n".join(textwrap.wrap(", ".join(MODELS), 88)) + "\nor transformers:Name, timm:name",
        )
    if args.target.startswith("davit-") and args.image is None:
        args.image = IMAGES.get(args.target, (224, 224))
    return cost.run_target(args, lambda: build(args.target, args.image, empty=not args.measure))
