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
from regard.train.optimizing import memory_of, restore_memory
from regard.train.recipe import Recipe, read_recipe

RECIPE = "recipe.json"
CHECKPOINT = "checkpoint.safetensors"
MODEL, OPTIMIZER, CHANCE = "model/", "optimizer/", "chance"


@dataclass
class Position:
    """Progress of a run: complete epochs, and the steps of the next one with their accumulated metrics."""

    epoch: int = 0
    step: int = 0
    loss: float = 0.0
    images: int = 0
    seconds: float = 0.0


# The recipe of a folder


def claim(folder: Path, recipe: Recipe, digest: str, start: str | None = None) -> None:
    """Claim the folder for this recipe; raises if it has another recipe, other images or another initial model."""
    with atomic.locked(folder) as nobody_else:
        atomic.sweep(folder, alone=nobody_else)
        _claim(folder, recipe, digest, start)


def _claim(folder: Path, recipe: Recipe, digest: str, start: str | None) -> None:
    mine = {**recipe.to_json(), "digest": digest, "start": start}
    path = folder / RECIPE
    if path.exists():
        found = atomic.read_json(path)
        if found != mine:
            names = sorted(name for name in mine.keys() | found.keys() if mine.get(name) != found.get(name))
            raise CheckpointError(
                f"{folder} belongs to another run.",
                asked=", ".join(f"{name}={mine.get(name)!r}" for name in names),
                found=", ".join(f"{name}={found.get(name)!r}" for name in names),
                because="a run goes on with the recipe and the images that it began with",
                instead="another folder, or the recipe that is there",
            )
        return
    others = [file.name for file in folder.iterdir() if not file.name.startswith(atomic.WORK)]
    if others:
        raise CheckpointError(
            f"{folder} is not empty, and no run is in it.",
            asked=f"a run in {folder}",
            found=", ".join(sorted(others)[:5]),
            because="a run would mix its files with these",
            instead="a new folder",
        )
    atomic.write_atomically(path, atomic.json_writer(mine))


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
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
                    f"Somebody trains in {folder} already.",
                    asked=f"a run in {folder}",
                    found="another process that holds it",
                    because="two would write over each other's epochs",
                    instead="wait until it is done or stop it, or another folder",
                ) from failure
            except OSError:  # some network file systems do not support locks
                pass
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def read_claim(folder: Path) -> tuple[Recipe, str]:
    """The recipe of a folder, and the digest of its images."""
    value = atomic.read_json(folder / RECIPE)
    digest = value.pop("digest", "")
    value.pop("start", None)
    return read_recipe(value), digest


# State


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position) -> None:
    """Write the checkpoint atomically: the previous one stays until the new one is complete."""
    state = {f"{MODEL}{name}": tensor for name, tensor in model.state_dict().items()}
    state |= {f"{OPTIMIZER}{name}": tensor for name, tensor in memory_of(optimizer, model).items()}
    if position.step:  # the generator is reseeded at the start of every epoch
        state[CHANCE] = torch.get_rng_state()
    notes = {"position": json.dumps(dataclasses.asdict(position))}
    tensors.write_safetensors(folder / CHECKPOINT, state, notes)


def read(folder: Path) -> tuple[Position, dict[str, Tensor]] | None:
    """The position and the tensors of the checkpoint in a folder; None if there is none."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    state, notes = tensors.read_with_metadata(path)
    try:
        position = Position(**json.loads(notes["position"]))
        whole = (position.epoch, position.step, position.images)
        if not all(isinstance(count, int) and count >= 0 for count in whole):
            raise ValueError(repr(position))
        return position, state
    except (KeyError, TypeError, ValueError) as failure:
        raise CheckpointError(
            f"{CHECKPOINT} is of no run.",
            asked=str(path),
            found=f"{type(failure).__name__}: {failure}",
            because="it does not say how far the run was",
            instead="remove it to begin anew, or use another folder",
        ) from failure


def part(state: dict[str, Tensor], start: str) -> dict[str, Tensor]:
    """The tensors whose names have this prefix, with the prefix removed."""
    return {name.removeprefix(start): tensor for name, tensor in state.items() if name.startswith(start)}


def restore_model(folder: Path, model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load the model's state; raises for the checkpoint of another model."""
    try:
        model.load_state_dict(part(state, MODEL))
    except RuntimeError as failure:
        raise CheckpointError(
            f"{CHECKPOINT} does not fit the recipe.",
            asked=str(folder / CHECKPOINT),
            found=str(failure).strip().splitlines()[-1].strip(),
            because="it was written by a run with another model",
            instead="the folder as the run left it, or a new one",
        ) from failure


def _chance(folder: Path, state: dict[str, Tensor]) -> Tensor:
    if CHANCE not in state:
        raise CheckpointError(
            f"{CHECKPOINT} lacks a part.",
            asked=str(folder / CHECKPOINT),
            found=f"no {CHANCE!r}",
            because="a run that was stopped within an epoch goes on with the chance it had",
            instead="the folder as the run left it, or a new one",
        )
    return state[CHANCE].clone()


def restore(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position, state: dict[str, Tensor]
) -> None:
    """Restore the states of model, optimizer and random generator."""
    restore_model(folder, model, state)
    restore_memory(optimizer, model, part(state, OPTIMIZER))
    if position.step:
        torch.set_rng_state(_chance(folder, state))
