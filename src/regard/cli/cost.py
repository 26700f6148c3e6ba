"""`regard cost TARGET`: what a target costs, computed without running it."""

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
    from regard.cost_model import Cost, ParallelCost

STEPS = ("forward", "backward", "training", "decode")
STRATEGIES = ("ddp", "fsdp", "context", "tensor")
# Options that speak of several devices, and those of one device that have no meaning for several.
PARALLEL = ("strategy", "context", "layout", "recompute", "link_gbps", "device_tflops")
SINGLE = ("levels", "depth", "measure", "picture")
BACKENDS = ("reference", "native", "blocked", "positional")
DTYPES = ("float32", "float64", "float16", "bfloat16")
OF = ("macs", "flops", "bytes", "activation_bytes", "parameters", "depth", "pairs", "exponentials")
# Sizes of a target; those of OWN belong to bare descriptions only.
OWN = ("heads", "kv_heads", "dim", "value_dim")
SIZES = ("tokens", "keys", "context_tokens", "image", *OWN)
# Names of attentions that are not patterns.
FEATURE_MAPS = {"linear": "elu1", "elu1": "elu1", "relu": "relu", "taylor2": "taylor2", "favor+": "favor+"}

DESCRIPTION = """Compute what TARGET costs without running it: formulas, numbers, and a breakdown by submodule.

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
  regard cost model gpt2 --tokens 1024 --batch 8 --devices 8 --strategy fsdp --link-gbps 100
  regard cost "Window(128, 0)" --tokens 4096 --dim 64 --heads 12
  regard cost mypackage:model --tokens 256 --measure
  regard cost attention --tokens 256 --width 512
  regard cost curve "Full()" "Window(128, 0)" linear --dim 64 --picture out.svg

Exit status: 0, or 2 for wrong arguments."""

MODEL_EPILOG = """examples:
  regard cost model gpt2 --tokens 1023 --step decode
  regard cost model vit-b16
  regard cost model davit-tiny --image 224x224 --levels 1"""


