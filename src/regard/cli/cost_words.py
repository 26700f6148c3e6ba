"""`regard cost WORD`: the tables that textbooks ask for, and the published models by their names."""

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


class Size(NamedTuple):
    """An option that is a size: its name, its letter, what it means, and its number if it has one by itself.

    `also` is the letter by which the books ask: `--n` is `--tokens`.
    """

    name: str
    letter: str
    meaning: str
    default: int | None = None
    required: bool = True
    sides: int = 1
    also: str | None = None


class Word(NamedTuple):
    """A table: what it answers, its sizes, an example, and who makes it."""

    help: str
    sizes: tuple[Size, ...]
    example: str
    make: Callable[[argparse.Namespace], Table]


TOKENS = Size("tokens", "N", "sequence length", also="n")
WIDTH = Size("width", "D", "width (hidden size)", also="d")
GRID = Size("grid", "R W", "rows and columns of patches", sides=2)
CHANNELS = Size("channels", "C", "channels of a patch")


def _book(name: str, *given: str) -> Callable[[argparse.Namespace], Table]:
    """The table of this name, from the sizes of these names."""

    def make(asked: argparse.Namespace) -> Table:
        from regard.cost_model import textbook

        return getattr(textbook, name)(**{each: getattr(asked, each) for each in given})

    return make


def _davit(asked: argparse.Namespace) -> Table:
    from regard.cost_model import textbook

    return textbook.davit(tuple(asked.grid), asked.channels, asked.window, asked.group_dim)


def _patterns(asked: argparse.Namespace) -> Table:
    from regard.cost_model import textbook

    return textbook.patterns(tuple(asked.grid), asked.channels)


def _encoding(asked: argparse.Namespace) -> Table:
    from regard.cost_model import textbook

    if (asked.tokens is None) == (asked.grid is None):
        raise InputError(
            "it is not clear how many tokens there are.",
            asked="neither tokens nor a grid" if asked.grid is None else "both tokens and a grid",
            because="tokens are a sequence of N, or a grid of R by W",
            instead="--tokens 1024, or --grid 32 32",
        )
    return textbook.encoding(asked.tokens if asked.grid is None else tuple(asked.grid), asked.dim)


