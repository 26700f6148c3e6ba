"""`regard train ablation` and `regard train compare`: several runs under equal conditions, one table and one figure.

ablation   BERT is pre-trained with both of its tasks, with each alone, and with neither, for the same number of steps;
           then every one of them is fine-tuned alike on labelled texts. Why two tasks?
compare    image classifiers are trained for the same time on the same images.

Every run lies in a folder of its own, and the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.cli.arguments import read_count, read_option
from regard.cli.output import report_written, write_json
from regard.errors import InputError
from regard.render.chart import share_chart
from regard.render.page import Page
from regard.render.table import Column, Table
from regard.render.terminal import print_fitted
from regard.train import BertRecipe, Evaluation, ImageRecipe, Recipe, Run, TextClassificationRecipe, train
from regard.train.checkpoint import RECIPE, read_claimed_recipe
from regard.train.data import load
from regard.train.progress import format_metric
from regard.train.task import Task

ARMS: dict[str, tuple[str, ...] | None] = {
    "mlm and nsp": ("mlm", "nsp"),
    "mlm": ("mlm",),
    "nsp": ("nsp",),
    "none": None,
}
CLASSIFIERS = ("spatial", "vit", "davit", "resnet")
TIMED_STEPS = 8  # of which the time of a step is measured
EVALUATIONS = 10  # of a run
RESULT = "comparison"


def add_options(parser: argparse.ArgumentParser, kind: str) -> None:
    """The options of either command; `--minutes`, `--folder`, `--json` and `--option` are those of all kinds."""
    if kind == "compare":
        parser.add_argument("--arms", metavar="LIST", default=",".join(CLASSIFIERS), help=f"({','.join(CLASSIFIERS)})")
        parser.add_argument("--data-folder", metavar="FOLDER", help="your own files of MNIST or CIFAR-10")
        return
    parser.add_argument("--labels", metavar="DATA", default="bbc", help="labelled texts to fine-tune on (bbc)")
    parser.add_argument("--steps", metavar="N", type=read_count, default=1000, help="of pre-training (1000)")
    parser.add_argument("--epochs", metavar="N", type=read_count, default=3, help="of fine-tuning (3)")
    parser.add_argument("--seeds", metavar="N", type=read_count, default=3, help="fine-tunings of each (3)")
    parser.add_argument(
        "--label-option", metavar="NAME=VALUE", action="append", default=[], help="a field of the fine-tuning recipe"
    )


# Why two tasks?


def run_ablation(args: argparse.Namespace) -> int:
    """Pre-train with both tasks, either and none; fine-tune; print and save the accuracies."""
    folder = Path(args.folder or "runs/ablation")
    fields = dict(read_option(text) for text in args.option)
    recipes = {
        arm: BertRecipe.on(args.data, tasks=tasks, **{"steps": args.steps, **fields})
        for arm, tasks in ARMS.items()
        if tasks is not None
    }
    tasks = {arm: recipe.make_task() for arm, recipe in recipes.items()}
    if args.minutes is not None:
        # Equal steps, as many as the slowest takes in this time.
        steps = min(fit_steps(task, args.minutes, folder / _slug(arm)) for arm, task in tasks.items())
        recipes = {arm: dataclasses.replace(recipe, steps=steps) for arm, recipe in recipes.items()}
    results = []
    for arm, pretraining in ARMS.items():
        place, run = folder / _slug(arm), None
        if pretraining is not None:
            run = train_arm(arm, recipes[arm].make_task(tasks[arm].data), place)
        tuned = [_fine_tune(arm, run, place, args, seed) for seed in range(args.seeds)]
        results.append(_describe_ablation(arm, run, tuned))
        print(format_ablation(results[-1]), file=sys.stderr, flush=True)
    columns = [Column("pre-training"), *(Column(name, "right") for name in ("steps", "masked tokens", "next sentence",
               "fine-tuned", "+-", "seeds"))]  # fmt: skip
    table = Table(columns, [_make_ablation_row(result) for result in results])
    note = (
        f"Fine-tuned on {args.labels} for {args.epochs} epoch{'' if args.epochs == 1 else 's'}: mean accuracy on "
        "held-out texts over the seeds, and its standard error."
    )
    _save(args, folder, "Why two tasks?", note, table, results, [])
    return 0


def _fine_tune(arm: str, run: Run | None, place: Path, args: argparse.Namespace, seed: int) -> Run:
    """A classifier on the pre-trained encoder, or one of the same size from scratch, with the same rate and steps."""
    fields = {"epochs": args.epochs, "seed": seed, "learning_rate": 5e-4}
    fields |= dict(read_option(text) for text in args.label_option)
    if run is not None:
        recipe = TextClassificationRecipe.on(args.labels, weights=str(place / "model"), **fields)
    else:
        sizes = dict(read_option(text) for text in args.option)
        known = {each.name for each in dataclasses.fields(TextClassificationRecipe)}
        shared = ("dim", "layers", "heads", "hidden_dim", "vocab_size", "dropout", "length")
        given = {name: sizes[name] for name in shared if name in sizes and name in known}
        recipe = TextClassificationRecipe.on(args.labels, **given | fields)
    return train_arm(f"{arm}, fine-tuned", recipe.make_task(), place / f"tuned-{seed}")


def _describe_ablation(arm: str, run: Run | None, tuned: Sequence[Run]) -> dict[str, Any]:
    found = [one.accuracy for one in tuned]
    error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else None
    metrics = {} if run is None else run.metrics
    return {
        "pretraining": arm,
        "steps": 0 if run is None else run.evaluations[-1].step,
        "pretraining_seconds": 0.0 if run is None else run.seconds,
        "mlm_accuracy": metrics.get("mlm_accuracy"),
        "nsp_accuracy": metrics.get("nsp_accuracy"),
        "accuracy": statistics.mean(found),
        "standard_error": error,
        "accuracies": found,
    }


def _make_ablation_row(result: Mapping[str, Any]) -> tuple[str, ...]:
    shares = [result[name] for name in ("mlm_accuracy", "nsp_accuracy", "accuracy", "standard_error")]
    shown = ["-" if share is None else f"{share:.2%}" for share in shares]
    return (result["pretraining"], f"{result['steps']:,}", *shown, str(len(result["accuracies"])))


def format_ablation(result: Mapping[str, Any]) -> str:
    return f"{result['pretraining']}: {result['accuracy']:.2%} fine-tuned"


# Image classifiers


def run_comparison(args: argparse.Namespace) -> int:
    """Train each classifier for the same time; print and save accuracies and curves."""
    folder = Path(args.folder or "runs/compare")
    minutes = 10.0 if args.minutes is None else args.minutes
    arms = args.arms.split(",")
    unknown = [arm for arm in arms if arm not in CLASSIFIERS]
    if unknown:
        raise InputError(
            f"There is no image classifier {unknown[0]!r}.",
            asked=f"--arms {args.arms}",
            because=f"the classifiers are {', '.join(CLASSIFIERS)}",
            instead=f"--arms {','.join(CLASSIFIERS)}",
        )
    data = load(args.data, args.data_folder)
    print(data, file=sys.stderr)
    fields = dict(read_option(text) for text in args.option)
    results, curves, places = [], {}, {}
    recipes = {arm: _make_image_recipe(arm, args.data, fields) for arm in arms}  # refused before any runs
    for arm, recipe in recipes.items():
        steps = fit_steps(recipe.make_task(data), minutes, folder / arm)
        recipe = dataclasses.replace(recipe, steps=steps, eval_every=max(1, -(-steps // EVALUATIONS)))
        run = train_arm(arm, recipe.make_task(data), folder / arm)
        results.append(_describe_classifier(arm, run))
        curves[arm] = [each.accuracy for each in run.evaluations]
        places[arm] = [each.step / run.evaluations[-1].step for each in run.evaluations]
    columns = [Column("model"), *(Column(name, "right") for name in ("parameters", "steps", "images", "seconds",
               "accuracy", "best"))]  # fmt: skip
    rows = [
        (one["model"], f"{one['parameters']:,}", f"{one['steps']:,}", f"{one['images']:,}", f"{one['seconds']:.0f}",
         f"{one['accuracy']:.2%}", f"{one['best']:.2%}")
        for one in results
    ]  # fmt: skip
    top = min(1.0, 1.05 * max(max(values) for values in curves.values()))
    caption = f"Accuracy on {len(data.test):,} test images over {minutes:g} minutes of training each."
    figure = share_chart(curves, caption, ("start", f"{minutes:g} min"), 0.0, top, places=places)
    note = (
        f"The number of steps is what {TIMED_STEPS} timed steps promise for {minutes:g} minutes, so that each learning "
        "rate ends its schedule; the seconds are those of training, measured, without evaluation. "
        f"One test image is {1 / len(data.test):.2%}."
    )
    _save(args, folder, f"Image classifiers on {data.name}", note, Table(columns, rows), results, [figure])
    return 0


def _make_image_recipe(arm: str, data: str, fields: Mapping[str, Any]) -> Recipe:
    """The recipe of a classifier; options that its recipe does not have are those of another arm."""
    kind = Recipe.kinds[arm]
    assert issubclass(kind, ImageRecipe)
    known = {each.name for each in dataclasses.fields(kind)}
    elsewhere = {each.name for other in CLASSIFIERS for each in dataclasses.fields(Recipe.kinds[other])}
    return kind.on(data, **{name: value for name, value in fields.items() if name in known or name not in elsewhere})


def _describe_classifier(arm: str, run: Run) -> dict[str, Any]:
    return {
        "model": arm,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "steps": run.evaluations[-1].step,
        "images": sum(each.units for each in run.evaluations),
        "seconds": run.seconds,
        "accuracy": run.accuracy,
        "best": run.best.accuracy,
        "curve": [[each.step, each.accuracy] for each in run.evaluations],
    }


# Both


def fit_steps(task: Task, minutes: float, folder: Path) -> int:
    """As many steps as fit into this time; those of the run in the folder, if there is one that is resumed."""
    if (folder / RECIPE).is_file():
        steps = read_claimed_recipe(folder)[0].steps
        assert steps is not None
        return steps
    changes: dict[str, Any] = {"steps": TIMED_STEPS, "eval_every": TIMED_STEPS}
    if hasattr(task.recipe, "eval_batches"):
        changes["eval_batches"] = 1
    timed = train(dataclasses.replace(task.recipe, **changes).make_task(task.data), progress=False)
    return max(1, round(60 * minutes * TIMED_STEPS / timed.seconds))


def train_arm(name: str, task: Task, folder: Path) -> Run:
    """Train, or resume, one of the runs, and say how it goes."""

    def tell(evaluation: Evaluation) -> None:
        metrics = ", ".join(format_metric(metric, value) for metric, value in evaluation.metrics.items())
        print(f"{name}, step {evaluation.step} of {task.steps}: {metrics}", file=sys.stderr, flush=True)

    return train(task, folder, on_evaluation=tell)


def _slug(arm: str) -> str:
    return arm.replace(" ", "-")


def _save(
    args: argparse.Namespace,
    folder: Path,
    title: str,
    note: str,
    table: Table,
    results: list[dict[str, Any]],
    figures: list[Any],
) -> None:
    """Print the table, and write it as a page and as JSON."""
    print_fitted(table.to_rich)
    page = Page(title, kicker="regard train", lead=note)
    page.add("Results", table.to_html(), *figures)
    report_written(page.save(folder / f"{RESULT}.html"))
    write_json({"title": title, "note": note, "results": results}, folder / f"{RESULT}.json")
    if args.json:
        write_json({"title": title, "note": note, "results": results}, args.json)