def add(commands: Any) -> None:
    """Add the command `cost`. Its arguments are parsed by `run`, which depend on the target or question."""
    parser = commands.add_parser("cost", help="say what TARGET costs, as formulas and numbers", add_help=False)
    parser.add_argument("-h", "--help", action=_Help, nargs=0)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Parse the arguments of a question, a curve or a target; return the exit status."""
    from regard.cli import cost_questions

    rest = args.rest
    if not rest or not rest[0].strip():
        raise InputError(
            "no target was given.",
            because="`regard cost` needs a target or a question",
            instead="regard cost module:name --tokens 512; regard cost --help shows other targets",
        )
    try:
        if rest[0] in cost_questions.QUESTIONS:
            return cost_questions.run(rest[0], rest[1:])
        if rest[0] == "curve":
            args = make_curve_parser().parse_args(rest[1:])
            return run_curve(args)
        check_target_name(rest[0])
        args = make_parser().parse_args(rest)
    except SystemExit as end:  # --help, or wrong arguments
        return int(end.code or 0)
    return run_target(args)


def check_target_name(word: str) -> None:
    """Raise for a misspelt question, or a published model without the word `model` before its name."""
    from regard.cli import cost_questions
    from regard.cli.published import MODELS

    close = difflib.get_close_matches(word, [*cost_questions.QUESTIONS, "curve"], 1, 0.7)
    if (word not in MODELS and not close) or word in FEATURE_MAPS or Path(word).exists():
        return
    raise InputError(
        f"{word!r} is no target.",
        asked=f"regard cost {word}",
        because="it is a published model; its name comes after the word model"
        if word in MODELS
        else "it is neither module:name, nor a path, nor a question",
        instead=f"regard cost model {word}" if word in MODELS else f"regard cost {close[0]} --help",
    )


class _Help(argparse.Action):
    """`regard cost --help`: the help of a target."""

    def __call__(self, *_: Any) -> None:
        make_parser().print_help()
        raise SystemExit(0)


def make_parser(word: str = "") -> argparse.ArgumentParser:
    """The parser of `regard cost TARGET` and, with `word`, of `regard cost model TARGET`."""
    from regard.cli import cost_questions
    from regard.cli.published import MODELS

    names = "\n".join(textwrap.wrap(", ".join(MODELS), 88))
    description = DESCRIPTION.format(words="\n  ".join(cost_questions.list_questions()))
    parser = Parser(
        prog=f"regard cost {word}".rstrip(),
        description=f"Compute what a published model costs. TARGET is one of\n{names}" if word else description,
        epilog=MODEL_EPILOG if word else EPILOG,
    )
    parser.add_argument("target", metavar="TARGET", help="what to compute the cost of")
    add_size_options(parser.add_argument_group("sizes; sizes that are not given stay symbols where possible"))
    run_group = parser.add_argument_group("how it is run")
    run_group.add_argument("--step", choices=STEPS, default="forward", help="training is forward and backward")
    run_group.add_argument(
        "--backend", choices=BACKENDS, help="count the work of this backend; by default that of the mathematics"
    )
    run_group.add_argument("--dtype", choices=DTYPES, help="dtype; by default that of the target")
    run_group.add_argument("--serial", action="store_true", help="for depth: sums one after the other, not as trees")
    run_group.add_argument(
        "--plain", action="store_true", help="for depth: a softmax that does not subtract the largest score"
    )
    add_parallel_options(parser.add_argument_group("a training step on several devices; --batch is that of a device"))
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--levels", metavar="K", type=parse_size, help="print submodules up to this depth")
    shown.add_argument("--depth", action="store_true", help="also print the depth of every part")
    shown.add_argument("--memory", action="store_true", help="also print weights, activations, cache and peak memory")
    shown.add_argument("--measure", action="store_true", help="run it, and print the predicted and the measured time")
    shown.add_argument("--json", metavar="FILE", help="write everything as JSON; - prints it instead of the table")
    shown.add_argument("--picture", metavar="FILE", help="draw cost against tokens: .svg or .html")
    add_picture_options(shown)
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the random weights")
    return parser


def add_size_options(group: Any) -> None:
    """Add the sizes of a run."""
    group.add_argument(
        "--tokens", metavar="N", type=parse_size, help="sequence length; with --step decode, the tokens in the cache"
    )
    group.add_argument("--batch", metavar="B", type=parse_size, default=1, help="batch size (1)")
    group.add_argument("--keys", metavar="M", type=parse_size, help="key length, if it is another")
    group.add_argument("--context-tokens", metavar="T", type=parse_size, help="sequence length of the encoder")
    group.add_argument("--image", metavar="RxC", type=parse_image, help="rows and columns: 224x224, or 224")
    group.add_argument("--heads", metavar="H", type=parse_size, help="heads, of a pattern")
    group.add_argument("--kv-heads", metavar="G", type=parse_size, help="key/value heads, of a pattern")
    group.add_argument("--dim", metavar="d", type=parse_size, help="head dim, of a pattern")
    group.add_argument("--value-dim", metavar="e", type=parse_size, help="head dim of values, of a pattern")
    group.add_argument(
        "--input",
        metavar="SHAPE",
        type=parse_shape,
        action="append",
        help="the shape of an input, as in 2,5,7, if the target is not recognised; repeatable",
    )


def add_parallel_options(group: Any) -> None:
    """Add how a training step is spread over devices."""
    group.add_argument("--devices", metavar="K", type=parse_size, help="how many devices there are")
    group.add_argument("--strategy", choices=STRATEGIES, help="what is spread, and how (ddp)")
    group.add_argument("--context", metavar="c", type=parse_size, help="how many of them share a sequence (1)")
    group.add_argument("--layout", choices=("zigzag", "contiguous"), help="which tokens each of these holds (zigzag)")
    group.add_argument("--recompute", action="store_true", help="recompute the activations of blocks in backward")
    group.add_argument("--link-gbps", metavar="G", type=parse_rate, help="10^9 bits that a device sends in a second")
    group.add_argument(
        "--device-tflops", metavar="T", type=parse_rate, help="10^12 FLOPs a second of a device; by default of this one"
    )


def add_picture_options(group: Any) -> None:
    """Add the quantity and the range of lengths of a picture."""
    group.add_argument("--of", choices=OF, default="macs", help="which quantity the picture shows (macs)")
    group.add_argument("--low", metavar="N", type=parse_size, default=64, help="shortest length of the picture (64)")
    group.add_argument(
        "--high", metavar="N", type=parse_size, default=65536, help="longest length of the picture (65536)"
    )


def run_target(args: argparse.Namespace, make: Callable[[], Any] | None = None) -> int:
    """Compute, print and write a cost; return the exit status. `make` builds a target that has no text."""
    check_outputs(args)
    check_parallel_options(args)
    with status(f"{args.target}: tracing"):
        target = load_target_or_pattern(args.target, args.seed, empty=not args.measure) if make is None else make()
        if args.devices is not None:
            return _print_parallel(compute_parallel_cost(target, args), args, name=make is not None)
        found = compute_cost(target, args)
        if make is not None:
            found.name = args.target
        extra = {"memory": found.memory} if args.memory else {}
        report = to_plain_dict(found, extra) if args.json is not None else {}
    if args.measure:
        with status(f"{args.target}: running it"):
            extra["time"] = measure_time(target, found, args)
            report["time"] = _times_to_dict(extra["time"])
    if args.json is not None:
        write_json(report, args.json)
    if args.json != "-":
        print_cost(found, extra, args)
    if args.picture is not None:
        from regard.cost_model.chart import draw_curves

        with status(f"{args.target}: at every length of the picture"):
            picture = draw_curves({found.name: found}, of=args.of, low=args.low, high=args.high)
        write_picture(picture, args.picture)
    return 0


def compute_parallel_cost(target: Any, args: argparse.Namespace) -> ParallelCost:
    """The cost of a training step on several devices."""
    from regard.cost_model import cost

    options = {name: getattr(args, name) for name in PARALLEL if getattr(args, name) is not None}
    step = None if args.step == "forward" else args.step
    how = {"step": step, "backend": args.backend, "dtype": _read_dtype(args), "devices": args.devices}
    return cost(target, **how, **options, **_read_sizes(args))


def _print_parallel(found: ParallelCost, args: argparse.Namespace, *, name: bool) -> int:
    from regard.cost_model.parallel.table import render
    from regard.render.terminal import print_fitted

    if name:
        found.name = args.target
    peak = {"peak": found.peak.value} if args.memory else {}
    if args.json is not None:
        write_json(found.to_dict() | peak, args.json)
    if args.json != "-":
        print_fitted(lambda width: render(found, width))
        for value in peak.values():
            print(f"\nPeak memory of a device, traced: {value:,} B")
    return 0


def check_parallel_options(args: argparse.Namespace) -> None:
    """Raise for options that do not go together with, or not without, --devices."""
    several = args.devices is not None
    wrong = [name for name in (SINGLE if several else PARALLEL) if getattr(args, name, None) not in (None, False)]
    if wrong:
        flag = f"--{wrong[0].replace('_', '-')}"
        raise InputError(
            f"{flag} does not go {'with' if several else 'without'} --devices.",
            asked=f"regard cost {args.target} ... {flag}",
            because="it is about one device" if several else "it is about several devices",
            instead=f"the same without {flag}" if several else f"--devices 8 {flag} ...",
        )


def print_cost(found: Cost, extra: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the table, and below it what other options ask for."""
    from regard.cost_model.table import depth_table, render
    from regard.render.terminal import print_fitted

    print_fitted(lambda width: render(found, args.levels, width))
    if args.depth:
        print()
        print_fitted(depth_table(found, args.levels).to_rich)
    for value in extra.values():
        print()
        print(value)


