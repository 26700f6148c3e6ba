"""`regard cost TARGET`: what something costs, before anyone runs it."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.arguments import Parser
from regard.cli.output import check_writable, report_written, status, write_json
from regard.errors import InputError

if TYPE_CHECKING:
    from regard.cost_model import Cost

STEPS = ("forward", "backward", "training", "decode")
BACKENDS = ("reference", "native", "blocked", "positional")
DTYPES = ("float32", "float64", "float16", "bfloat16")
OF = ("macs", "flops", "bytes", "activation_bytes", "parameters", "depth", "pairs", "exponentials")
# What a target has sizes for, and what only a description needs.
OWN = ("heads", "kv_heads", "dim", "value_dim")
SIZES = ("tokens", "keys", "context_tokens", "image", *OWN)
# Words for attentions that no pattern writes.
FEATURE_MAPS = {"linear": "elu1", "elu1": "elu1", "relu": "relu", "taylor2": "taylor2", "favor+": "favor+"}

DESCRIPTION = """Say what TARGET costs before anyone runs it: formulas, numbers, and the parts they are made of.

TARGET is one of
  module:name                 a function or a module; a class is built without arguments
  "module:name(16, heads=2)"  a class, or a function that makes one, called with plain values
  file.py:name                the same from a file
  transformers:BertModel      a class of Hugging Face in its own size, without weights
  timm:vit_base_patch16_224   a model of timm, without weights
  path/to/checkpoint          a folder with a config.json, or a file of weights
  "Window(128, 0)"            an attention over the pairs of a pattern; sizes by --tokens, --dim, --heads

or a textbook question, answered as a table (model: a published model); `regard cost WORD --help` has its sizes
  {words}

or `curve A B ...` for costs against length as a picture, and where they cross.
"""
EPILOG = """examples:
  regard cost transformers:BertModel --tokens 512
  regard cost transformers:GPT2LMHeadModel --tokens 1024 --step training --memory
  regard cost timm:vit_base_patch16_224 --levels 1
  regard cost "Window(128, 0)" --tokens 4096 --dim 64 --heads 12
  regard cost mypackage:model --tokens 256 --measure
  regard cost attention --tokens 256 --width 512
  regard cost curve "Full()" "Window(128, 0)" linear --dim 64 --picture out.svg

