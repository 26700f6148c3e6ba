"""What `regard train` prints and writes: tables of heads, and summaries."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import InputError

if TYPE_CHECKING:
    from regard.train import Lesson, Pruned, Run


def print_heads(run: Run) -> None:
    """Every head of every layer: its centre, centre of mass and width, its contours, its share, if it is degenerate."""
    from regard.render.table import Column, Table
    from regard.render.terminal import print_fitted
    from regard.train.history import describe

    profiles = run.epochs[-1].head_profiles
    if not profiles:
        return
    print(f"Where the heads look after epoch {run.epochs[-1].number}, in tokens (row, column) from the query;")
    print("50 % and 90 %: the fewest tokens that hold so much of the weight\n")
    rows, sections = [], []
    for layer, profile in profiles.items():
        sections.append(len(rows))
        for number, head in enumerate(describe(profile)["heads"]):
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


def print_lesson(lesson: Lesson) -> None:
    """What the student has learned, and where its heads stand."""
    print(f"relative loss {lesson.loss:.2e} on new images, {lesson.seconds:.0f} s")
    print(f"effective kernel: relative error {lesson.kernel_error:.2e}")
    far = lesson.distances
    print(f"heads stand {far.mean():.2f} pixels from the lattice on average, {far.min():.2f} to {far.max():.2f};")
    print("  only the effective kernel is determined by what is learned from")


def format_position(pair: list[float]) -> str:
    return f"{pair[0]:+.2f} {pair[1]:+.2f}"


def summary(run: Run, pruned: Pruned | None, pictures: list[Path]) -> dict[str, Any]:
    """A run in numbers."""
    from regard.train.history import line_of

    last = run if pruned is None else pruned.tuned
    value = {
        "recipe": run.recipe.to_json(),
        "folder": str(run.folder),
        "data": {"name": run.data.name, "digest": run.data.digest},
        "accuracy": run.accuracy,
        "seconds": run.seconds,
        "epochs": [{"epoch": one.number, "accuracy": one.accuracy, "seconds": one.seconds} for one in run.epochs],
        "heads": line_of(last.epochs[-1])["layers"],
        "pictures": list(map(str, pictures)),
    }
    if pruned is not None:
        value["pruned"] = {
            "dropped": {name: list(heads) for name, heads in pruned.dropped.items()},
            "accuracy": {"before": pruned.before, "after": pruned.after, "tuned": pruned.tuned.accuracy},
            "recipe": pruned.tuned.recipe.to_json(),
        }
    return value


def lesson_summary(lesson: Lesson) -> dict[str, Any]:
    """A lesson in numbers."""
    from regard.train.history import describe

    return {
        "recipe": lesson.recipe.to_dict(),
        "loss": lesson.loss,
        "kernel_error": lesson.kernel_error,
        "seconds": lesson.seconds,
        "distances": lesson.distances.tolist(),
        "losses": lesson.losses,
        "heads": describe(lesson.head_profile)["heads"],
    }


def write_json(file: str | Path, value: dict[str, Any]) -> None:
    """Write a summary, or say why it cannot be written."""
    try:
        Path(file).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as failure:
        raise _refused(file, f"{type(failure).__name__}: {failure}") from failure
    print(f"wrote {file}", file=sys.stderr)


def check_json(file: str | None) -> None:
    """Refuse a summary that could not be written, before anything is learned."""
    if file is not None and (Path(file).is_dir() or not Path(file).parent.is_dir()):
        raise _refused(file, "a folder" if Path(file).is_dir() else f"no folder {Path(file).parent}")


def make_folder(folder: Path) -> None:
    """A folder to write to, or why there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise InputError(
            f"{folder} cannot be made.",
            asked=f"--folder {folder}",
            found=f"{type(failure).__name__}: {failure}",
            because="the system refuses",
            instead="another folder",
        ) from failure


def _refused(file: str | Path, found: str) -> InputError:
    return InputError(
        f"{file} cannot be written.",
        asked=str(file),
        found=found,
        because="the system refuses",
        instead="the name of a file in a folder that exists",
    )
