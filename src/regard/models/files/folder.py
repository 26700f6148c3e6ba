"""A checkpoint: a folder with a configuration and tensors, or one file that holds both."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.errors import CheckpointError
from regard.models.files import atomic, gguf, llama2c, tensors

CONFIG = "config.json"
TORCH_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# How files begin that torch writes: a zip archive, or the pickle of long ago.
TORCH_STARTS = (b"PK\x03\x04", b"\x80\x02")


def read_checkpoint(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors as they are stored, from a folder, a `.gguf`, or a `.bin`/`.data` of llama2.c.

    A file of tensors alone (`.safetensors`, `.pt`, `.pth`, torch's `.bin`) is read with the `config.json` beside it.
    Tensors may be views of mapped files: copy what should outlive them or be changed.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return read_folder(path)
    if not path.is_file():
        raise atomic.missing(path)
    if path.suffix == ".gguf":
        return gguf.read_gguf(path)
    if path.suffix == ".safetensors":
        return atomic.read_json(path.with_name(CONFIG)), tensors.read_safetensors(path)
    if path.suffix in (".bin", ".data", ".pt", ".pth"):
        with path.open("rb") as file:
            start = file.read(4)
        if path.suffix in (".bin", ".data") and not start.startswith(TORCH_STARTS):
            return llama2c.read_llama2c(path)
        return atomic.read_json(path.with_name(CONFIG)), tensors.read_torch(path)
    raise CheckpointError(
        f"{path.name} is no checkpoint that is known here.",
        asked=str(path),
        found=f"a file that ends in {path.suffix!r}",
        because="known are folders with a config.json, and .safetensors .gguf .bin .data .pt .pth",
        instead="the folder that save_pretrained wrote",
    )


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and the tensors beside it: safetensors before torch's files, one file before shards.

    A save that was interrupted after the tensors and before `config.json` leaves a trace of the latter. The tensors
    carry the configuration they were saved with, and then that one counts.
    """
    config = atomic.read_json(folder / CONFIG)
    single, index = folder / tensors.SINGLE, folder / tensors.INDEX
    if single.is_file():
        state, notes = tensors.read_safetensors(single), tensors.read_metadata(single)
    elif index.is_file():
        state, notes = tensors.read_index(index), atomic.read_json(index).get("metadata") or {}
    else:
        return config, _read_torch_folder(folder)
    if atomic.partial(folder / CONFIG).exists() and isinstance(saved := notes.get("config"), str):
        config = json.loads(saved)
    return config, state


def _read_torch_folder(folder: Path) -> dict[str, Tensor]:
    weights, index = (folder / name for name in TORCH_FILES)
    if weights.is_file():
        return tensors.read_torch(weights)
    if index.is_file():
        return tensors.read_index(index)
    others = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.pt")), *sorted(folder.glob("*.pth"))]
    if len(others) == 1:
        return (tensors.read_safetensors if others[0].suffix == ".safetensors" else tensors.read_torch)(others[0])
    if not others:
        raise atomic.missing(folder / tensors.SINGLE)
    raise CheckpointError(
        "This folder has several files of tensors and none of the expected name.",
        asked=str(folder),
        found=", ".join(file.name for file in others[:8]),
        because="nothing says which of them is meant",
        instead=f"the path of one of them, or rename it to {tensors.SINGLE}",
    )


def write_folder(
    folder: str | os.PathLike[str],
    config: dict[str, Any],
    state: Mapping[str, Tensor],
    *,
    shard_bytes: int = tensors.SHARD_BYTES,
) -> None:
    """Write a checkpoint so that the folder holds the previous one or this one, whole, at every moment.

    The new configuration is staged under a hidden name, the tensors are switched over, then the configuration takes
    its name. What an interrupted save left behind is removed first.
    """
    folder = Path(folder).expanduser()
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file.",
            asked=f"save a model to {folder}",
            because="a model is saved as a folder",
            instead="another name, or remove the file",
        )
    folder.mkdir(parents=True, exist_ok=True)
    _finish(folder)
    atomic.sweep(folder)
    atomic.stage(folder / CONFIG, atomic.json_writer(config))
    notes = {"config": json.dumps(config, ensure_ascii=False)}
    tensors.write_tensors(folder, state, notes, shard_bytes=shard_bytes)
    atomic.commit(folder / CONFIG)


def _finish(folder: Path) -> None:
    """Bring `config.json` in line with the tensors, where the last save was interrupted between the two."""
    if not atomic.partial(folder / CONFIG).exists() or not (folder / CONFIG).exists():
        return
    try:
        config, _ = read_folder(folder)
    except CheckpointError:  # there was nothing whole to keep
        return
    atomic.write_atomically(folder / CONFIG, atomic.json_writer(config))
