"""The checkpoints that several processes write together, by torch's distributed checkpoint (DCP), read as a whole.

shard-00001-model-00001-of-00001.safetensors   the parts of process 0: of each tensor some rows, and in the header,
                                               under `DCP_SHARDING_INFO`, where they begin in the whole
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from regard.errors import CheckpointError
from regard.models.io import atomic, tensors

SHARDS = "shard-*.safetensors"
SHARDING = "DCP_SHARDING_INFO"
MODEL = "model/"  # what the names of a model's tensors begin with, beside those of its optimizer

Part = tuple[tuple[int, ...], Tensor]


def find_shards(folder: Path) -> list[Path]:
    """The files of a checkpoint of several processes; none in other folders."""
    return sorted(folder.glob(SHARDS))


def read_shards(folder: Path) -> dict[str, Tensor]:
    """The whole tensors of the model in a checkpoint of several processes, by name."""
    parts: dict[str, list[Part]] = {}
    for path in find_shards(folder):
        state, notes = tensors.read_with_metadata(path)
        try:
            places = json.loads(notes[SHARDING])
            for name, tensor in state.items():
                if name.startswith(MODEL):
                    place = tuple(int(each) for each in places[name]["saved_offsets"])
                    parts.setdefault(name.removeprefix(MODEL), []).append((place, tensor))
        except (KeyError, TypeError, ValueError) as failure:
            raise atomic.damage_error(path, failure, f"its header has no valid {SHARDING}") from failure
    return {name: _join(folder, name, several) for name, several in parts.items()}


def _join(folder: Path, name: str, parts: list[Part]) -> Tensor:
    first = parts[0][1]
    if all(len(place) == part.ndim == first.ndim and part.dtype == first.dtype for place, part in parts):
        ends = [[start + size for start, size in zip(place, part.shape, strict=True)] for place, part in parts]
        shape = [max(several) for several in zip(*ends, strict=True)]
        # Parts that do not overlap fill the whole if they have as many numbers as it has.
        if sum(part.numel() for _, part in parts) == torch.Size(shape).numel():
            whole = torch.empty(shape, dtype=first.dtype)
            for place, part in parts:
                whole[tuple(slice(start, start + size) for start, size in zip(place, part.shape, strict=True))] = part
            return whole
    raise CheckpointError(
        f"{name!r} is not whole.",
        asked=str(folder),
        found=f"{len(parts)} parts that do not make up a tensor",
        because="a part is missing or damaged",
        instead="all files of the checkpoint, or an earlier checkpoint",
    )