def _parallel(asked: argparse.Namespace) -> Table:
    """Depth in the letters of the source: T or X by Y tokens, J channels, K heads of U for queries and I for values."""
    from regard.cost_model import textbook
    from regard.cost_model.quantity import Quantity
    from regard.cost_model.symbols import size_symbols
    from regard.cost_model.textbook.table import Row, sizes

    sides = (asked.X, asked.Y)
    if (asked.T is None, None in sides) not in ((True, False), (False, True)) or sides.count(None) == 1:
        raise InputError(
            "it is not clear how many tokens there are.",
            asked=", ".join(f"{name}={getattr(asked, name)}" for name in "TXY" if getattr(asked, name) is not None),
            because="tokens are a sequence of T, or a grid of X by Y",
            instead="--T 1024, or --X 32 --Y 32",
        )
    if asked.U is None and asked.J % asked.K:
        raise InputError(
            "the channels cannot be shared evenly between the heads.",
            asked=f"J={asked.J}, K={asked.K}",
            because=f"{asked.J} is no multiple of {asked.K}, and a head has J / K channels if nothing is said",
            instead=f"--U {-(-asked.J // asked.K)}, or a number of heads that divides the channels",
        )
    table = textbook.parallel(sides if asked.T is None else asked.T, asked.J, asked.K, asked.U)
    work = table.row("work (MAC)")
    if asked.I is not None:
        H, D, d, e, N, R, W = size_symbols("H D d e N R W")
        seen = R * W if asked.T is None else N
        values = work.quantity.values | sizes(d=asked.U or asked.J // asked.K, e=asked.I)
        formula = seen * D * H * (2 * d + e) + seen**2 * H * (d + e)
        work = Row(work.label, (Quantity(formula, values),))
    chains = "sums as chains"
    rows = [row for row in table.rows if row.label != work.label and row.label.startswith(chains) == asked.serial]
    return _in_letters(dataclasses.replace(table, rows=(*rows, work)))


# The letters of the source, TTIC 31230, which are the options of `parallel`: typed, and printed.
PARALLEL = {
    "T": "sequence length",
    "J": "width (hidden size)",
    "K": "heads",
    "U": "head dim of queries and keys",
    "I": "head dim of values",
    "X": "rows of the grid",
    "Y": "columns of the grid",
}


def _in_letters(table: Table) -> Table:
    """The table in the letters of its source."""
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


HEADS = Size("heads", "H", "heads")
WORDS: dict[str, Word | None] = {
    "attention": Word(
        "parameters of self-attention, and of a fully connected layer between as many numbers",
        (TOKENS, WIDTH),
        "--tokens 256 --width 512",
        _book("attention", "tokens", "width"),
    ),
    "mha": Word(
        "what heads cost: projections, scores, stored weights",
        (TOKENS, WIDTH, HEADS, Size("head-dim", "d", "head dim; D / H if not given", required=False)),
        "--tokens 256 --width 512 --heads 8",
        _book("mha", "tokens", "width", "heads", "head_dim"),
    ),
    "append": Word(
        "one token more, after N in the KV cache",
        (TOKENS._replace(meaning="tokens in the cache, before the new one"), WIDTH),
        "--tokens 255 --width 512",
        _book("append", "tokens", "width"),
    ),
    "linear": Word(
        "features instead of exponentials, beside a softmax",
        (TOKENS, WIDTH),
        "--tokens 4096 --width 64",
        _book("linear", "tokens", "width"),
    ),
    "merge": Word(
        "value and output matrices of heads, apart or multiplied into one",
        (TOKENS, WIDTH, HEADS, Size("value-dim", "e", "head dim of values; D / H if not given", required=False)),
        "--tokens 256 --width 512 --heads 8",
        _book("merge", "tokens", "width", "heads", "value_dim"),
    ),
    "davit": Word(
        "patches that attend to patches, and channels to channels",
        (
            GRID,
            CHANNELS,
            Size("window", "w", "window size (7)", 7, False),
            Size("group-dim", "d", "channels of a group (32)", 32, False),
        ),
        "--grid 16 16 --channels 512 --window 7 --group-dim 32",
        _davit,
    ),
    "encoding": Word(
        "operations of relative scores, entry by entry and with queries and keys made once",
        (
            TOKENS._replace(required=False),
            Size("dim", "D", "width (hidden size)", also="d"),
            GRID._replace(meaning="rows and columns of pixels, instead of N", required=False),
        ),
        "--tokens 1024 --dim 64",
        _encoding,
    ),
    "parallel": Word(
        "steps of self-attention if everything that can run at once does",
        (
            Size("T", "T", PARALLEL["T"], required=False),
            Size("J", "J", PARALLEL["J"]),
            Size("K", "K", PARALLEL["K"]),
            Size("U", "U", f"{PARALLEL['U']}; J / K if not given", required=False),
            Size("I", "I", f"{PARALLEL['I']}; U if not given", required=False),
            Size("X", "X", f"{PARALLEL['X']}, instead of T", required=False),
            Size("Y", "Y", f"{PARALLEL['Y']}, instead of T", required=False),
        ),
        "--T 1024 --J 512 --K 8",
        _parallel,
    ),
    "patterns": Word(
        "ways to make a vision transformer cheaper: pairs, products, and how soon all tokens meet",
        (GRID, CHANNELS),
        "--grid 16 16 --channels 512",
        _patterns,
    ),
    "panels": Word(
        "pairs of the patterns that Prince draws in figure 12.15",
        (
            TOKENS,
            Size("radius", "r", "of the windows to both sides (1)", 1, False),
            Size("width", "w", "tokens that a window to the past holds (3)", 3, False),
            Size("count", "g", "global tokens (2)", 2, False),
        ),
        "--tokens 256",
        _book("panels", "tokens", "radius", "width", "count"),
    ),
    "parameters": Word(
        "parameters of multi-head attention whose sizes are all free",
        (
            HEADS,
            Size("input", "D", "width of the input"),
            Size("hidden", "d", "head dim of queries and keys"),
            Size("value", "e", "head dim of values"),
            Size("output", "O", "width of the output"),
        ),
        "--heads 8 --input 512 --hidden 64 --value 64 --output 512",
        _book("parameters", "heads", "input", "hidden", "value", "output"),
    ),
    "model": None,
}
MODEL_HELP = "a published model by its name: gpt2, bert-base, vit-b16, davit-tiny, ..."


def textbook_questions() -> str:
    """The words that answer a textbook's question, in one line."""
    return " | ".join(name for name, word in WORDS.items() if word is not None)


def listed() -> list[str]:
    """A line for each word."""
    return [f"{name:<12}{MODEL_HELP if word is None else word.help}" for name, word in WORDS.items()]


def run(name: str, rest: list[str]) -> int:
    """Answer a word: make its table, print it, write it."""
    word = WORDS[name]
    if word is None:
        return _model(rest)
    asked = parser(name, word).parse_args(rest)
    check_writable(asked.json)
    table = word.make(asked)
    if asked.json is not None:
        write_json(table.to_dict(), asked.json)
    if asked.json != "-":
        from regard.render.terminal import print_fitted

        print_fitted(table.render)
    return 0


def parser(name: str, word: Word) -> argparse.ArgumentParser:
    """What is understood after a word."""
    from regard.cli.cost import whole

    said = Parser(
        prog=f"regard cost {name}",
        description=f"{word.help[0].upper()}{word.help[1:]}.",
        epilog=f"example:\n  regard cost {name} {word.example}",
        allow_abbrev=False,
    )
    for size in word.sizes:
        many: dict[str, Any] = {"nargs": size.sides, "metavar": tuple(size.letter.split())} if size.sides > 1 else {}
        said.add_argument(
            f"--{size.name}",
            *([] if size.also is None else [f"--{size.also}"]),
            **{"metavar": size.letter, **many},
            type=whole,
            default=size.default,
            required=size.required,
            help=size.meaning,
        )
    if name == "parallel":
        said.add_argument(
            "--serial", "--serial-dot", action="store_true", help="sums one after the other instead of as trees"
        )
    said.add_argument("--json", metavar="FILE", help="write the table as JSON; - prints it instead")
    return said


# Published models


def _model(rest: list[str]) -> int:
    """A published model, asked for as any other target is."""
    from regard.cli import cost
    from regard.cli.published import IMAGES, MODELS, build

    asked = cost.parser("model").parse_args(rest)
    if asked.target not in MODELS:
        raise InputError(
            f"no model is called {asked.target!r}.",
            asked=f"regard cost model {asked.target}",
            because="a published model has one of the names below",
            instead="\n".join(textwrap.wrap(", ".join(MODELS), 88)) + "\nor transformers:Name, timm:name",
        )
    if asked.target.startswith("davit-") and asked.image is None:
        asked.image = IMAGES.get(asked.target, (224, 224))
    return cost.answer(asked, lambda: build(asked.target, asked.image, empty=not asked.measure))
