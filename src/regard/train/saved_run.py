"""Reading runs from their folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from regard.errors import CheckpointError
from regard.train import checkpoint, history
from regard.train.loop import DTYPES
from regard.train.run import Evaluation, Run


def read_run(folder: str | os.PathLike[str], data: Any = None) -> Run:
    """Load a run, finished or not, from its folder.

    folder: the folder of the run.
    data: the data, if the recipe does not name a known data set.
    """
    place = Path(folder).expanduser()
    recipe, digest = checkpoint.read_claimed_recipe(place)
    newest = _find_newest(place)
    position = checkpoint.read_position(newest)
    task = recipe.make_task(data)
    if task.digest != digest:
        raise CheckpointError(
            "These are not the data of this run.",
            asked=repr(task.data),
            found=f"sha256 {task.digest[:16]}..., not {digest[:16]}...",
            because="the run was trained and evaluated on others",
            instead="read_run(folder, data=...) with the data that train was given",
        )
    with torch.random.fork_rng(devices=[]):
        model = task.build_model().to(DTYPES[recipe.precision])
    checkpoint.restore_model(newest, model)
    model.companions |= task.companions()
    evaluations = history.read_evaluations(place, position.evaluations)
    return Run(recipe, model.eval(), evaluations, task, place, position.finished or position.step >= task.steps)


def read_history(folder: str | os.PathLike[str]) -> list[Evaluation]:
    """Load the evaluations of a run, finished or not, from its folder; the data are not needed."""
    place = Path(folder).expanduser()
    checkpoint.read_claimed_recipe(place)
    return history.read_evaluations(place, checkpoint.read_position(_find_newest(place)).evaluations)


def _find_newest(place: Path) -> Path:
    found = checkpoint.find_checkpoints(place)
    if not found:
        raise CheckpointError(
            f"The run in {place} has no checkpoint.",
            asked=str(place),
            found="a recipe only",
            because="it was stopped before the first evaluation was complete",
            instead="train(recipe, folder), which starts it again",
        )
    return found[-1]