def to_plain_dict(found: Cost, extra: dict[str, Any]) -> dict[str, Any]:
    """Everything, as plain Python values."""
    return {**found.to_dict(), **{name: value.to_dict() for name, value in extra.items()}}


def load_target_or_pattern(text: str, seed: int, *, empty: bool = True) -> Any:
    """What a text names: a pattern, a feature map, or a target as `regard check` understands it."""
    found = parse_description(text)
    if found is not None:
        return found
    from regard.cli.targets import load_target

    return load_target(text, seed, full_size=True, empty=empty)


def compute_cost(target: Any, args: argparse.Namespace) -> Cost:
    """The cost of a target at the sizes of the command line."""
    from regard.cost_model import cost

    return cost(
        target,
        step=args.step,
        backend=args.backend,
        dtype=_read_dtype(args),
        stable=not args.plain,
        serial=args.serial,
        **_read_sizes(args),
    )


def measure_time(target: Any, found: Cost, args: argparse.Namespace) -> Any:
    """Run the target: its roofline bound and its measured time."""
    from regard.cost_model.measuring import Comparison, measure

    took = measure(target, step=args.step, backend=args.backend or "auto", dtype=_read_dtype(args), **_read_sizes(args))
    return Comparison(found.roofline(), took)


def _times_to_dict(comparison: Any) -> dict[str, Any]:
    return {
        "predicted": comparison.predicted.to_dict(),
        "measured": dataclasses.asdict(comparison.measured),
        "ratio": comparison.ratio,
    }


