"""Tables and summaries of `regard train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import InputError

if TYPE_CHECKING:
    from regard.laws import Report
    from regard.train import Answer, Pruned, Run, TeacherResult


def print_heads(run: Run) -> None:
    """Print every head of every layer: centre, centre of mass, width, contours, share, and whether it is degenerate."""
    from regard.render.table import Column, Table
    from regard.render.terminal import print_fitted
    from regard.train.history import summarize_heads

    profiles = run.evaluations[-1].head_profiles
    if not profiles:
        return
    print(f"Positions of the heads after epoch {run.evaluations[-1].number}, in tokens (row, column) from the query;")
    print("50 % and 90 %: the smallest number of tokens with this share of the weight\n")
    rows, sections = [], []
    for layer, profile in profiles.items():
        sections.append(len(rows))
        for number, head in enumerate(summarize_heads(profile)["heads"]):
            rows.append(
                (
                    layer.removeprefix("blocks.").removesuffix(".attention") if number == 0 else "",
                    str(number),
                    format_position(head["centre"]) if "centre" in head else "-",
                    format_position(head["mean"]),
                    f"{head['width']:.2f}",
                    str(head["pixels_50"]),
                    str(head["pixels_90"]),
                    f"{head['share']:.0%}" if "share" in head else "-",
                    "degenerate" if head["degenerate"] else "",
                )
            )
    names = ("layer", "head", "centre", "mass", "width", "50 %", "90 %", "share", "")
    print_fitted(Table([Column(name, "right") for name in names], rows, sections).to_rich)


def print_summary(run: Run, pruned: Pruned | None) -> None:
    """Print the metrics of the last evaluation, and the last sample."""
    from regard.train.progress import format_metric

    last = run.evaluations[-1]
    steps = f"{last.step:,} step{'' if last.step == 1 else 's'}"
    if run.done and run.recipe.steps is None:
        steps = f"{run.recipe.epochs} epoch{'' if run.recipe.epochs == 1 else 's'}"
    name = getattr(run.data, "name", run.recipe.data)
    metrics = ", ".join(format_metric(each, value) for each, value in last.metrics.items())
    print(f"\n{run.recipe.kind} on {name}: {metrics}")
    print(f"after {steps}, {run.seconds:.0f} s of training")
    if pruned is not None:
        count = sum(map(len, pruned.dropped.values()))
        print(
            f"removed {count} degenerate head{'' if count == 1 else 's'}: {pruned.after:.2%} without, "
            f"{pruned.tuned.accuracy:.2%} after {pruned.tuned.recipe.epochs} more epochs"
        )


def print_teacher(result: TeacherResult) -> None:
    """Print the losses, the recovered kernel and the positions of the heads."""
    print(f"relative loss {result.loss:.2e} on new images, {result.seconds:.0f} s")
    print(f"effective kernel: relative error {result.kernel_error:.2e}")
    far = result.distances
    print(f"distance of the heads from a pixel: {far.mean():.2f} on average, {far.min():.2f} to {far.max():.2f};")
    print("  the loss determines only the effective kernel, not the single heads")


def format_position(pair: list[float]) -> str:
    return f"{pair[0]:+.2f} {pair[1]:+.2f}"


def summarize_run(
    run: Run, pruned: Pruned | None, pictures: list[Path], laws: Report | None, answers: list[Answer]
) -> dict[str, Any]:
    """The summary of a run, for JSON."""
    from regard.train.history import evaluation_to_json

    last = run if pruned is None else pruned.tuned
    value = {
        "recipe": run.recipe.to_json(),
        "folder": str(run.folder),
        "data": {"name": getattr(run.data, "name", run.recipe.data), "digest": run.task.digest},
        "metrics": run.metrics,
        "seconds": run.seconds,
        "evaluations": [
            {"step": one.step, "loss": one.loss if one.step else None, "metrics": one.metrics, "seconds": one.seconds}
            for one in run.evaluations
        ],
        "heads": evaluation_to_json(last.evaluations[-1])["layers"],
        "answers": [answer.to_json() for answer in answers],
        "laws": {}
        if laws is None
        else {one.slug: {"verdict": one.outcome, "cases": one.tried} for one in laws.verdicts},
        "pictures": list(map(str, pictures)),
    }
    if pruned is not None:
        value["pruned"] = {
            "dropped": {name: list(heads) for name, heads in pruned.dropped.items()},
            "accuracy": {"before": pruned.before, "after": pruned.after, "tuned": pruned.tuned.accuracy},
            "recipe": pruned.tuned.recipe.to_json(),
        }
    return value


def summarize_teacher(result: TeacherResult) -> dict[str, Any]:
    """The summary of a teacher-student experiment, for JSON."""
    from regard.train.history import summarize_heads

    return {
        "recipe": result.recipe.to_dict(),
        "loss": result.loss,
        "kernel_error": result.kernel_error,
        "seconds": result.seconds,
        "distances": result.distances.tolist(),
        "losses": result.losses,
        "heads": summarize_heads(result.head_profile)["heads"],
    }


def make_folder(folder: Path) -> None:
    """Make a folder, and its parents."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise InputError(
            f"{folder} cannot be created.",
            asked=f"--folder {folder}",
            found=f"{type(failure).__name__}: {failure}",
            because="the operating system refuses",
            instead="another folder",
        ) from failure
