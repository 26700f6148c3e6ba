"""A checkpoint: a folder with a configuration and tensors, or one file that holds both."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.errors import CheckpointError
from regard.models.io import atomic, distributed, gguf, llama2c, tensors

Content = tuple[dict[str, Any], dict[str, Tensor]]

CONFIG = "config.json"
# What lies beside a model and belongs to it: its tokenizer, how it reads images, how it writes.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "preprocessor_config.json",
    "generation_config.json",
)
TORCH_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# How often a folder is read anew because it was saved to meanwhile; the last time, saves have to wait.
TRIES = 5


def read_checkpoint(path: str | os.PathLike[str], *, quantized: bool = False) -> Content:
    """Configuration and tensors as they are stored, from a folder, a `.gguf`, or a `.bin`/`.data` of llama2.c.

    A file of tensors alone (`.safetensors`, `.pt`, `.pth`, torch's `.bin`) is read with the `config.json` beside it.
    Tensors may be views of mapped files: copy what should outlive them or be changed. `quantized` keeps the blocks of
    a `.gguf`.
    """
    path = Path(path).expanduser()
    try:
        is_folder = path.is_dir()
    except OSError as failure:
        raise atomic.permission_error(path, failure) from failure
    if is_folder:
        return read_folder(path)
    atomic.check_file(path)
    if path.suffix == ".gguf":
        return gguf.read_gguf(path, quantized=quantized)
    if path.suffix == ".safetensors":
        return atomic.read_json(path.with_name(CONFIG)), tensors.read_safetensors(path)
    if path.suffix in (".bin", ".data", ".pt", ".pth"):
        if path.suffix in (".bin", ".data") and not tensors.is_torch(path):
            return llama2c.read_llama2c(path)
        return atomic.read_json(path.with_name(CONFIG)), tensors.read_torch(path)
    raise CheckpointError(
        f"{path.name} is no checkpoint that is known here.",
        asked=str(path),
        found=f"a file that ends in {path.suffix!r}",
        because="known are folders with a config.json, and .safetensors .gguf .bin .data .pt .pth",
        instead="the folder that save_pretrained wrote",
    )


def read_companions(path: Path) -> dict[str, bytes]:
    """The files of the tokenizer and the like that lie in a model's folder; none for a single file.

    They are read with the model: by the time it is saved the folder may be gone, or another model's.
    """
    if not path.is_dir():
        return {}
    found = {}
    for name in COMPANIONS:
        with contextlib.suppress(OSError):
            if (path / name).is_file():
                found[name] = (path / name).read_bytes()
    return found


# Reading a folder


def read_folder(folder: Path) -> Content:
    """`config.json` and the tensors beside it: safetensors before torch's files, one file before shards.

    A save replaces the tensors and then `config.json`. So that the two belong together, the folder is read again if
    either was replaced meanwhile.
    """
    for _ in range(TRIES - 1):
        before = _find_file_identities(folder)
        try:
            content = _read_once(folder)
        except CheckpointError:
            if _find_file_identities(folder) == before:
                raise
            continue
        if _find_file_identities(folder) == before:
            return content
    with atomic.lock_folder(folder):
        return _read_once(folder)


def _find_file_identities(folder: Path) -> list[tuple[int, int] | None]:
    """What tells a file from the one that takes its name."""

    def find_identity(path: Path) -> tuple[int, int] | None:
        try:
            status = path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    return [find_identity(folder / name) for name in (CONFIG, tensors.SINGLE, tensors.INDEX)]


def _read_once(folder: Path) -> Content:
    config = atomic.read_json(folder / CONFIG)
    if (folder / tensors.SINGLE).is_file():
        state, notes = tensors.read_with_metadata(folder / tensors.SINGLE)
    elif (folder / tensors.INDEX).is_file():
        state, notes = tensors.read_index(folder / tensors.INDEX), tensors.read_index_metadata(folder / tensors.INDEX)
    elif distributed.find_shards(folder):
        return config, distributed.read_shards(folder)
    else:
        return config, _read_torch_folder(folder)
    return _find_pending_config(folder, notes) or config, state


def _find_pending_config(folder: Path, notes: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration that a save did not come to put in place, if the tensors here are of that save.

    A save marks its beginning by the configuration in its temporary folder, and its tensors carry the same notes.
    """
    try:
        noted = json.loads(notes["config"])
    except (KeyError, TypeError, ValueError, RecursionError):  # no tensors of ours
        return None
    for place in atomic.find_temporary_folders(folder):
        with contextlib.suppress(CheckpointError):  # a mark that was never completed
            if (place / CONFIG).is_file() and atomic.read_json(place / CONFIG) == noted:
                return noted
    return None


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
        raise atomic.missing_file_error(folder / tensors.SINGLE)
    raise CheckpointError(
        "This folder has several files of tensors and none of the expected name.",
        asked=str(folder),
        found=", ".join(file.name for file in others[:8]),
        because="nothing says which of them is meant",
        instead=f"the path of one of them, or rename it to {tensors.SINGLE}",
    )


# Writing a folder


def write_folder(
    folder: str | os.PathLike[str],
    config: dict[str, Any],
    state: Mapping[str, Tensor],
    *,
    shard_bytes: int = tensors.SHARD_BYTES,
    companions: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint so that the folder holds the previous one or this one, whole, at every moment.

    The new configuration is staged in a hidden folder, the tensors are switched over, then the configuration takes
    its name. `companions`, the files of a tokenizer and the like, are staged before the tensors are switched over, so
    that there is room for them, and each takes its name in one step between the tensors and the configuration.
    What a killed save left behind is finished or removed first. Two saves to one folder wait for each other.
    """
    folder = Path(folder).expanduser()
    try:
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(
                f"{folder} is a file.",
                asked=f"save a model to {folder}",
                because="a model is saved as a folder",
                instead="another name, or remove the file",
            )
        folder.mkdir(parents=True, exist_ok=True)
        with atomic.lock_folder(folder) as alone:
            _complete_interrupted_save(folder)
            atomic.remove_stale_folders(folder, alone=alone)
            _write_locked(folder, config, state, shard_bytes, companions or {})
    except OSError as failure:
        raise CheckpointError(
            f"Nothing can be saved to {folder}.",
            asked=f"save a model to {folder}",
            found=f"{type(failure).__name__}: {failure}",
            because="the system does not let this user write there, or there is no room",
            instead="a folder that can be written to; what was saved there before is still whole",
        ) from failure


def _write_locked(
    folder: Path,
    config: dict[str, Any],
    state: Mapping[str, Tensor],
    shard_bytes: int,
    companions: Mapping[str, bytes],
) -> None:
    notes = {"config": json.dumps(config, ensure_ascii=False)}
    work = atomic.make_temporary_folder(folder)
    try:
        staged = atomic.write_and_sync(work / CONFIG, atomic.make_json_writer(config))
        files = [_stage_bytes(work / name, content) for name, content in companions.items()]
        atomic.sync_folder(work)
        atomic.sync_folder(folder)
        tensors.write_tensors(folder, work, state, notes, shard_bytes=shard_bytes)
        for file in files:
            atomic.move_into_place(file, folder / file.name)
        atomic.move_into_place(staged, folder / CONFIG)
    except (Exception, KeyboardInterrupt):
        _complete_interrupted_save(
            folder
        )  # the tensors may be the new ones already; if this fails too, the mark has to stay
        shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work, ignore_errors=True)


def _stage_bytes(path: Path, content: bytes) -> Path:
    def write(file: Path) -> None:
        file.write_bytes(content)

    return atomic.write_and_sync(path, write)


def _complete_interrupted_save(folder: Path) -> None:
    """Bring `config.json` in line with the tensors, where a save was interrupted between the two.

    The mark of that save stays until this is done: it is in another temporary folder than the one used here.
    """
    if not (folder / CONFIG).exists() or not any(
        (place / CONFIG).exists() for place in atomic.find_temporary_folders(folder)
    ):
        return
    try:
        config, _ = _read_once(folder)
    except CheckpointError:  # there was nothing whole to keep
        return
    if config != atomic.read_json(folder / CONFIG):
        for place in atomic.find_temporary_folders(folder):
            with contextlib.suppress(CheckpointError):
                if (place / CONFIG).is_file() and atomic.read_json(place / CONFIG) == config:
                    for name in COMPANIONS:
                        if (place / name).is_file():
                            atomic.move_into_place(place / name, folder / name)
        atomic.write_atomically(folder / CONFIG, atomic.make_json_writer(config))