def _read_sizes(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name, None) for name in SIZES}
    given["inputs"] = tuple(args.input) if getattr(args, "input", None) else None
    return {"batch": args.batch, **{name: value for name, value in given.items() if value is not None}}


def _read_dtype(args: argparse.Namespace) -> Any:
    import torch

    return None if args.dtype is None else getattr(torch, args.dtype)


def parse_description(text: str) -> Any:
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


def make_curve_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="regard cost curve",
        description=CURVE,
        epilog=CURVE_EPILOG,
    )
    parser.add_argument("targets", metavar="A", nargs="+", help="what to draw")
    group = parser.add_argument_group("sizes")
    group.add_argument("--batch", metavar="B", type=parse_size, default=1, help="batch size (1)")
    group.add_argument("--heads", metavar="H", type=parse_size, default=1, help="heads (1)")
    group.add_argument("--kv-heads", metavar="G", type=parse_size, help="key/value heads, if there are fewer")
    group.add_argument("--dim", metavar="d", type=parse_size, default=64, help="head dim (64)")
    group.add_argument("--value-dim", metavar="e", type=parse_size, help="head dim of values, if it is another")
    parser.add_argument("--step", choices=STEPS, default="forward", help="training is forward and backward")
    parser.add_argument(
        "--backend", choices=BACKENDS, help="count the work of this backend; by default that of the mathematics"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype")
    add_picture_options(parser)
    parser.add_argument("--picture", metavar="FILE", help="where to draw it: .svg or .html")
    parser.add_argument("--json", metavar="FILE", help="write points and crossings as JSON; - prints it instead")
    parser.set_defaults(serial=False, plain=False, seed=0)
    return parser


def run_curve(args: argparse.Namespace) -> int:
    """Compute the curves, print where they begin, end and cross, and draw them."""
    check_outputs(args)
    from regard.cost_model.chart import draw_curves

    with status("computing the curves"):
        costs = {}
        for target in dict.fromkeys(args.targets):
            loaded = load_target_or_pattern(target, args.seed)
            # Heads and head dim are given for descriptions only; modules have their own.
            others = {} if parse_description(target) is not None else dict.fromkeys(OWN)
            costs[target] = compute_cost(loaded, argparse.Namespace(**{**vars(args), **others, "tokens": args.low}))
        picture = draw_curves(costs, of=args.of, low=args.low, high=args.high)
    if args.json is not None:
        write_json(picture.to_dict(), args.json)
    if args.json != "-":
        print(picture.table())
    if args.picture is not None:
        write_picture(picture, args.picture)
    return 0


# Parsing values


def parse_size(text: str) -> int:
    """A size: a whole number of at least 1; thousands may be apart."""
    cleaned = text.replace(",", "").replace("_", "")
    if not re.fullmatch(r"\d+", cleaned) or int(cleaned) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: sizes are whole numbers of at least 1")
    return int(cleaned)


def parse_rate(text: str) -> float:
    """A rate: a positive number."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no rate: rates are positive numbers")
    return rate


def parse_image(text: str) -> tuple[int, int]:
    """`224x160`, rows by columns; `224` is square."""
    sides = re.fullmatch(r"(\d+)(?:[xX×](\d+))?", text.strip())
    if sides is None or int(sides[1]) < 1 or int(sides[2] or 1) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no image: rows by columns, such as 224x160, or 224")
    return int(sides[1]), int(sides[2] or sides[1])


def parse_shape(text: str) -> tuple[int, ...]:
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
