"""Checkpoints for bit-identical resumption: folders that `from_pretrained` reads, each complete or not there.

checkpoints/step-00000240/   the model as `save_pretrained` writes it, and training.safetensors: optimizer state,
                             resume point, and the weights themselves where the model is their moving average; those of
                             several processes are in `sharded_checkpoint`
best/                        the model with the best metric so far
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import CheckpointError
from regard.models.io import atomic, tensors
from regard.models.io.folder import read_folder
from regard.models.load_state import find_stored_names
from regard.models.pretrained import Pretrained
from regard.train import sharded_checkpoint
from regard.train.optimizer import fill_tensors, load_optimizer_state, optimizer_state, prepare_optimizer
from regard.train.recipe import Recipe, read_recipe
from regard.train.resume_point import ResumePoint, parse_position
from regard.train.sharded_checkpoint import is_sharded

RECIPE = "recipe.json"
CHECKPOINTS, BEST, TRAINING = "checkpoints", "best", "training.safetensors"
STEP = re.compile(r"step-(\d{8,})")
WEIGHTS, OPTIMIZER = "weights/", "optimizer/"


# The recipe of a folder


def claim_folder(folder: Path, recipe: Recipe, digest: str, start: str | None = None) -> None:
    """Claim the folder for this recipe; raises if it has another recipe, other data or another initial model."""
    with atomic.lock_folder(folder) as exclusive:
        for place in (folder, *(path for path in folder.iterdir() if path.is_dir())):
            atomic.remove_stale_folders(place, alone=exclusive)
        _write_claim(folder, recipe, digest, start)


def _write_claim(folder: Path, recipe: Recipe, digest: str, start: str | None) -> None:
    mine = {**recipe.to_json(), "digest": digest, "start": start}
    path = folder / RECIPE
    if path.exists():
        found = _read_claim(folder)
        if found != mine:
            names = sorted(name for name in mine.keys() | found.keys() if mine.get(name) != found.get(name))
            raise CheckpointError(
                f"{folder} has a run with another recipe.",
                asked=", ".join(f"{name}={mine.get(name)!r}" for name in names),
                found=", ".join(f"{name}={found.get(name)!r}" for name in names),
                because="a run is resumed with the recipe and the data it started with",
                instead="another folder, or the recipe of the run in it",
            )
        return
    others = [file.name for file in folder.iterdir() if not file.name.startswith(atomic.WORK)]
    if others:
        raise CheckpointError(
            f"{folder} is not empty and has no run in it.",
            asked=f"a run in {folder}",
            found=", ".join(sorted(others)[:5]),
            because="the files of a run would be mixed with these",
            instead="a new folder",
        )
    atomic.write_atomically(path, atomic.make_json_writer(mine))


def _read_claim(folder: Path) -> dict[str, Any]:
    with _advising(f"the {RECIPE} that the run wrote, or another folder; checkpoints are still there"):
        return atomic.read_json(folder / RECIPE)


@contextlib.contextmanager
def _advising(instead: str) -> Iterator[None]:
    """Raise errors of files with what to do about them in the folder of a run."""
    try:
        yield
    except CheckpointError as failure:
        parts = {"asked": failure.asked, "found": failure.found, "because": failure.because}
        raise CheckpointError(failure.headline, **parts, instead=instead) from failure


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock the claimed folder against other processes; raises if another one holds the lock.

    The lock is on the recipe file, which is written once and never replaced. No lock file is left behind, and the lock
    is released when the process ends.
    """
    descriptor = None if atomic.fcntl is None else os.open(folder / RECIPE, os.O_RDONLY)
    try:
        if atomic.fcntl is not None and descriptor is not None:
            try:
                atomic.fcntl.flock(descriptor, atomic.fcntl.LOCK_EX | atomic.fcntl.LOCK_NB)
            except BlockingIOError as failure:
                raise CheckpointError(
                    f"{folder} is in use by another training process.",
                    asked=f"a run in {folder}",
                    found="another process that holds the lock",
                    because="two processes would overwrite each other's files",
                    instead="wait for it or stop it, or use another folder",
                ) from failure
            except OSError:  # some network file systems do not support locks
                pass
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def read_claimed_recipe(folder: Path) -> tuple[Recipe, str]:
    """The recipe of a folder, and the digest of its data."""
    value = _read_claim(folder)
    digest = value.pop("digest", "")
    value.pop("start", None)
    return read_recipe(value), digest


# State


def save(
    folder: Path,
    model: Pretrained,
    optimizer: torch.optim.Optimizer,
    position: ResumePoint,
    average: dict[str, Tensor] | None,
    keep: int,
) -> Path:
    """Write a checkpoint of the present step, and remove all but the `keep` newest.

    average: the moving average of the weights, which becomes the model of the checkpoint.
    """
    place = folder / CHECKPOINTS / f"step-{position.step:08d}"
    place.parent.mkdir(exist_ok=True)
    state = {f"{OPTIMIZER}{name}": tensor for name, tensor in optimizer_state(optimizer, model).items()}
    if average is not None:
        stored = find_stored_names(model)
        state |= {f"{WEIGHTS}{name}": each.clone() for name, each in model.state_dict().items() if name in stored}
    notes = {"position": json.dumps(dataclasses.asdict(position))}
    with atomic.temporary_folder(place.parent) as work, swapped_weights(model, average):
        model.save_pretrained(work / place.name)
        tensors.write_safetensors(work / place.name / TRAINING, state or {"empty": torch.zeros(1)}, notes)
        atomic.replace_folder(work / place.name, place, work)
    remove_old(folder, keep)
    return place


