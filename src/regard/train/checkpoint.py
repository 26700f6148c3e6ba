"""Checkpoints for bit-identical resumption: one file, replaced atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.errors import CheckpointError
from regard.models.io import atomic, tensors
from regard.train.optimizer import load_optimizer_state, optimizer_state
from regard.train.recipe import Recipe, read_recipe

RECIPE = "recipe.json"
CHECKPOINT = "checkpoint.safetensors"
MODEL, OPTIMIZER, RNG_STATE = "model/", "optimizer/", "chance"


@dataclass
class ResumePoint:
    """Progress of a run: complete epochs, and the steps of the next one with their accumulated metrics."""

    epoch: int = 0
    step: int = 0
    loss: float = 0.0
    images: int = 0
    seconds: float = 0.0


# The recipe of a folder


def claim_folder(folder: Path, recipe: Recipe, digest: str, start: str | None = None) -> None:
    """Claim the folder for this recipe; raises if it has another recipe, other images or another initial model."""
    with atomic.lock_folder(folder) as exclusive:
        atomic.remove_stale_folders(folder, alone=exclusive)
        _write_claim(folder, recipe, digest, start)


def _write_claim(folder: Path, recipe: Recipe, digest: str, start: str | None) -> None:
    mine = {**recipe.to_json(), "digest": digest, "start": start}
    path = folder / RECIPE
    if path.exists():
        found = atomic.read_json(path)
        if found != mine:
            names = sorted(name for name in mine.keys() | found.keys() if mine.get(name) != found.get(name))
            raise CheckpointError(
                f"{folder} has a run with another recipe.",
                asked=", ".join(f"{name}={mine.get(name)!r}" for name in names),
                found=", ".join(f"{name}={found.get(name)!r}" for name in names),
                because="a run is resumed with the recipe and the images it started with",
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
                    because="two processes would overwrite each other's epochs",
                    instead="wait for it or stop it, or use another folder",
                ) from failure
            except OSError:  # some network file systems do not support locks
                pass
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def read_claimed_recipe(folder: Path) -> tuple[Recipe, str]:
    """The recipe of a folder, and the digest of its images."""
    value = atomic.read_json(folder / RECIPE)
    digest = value.pop("digest", "")
    value.pop("start", None)
    return read_recipe(value), digest


# State


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: ResumePoint) -> None:
    """Write the checkpoint atomically: the previous one stays until the new one is complete."""
    state = {f"{MODEL}{name}": tensor for name, tensor in model.state_dict().items()}
    state |= {f"{OPTIMIZER}{name}": tensor for name, tensor in optimizer_state(optimizer, model).items()}
    if position.step:  # the generator is reseeded at the start of every epoch
        state[RNG_STATE] = torch.get_rng_state()
    notes = {"position": json.dumps(dataclasses.asdict(position))}
    tensors.write_safetensors(folder / CHECKPOINT, state, notes)


def read(folder: Path) -> tuple[ResumePoint, dict[str, Tensor]] | None:
    """The position and the tensors of the checkpoint in a folder; None if there is none."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    state, notes = tensors.read_with_metadata(path)
    try:
        position = ResumePoint(**json.loads(notes["position"]))
        counts = (position.epoch, position.step, position.images)
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise ValueError(repr(position))
        return position, state
    except (KeyError, TypeError, ValueError) as failure:
        raise CheckpointError(
            f"{CHECKPOINT} is not a checkpoint of a run.",
            asked=str(path),
            found=f"{type(failure).__name__}: {failure}",
            because="it has no valid resume point",
            instead="remove it to start again, or use another folder",
        ) from failure


def select_prefix(state: dict[str, Tensor], start: str) -> dict[str, Tensor]:
    """The tensors whose names have this prefix, with the prefix removed."""
    return {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}


def restore_model(folder: Path, model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load the model's state; raises for the checkpoint of another model."""
    try:
        model.load_state_dict(select_prefix(state, MODEL))
    except RuntimeError as failure:
        raise CheckpointError(
            f"{CHECKPOINT} does not fit the recipe.",
            asked=str(folder / CHECKPOINT),
            found=str(failure).strip().splitlines()[-1].strip(),
            because="it was written by a run with another model",
            instead="the unmodified folder of the run, or a new one",
        ) from failure


def _read_rng_state(folder: Path, state: dict[str, Tensor]) -> Tensor:
    if RNG_STATE not in state:
        raise CheckpointError(
            f"{CHECKPOINT} is incomplete.",
            asked=str(folder / CHECKPOINT),
            found=f"no {RNG_STATE!r}",
            because="a run that was interrupted within an epoch needs the state of the random generator",
            instead="the unmodified folder of the run, or a new one",
        )
    return state[RNG_STATE].clone()


def restore(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: ResumePoint, state: dict[str, Tensor]
) -> None:
    """Restore the states of model, optimizer and random generator."""
    restore_model(folder, model, state)
    load_optimizer_state(optimizer, model, select_prefix(state, OPTIMIZER))
    if position.step:
        torch.set_rng_state(_read_rng_state(folder, state))