Ends with 0, or 2 if the question cannot be asked."""

MODEL_EPILOG = """examples:
  regard cost model gpt2 --tokens 1023 --step decode
  regard cost model vit-b16
  regard cost model davit-tiny --image 224x224 --levels 1"""


def add(commands: Any) -> None:
    """Teach the command line the word `cost`. What comes after it is read by the parser of the target or the word."""
    words = commands.add_parser("cost", help="say what TARGET costs, as formulas and numbers", add_help=False)
    words.add_argument("-h", "--help", action=_Help, nargs=0)
    words.add_argument("rest", nargs=argparse.REMAINDER)
    words.set_defaults(run=run)


def run(words: argparse.Namespace) -> int:
    """Read what is asked for, answer it, and say how it went."""
    from regard.cli import cost_words

    rest = words.rest
    if not rest or not rest[0].strip():
        raise InputError(
            "no target was given.",
            because="a cost is the cost of something",
            instead="regard cost module:name --tokens 512; regard cost --help shows other targets",
        )
    try:
        if rest[0] in cost_words.WORDS:
            return cost_words.run(rest[0], rest[1:])
        if rest[0] == "curve":
            asked = curve_parser().parse_args(rest[1:])
            return draw(asked)
        check_word(rest[0])
        asked = parser().parse_args(rest)
    except SystemExit as end:  # help, or words that make no sense
        return int(end.code or 0)
    return answer(asked)


def check_word(word: str) -> None:
    """A word that is almost one of ours, or the name of a published model without the word before it."""
    from regard.cli import cost_words
    from regard.cli.published import MODELS

    close = difflib.get_close_matches(word, [*cost_words.WORDS, "curve"], 1, 0.7)
    if (word not in MODELS and not close) or word in FEATURE_MAPS or Path(word).exists():
        return
    raise InputError(
        f"{word!r} is no target.",
        asked=f"regard cost {word}",
        because="it is a published model, whose name comes after the word model"
        if word in MODELS
        else "it names nothing in a module, and no word for a table is written so",
        instead=f"regard cost model {word}" if word in MODELS else f"regard cost {close[0]} --help",
    )


class _Help(argparse.Action):
    """The help of a target, which is what most people ask for."""

    def __call__(self, *_: Any) -> None:
        parser().print_help()
        raise SystemExit(0)


def parser(word: str = "") -> argparse.ArgumentParser:
    """What is understood after `regard cost`, if it is no word of its own; after `model` it is the same."""
    from regard.cli import cost_words
    from regard.cli.published import MODELS

    names = "\n".join(textwrap.wrap(", ".join(MODELS), 88))
    description = DESCRIPTION.format(words="\n  ".join(cost_words.listed()))
    said = Parser(
        prog=f"regard cost {word}".rstrip(),
        description=f"Say what a published model costs. TARGET is one of\n{names}" if word else description,
        epilog=MODEL_EPILOG if word else EPILOG,
    )
    said.add_argument("target", metavar="TARGET", help="what it is the cost of")
    sizes(said.add_argument_group("sizes; what is not given stays a letter, if it can"))
    how = said.add_argument_group("how it is run")
    how.add_argument("--step", choices=STEPS, default="forward", help="training is forward and backward")
    how.add_argument("--backend", choices=BACKENDS, help="whose work is counted; the mathematics if not given")
    how.add_argument("--dtype", choices=DTYPES, help="in which numbers; those of the target if not given")
    how.add_argument("--serial", action="store_true", help="for depth: sums one after the other, not as trees")
    how.add_argument(
        "--plain", action="store_true", help="for depth: a softmax that does not subtract the largest score"
    )
    shown = said.add_argument_group("what is shown")
    shown.add_argument("--levels", metavar="K", type=whole, help="parts to so many levels")
    shown.add_argument("--depth", action="store_true", help="the depth of every part, too")
    shown.add_argument("--memory", action="store_true", help="weights, activations, cache, and the peaks of a run")
    shown.add_argument("--measure", action="store_true", help="run it: the predicted time beside the measured one")
    shown.add_argument("--json", metavar="FILE", help="write everything as JSON; - prints it instead of the table")
    shown.add_argument("--picture", metavar="FILE", help="draw cost against tokens: .svg or .html")
    drawing(shown)
    said.add_argument("--seed", metavar="N", type=int, default=0, help="of the weights, where there are any")
    return said


def sizes(group: Any) -> None:
    """The sizes of a run."""
    group.add_argument(
        "--tokens", metavar="N", type=whole, help="sequence length; with --step decode, the tokens in the cache"
    )
    group.add_argument("--batch", metavar="B", type=whole, default=1, help="batch size (1)")
    group.add_argument("--keys", metavar="M", type=whole, help="key length, if it is another")
    group.add_argument("--context-tokens", metavar="T", type=whole, help="sequence length of the encoder")
    group.add_argument("--image", metavar="RxC", type=image, help="rows and columns: 224x224, or 224")
    group.add_argument("--heads", metavar="H", type=whole, help="heads, of a pattern")
    group.add_argument("--kv-heads", metavar="G", type=whole, help="key/value heads, of a pattern")
    group.add_argument("--dim", metavar="d", type=whole, help="head dim, of a pattern")
    group.add_argument("--value-dim", metavar="e", type=whole, help="head dim of values, of a pattern")
    group.add_argument(
        "--input",
        metavar="SHAPE",
        type=shape,
        action="append",
        help="a shape, 2,5,7, of an input of a target that is not recognised; repeatable",
    )


def drawing(group: Any) -> None:
    """From where to where a picture goes, and of what."""
    group.add_argument("--of", choices=OF, default="macs", help="which quantity the picture shows (macs)")
    group.add_argument("--low", metavar="N", type=whole, default=64, help="shortest length of the picture (64)")
    group.add_argument("--high", metavar="N", type=whole, default=65536, help="longest length of the picture (65536)")


def answer(asked: argparse.Namespace, make: Callable[[], Any] | None = None) -> int:
    """Count, print, write. `make` makes what is asked about, if the text of the target does not say it."""
    check_outputs(asked)
    with status(f"{asked.target}: following what it does"):
        target = named(asked.target, asked.seed, empty=not asked.measure) if make is None else make()
        found = costed(target, asked)
        if make is not None:
            found.name = asked.target
        extra = {"memory": found.memory} if asked.memory else {}
        told = json_of(found, extra) if asked.json is not None else {}
    if asked.measure:
        with status(f"{asked.target}: running it"):
            extra["time"] = measured(target, found, asked)
            told["time"] = _times(extra["time"])
    if asked.json is not None:
        write_json(told, asked.json)
    if asked.json != "-":
        show(found, extra, asked)
    if asked.picture is not None:
        from regard.cost_model.chart import draw_curves

        with status(f"{asked.target}: at every length of the picture"):
            picture = draw_curves({found.name: found}, of=asked.of, low=asked.low, high=asked.high)
        write_picture(picture, asked.picture)
    return 0


def show(found: Cost, extra: dict[str, Any], asked: argparse.Namespace) -> None:
    """The table, and below it what else was asked for."""
    from regard.cost_model.table import depth_table, render
    from regard.render.terminal import print_fitted

    print_fitted(lambda width: render(found, asked.levels, width))
    if asked.depth:
        print()
        print_fitted(depth_table(found, asked.levels).to_rich)
    for value in extra.values():
        print()
        print(value)


def json_of(found: Cost, extra: dict[str, Any]) -> dict[str, Any]:
    """Everything, in plain Python."""
    return {**found.to_dict(), **{name: value.to_dict() for name, value in extra.items()}}


def named(text: str, seed: int, *, empty: bool = True) -> Any:
    """What a text names: a pattern, a feature map, or a target as `regard check` understands it."""
    found = described(text)
    if found is not None:
        return found
    from regard.cli.targets import find

    return find(text, seed, whole=True, empty=empty)


def costed(target: Any, asked: argparse.Namespace) -> Cost:
    """Its cost, with the sizes that are asked for."""
    from regard.cost_model import cost

    return cost(
        target,
        step=asked.step,
        backend=asked.backend,
        dtype=_dtype(asked),
        stable=not asked.plain,
        serial=asked.serial,
        **_sizes(asked),
    )


def measured(target: Any, found: Cost, asked: argparse.Namespace) -> Any:
    """Run it, and put the least time that it could take beside the time that it took."""
    from regard.cost_model.measuring import Comparison, measure

    took = measure(target, step=asked.step, backend=asked.backend or "auto", dtype=_dtype(asked), **_sizes(asked))
    return Comparison(found.roofline(), took)


def _times(comparison: Any) -> dict[str, Any]:
    return {
        "predicted": comparison.predicted.to_dict(),
        "measured": dataclasses.asdict(comparison.measured),
        "ratio": comparison.ratio,
    }


def _sizes(asked: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(asked, name, None) for name in SIZES}
    given["inputs"] = tuple(asked.input) if getattr(asked, "input", None) else None
    return {"batch": asked.batch, **{name: value for name, value in given.items() if value is not None}}


def _dtype(asked: argparse.Namespace) -> Any:
    import torch

    return None if asked.dtype is None else getattr(torch, asked.dtype)


def described(text: str) -> Any:
    """The attention that a pattern or the name of a feature map means; None for any other text."""
    from regard.attention import Attention

    if text in FEATURE_MAPS:
        return Attention(feature_map=FEATURE_MAPS[text])
    if not re.match(r"[\s~(]*[A-Z]\w*\(", text) or Path(text).exists():
        return None
    from regard.patterns import read_pattern

    return Attention(pattern=read_pattern(text))


# Curves

CURVE = """Draw what attentions cost against their length, both as logarithms, and say where they cross.