def remove_old(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the `keep` newest."""
    for old in find_checkpoints(folder)[:-keep]:
        _remove_folder(old)


def save_best(folder: Path, model: Pretrained, metrics: dict[str, Any]) -> None:
    """Write the model with the best metric so far to `best/`, with its metrics."""
    with atomic.temporary_folder(folder) as work:
        model.save_pretrained(work / BEST)
        atomic.write_atomically(work / BEST / "metrics.json", atomic.make_json_writer(metrics))
        atomic.replace_folder(work / BEST, folder / BEST, work)


def _remove_folder(place: Path) -> None:
    """Remove a folder that a crash must not leave half removed under its name."""
    with atomic.temporary_folder(place.parent) as work:
        os.replace(place, work / place.name)


@contextlib.contextmanager
def swapped_weights(model: nn.Module, average: dict[str, Tensor] | None) -> Iterator[None]:
    """Within the context the model's weights are their moving average, if there is one."""
    if average is None:
        yield
        return
    kept = {name: tensor.clone() for name, tensor in averaged_tensors(model).items()}
    copy_weights(model, average)
    try:
        yield
    finally:
        copy_weights(model, kept)


@torch.no_grad()
def copy_weights(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, tensor in averaged_tensors(model).items():
        tensor.copy_(values[name])


def averaged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a moving average is taken of: parameters, and the statistics of batch norms, which belong to them."""
    buffers = {name: tensor for name, tensor in model.named_buffers() if tensor.is_floating_point()}
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | buffers


@torch.no_grad()
def update_average(average: dict[str, Tensor], model: nn.Module, share: float) -> None:
    """Move the averaged weights towards those of the model by a share of their difference."""
    current = averaged_tensors(model)
    for names in (  # parameters may be sharded; buffers never are, and torch does not take both at once
        [name for name, _ in model.named_parameters()],
        [name for name, _ in model.named_buffers() if name in current],
    ):
        if names:
            mine, others = [average[name] for name in names], [current[name] for name in names]
            torch._foreach_lerp_(mine, others, share)  # pyright: ignore[reportPrivateImportUsage]


@torch.no_grad()
def copy_buffers(model: nn.Module, source: nn.Module, split: Container[str] = ()) -> None:
    """Copy the buffers of another model of the same kind: running means of batch norms and the like.

    split: the names of those of which the other has a part; they are gathered with the weights.
    """
    for (name, buffer), other in zip(model.named_buffers(), source.buffers(), strict=True):
        if name not in split:
            buffer.copy_(other)


def find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    places = [place for place in (folder / CHECKPOINTS).glob("step-*") if STEP.fullmatch(place.name)]
    return sorted(places, key=lambda place: int(place.name.removeprefix("step-")))


def read_position(place: Path) -> ResumePoint:
    """The resume point of a checkpoint."""
    return sharded_checkpoint.read_position(place) if is_sharded(place) else _read_training(place)[0]


def _read_training(place: Path) -> tuple[ResumePoint, dict[str, Tensor]]:
    path = place / TRAINING
    advice = f"remove {place} to resume from an earlier checkpoint or to start again, or use another folder"
    with _advising(advice):
        state, notes = tensors.read_with_metadata(path)
    try:
        return parse_position(json.loads(notes["position"])), state
    except (KeyError, TypeError, ValueError) as failure:
        raise CheckpointError(
            f"{path.name} is not of a checkpoint.",
            asked=str(path),
            found=f"{type(failure).__name__}: {failure}",
            because="it has no valid resume point",
            instead=advice,
        ) from failure


def restore_model(place: Path, model: Pretrained) -> None:
    """Load the weights of a model's folder; raises for the folder of another model."""
    if is_sharded(place):
        sharded_checkpoint.load_state(place, sharded_checkpoint.collect_state(model, None, None))
        return
    with _advising(f"remove {place} to resume from an earlier checkpoint or to start again, or use another folder"):
        state = read_folder(place)[1]
    _load_weights(place, model, state)


def _load_weights(place: Path, model: Pretrained, state: dict[str, Tensor]) -> None:
    wanted = find_stored_names(model)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items() if name in wanted}
    differing = sorted(
        name for name in shapes.keys() | state.keys() if name not in state or shapes.get(name) != state[name].shape
    )
    if differing:
        raise CheckpointError(
            f"{place.name} does not fit the recipe.",
            asked=str(place),
            found=f"other parameters: {', '.join(differing[:5])}{', ...' if len(differing) > 5 else ''}",
            because="it was written by a run with another model",
            instead="the unmodified folder of the run, or a new one",
        )
    fill_tensors({name: tensor for name, tensor in model.state_dict().items() if name in state}, state)


def restore(
    place: Path, model: Pretrained, optimizer: torch.optim.Optimizer, average: dict[str, Tensor] | None
) -> ResumePoint:
    """Restore the states of model, optimizer and moving average, and return the resume point."""
    if is_sharded(place):
        prepare_optimizer(optimizer)
        sharded_checkpoint.load_state(place, sharded_checkpoint.collect_state(model, optimizer, average))
        return sharded_checkpoint.read_position(place)
    position, state = _read_training(place)
    restore_model(place, model)
    if average is not None:
        for name, tensor in averaged_tensors(model).items():
            average[name].copy_(tensor)
        weights = select_prefix(state, WEIGHTS)
        _load_weights(place, model, weights)
    load_optimizer_state(optimizer, model, select_prefix(state, OPTIMIZER))
    return position


def select_prefix(state: dict[str, Tensor], start: str) -> dict[str, Tensor]:
    """The tensors whose names have this prefix, with the prefix removed."""
    return {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}