A, B, ... are patterns, "Full()" or "Window(128, 0) & Causal()"; `linear` for an attention without a softmax; or
targets such as transformers:GPT2Model.
"""
CURVE_EPILOG = """examples:
  regard cost curve "Full()" "Window(128, 0)" linear --dim 64 --picture out.svg
  regard cost curve "Full()" linear --of activation_bytes --low 16 --high 4096"""


def curve_parser() -> argparse.ArgumentParser:
    said = Parser(
        prog="regard cost curve",
        description=CURVE,
        epilog=CURVE_EPILOG,
    )
    said.add_argument("targets", metavar="A", nargs="+", help="what to draw")
    group = said.add_argument_group("sizes")
    group.add_argument("--batch", metavar="B", type=whole, default=1, help="batch size (1)")
    group.add_argument("--heads", metavar="H", type=whole, default=1, help="heads (1)")
    group.add_argument("--kv-heads", metavar="G", type=whole, help="key/value heads, if there are fewer")
    group.add_argument("--dim", metavar="d", type=whole, default=64, help="head dim (64)")
    group.add_argument("--value-dim", metavar="e", type=whole, help="head dim of values, if it is another")
    said.add_argument("--step", choices=STEPS, default="forward", help="training is forward and backward")
    said.add_argument("--backend", choices=BACKENDS, help="whose work is counted; the mathematics if not given")
    said.add_argument("--dtype", choices=DTYPES, help="in which numbers")
    drawing(said)
    said.add_argument("--picture", metavar="FILE", help="where to draw it: .svg or .html")
    said.add_argument("--json", metavar="FILE", help="write points and crossings as JSON; - prints it instead")
    said.set_defaults(serial=False, plain=False, seed=0)
    return said


def draw(asked: argparse.Namespace) -> int:
    """Compute the curves, print where they begin, end and cross, and draw them."""
    check_outputs(asked)
    from regard.cost_model.chart import draw_curves

    with status("computing the curves"):
        costs = {}
        for target in dict.fromkeys(asked.targets):
            thing = named(target, asked.seed)
            # Channels and heads are given to what has none of its own.
            others = {} if described(target) is not None else dict.fromkeys(OWN)
            costs[target] = costed(thing, argparse.Namespace(**{**vars(asked), **others, "tokens": asked.low}))
        picture = draw_curves(costs, of=asked.of, low=asked.low, high=asked.high)
    if asked.json is not None:
        write_json(picture.to_dict(), asked.json)
    if asked.json != "-":
        print(picture.table())
    if asked.picture is not None:
        write_picture(picture, asked.picture)
    return 0


# Reading words


def whole(text: str) -> int:
    """A size: a whole number of at least 1; thousands may be apart."""
    cleaned = text.replace(",", "").replace("_", "")
    if not re.fullmatch(r"\d+", cleaned) or int(cleaned) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: sizes are whole numbers of at least 1")
    return int(cleaned)


def image(text: str) -> tuple[int, int]:
    """`224x160`, rows by columns; `224` is square."""
    sides = re.fullmatch(r"(\d+)(?:[xX×](\d+))?", text.strip())
    if sides is None or int(sides[1]) < 1 or int(sides[2] or 1) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no image: rows by columns, such as 224x160, or 224")
    return int(sides[1]), int(sides[2] or sides[1])


def shape(text: str) -> tuple[int, ...]:
    """`2,5,7`."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: whole numbers with commas, such as 2,5,7")
    return tuple(int(side) for side in text.split(","))


# Writing


def check_outputs(args: argparse.Namespace) -> None:
    """Raise for output files that cannot be written, before the work begins."""
    if args.picture is not None:
        from regard.cost_model.chart import SUFFIXES
        from regard.render.files import check_suffix

        check_suffix(args.picture, SUFFIXES)
    check_writable(args.json, args.picture)


def write_picture(picture: Any, file: str) -> None:
    picture.save(file)
    report_written(file)
