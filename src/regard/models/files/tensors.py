"""Files of tensors: safetensors, one or in shards, and torch's own read without running anything in them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import CheckpointError
from regard.models.files import atomic

State = dict[str, Tensor]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Larger files than this are inconvenient to move about; others choose the same.
SHARD_BYTES = 5_000_000_000


# Reading


def read_safetensors(path: str | os.PathLike[str]) -> State:
    """The tensors of one file, by name, mapped and not read: a page comes from the disk when it is first touched.

    >>> import tempfile
    >>> file = f"{tempfile.mkdtemp()}/two.safetensors"
    >>> write_safetensors(file, {"a": torch.arange(3.0), "b": torch.ones(2, 5)})
    >>> {name: tuple(tensor.shape) for name, tensor in read_safetensors(file).items()}
    {'a': (3,), 'b': (2, 5)}
    """
    with _opened(Path(path)) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no dict)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The notes in the header of a safetensors file."""
    with _opened(Path(path)) as file:
        return file.metadata() or {}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise atomic.missing(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError, RuntimeError) as failure:
        raise _damaged(path, failure) from failure


def read_index(path: str | os.PathLike[str]) -> State:
    """The tensors of every shard that an index names, and only those the index says are there."""
    path = Path(path)
    shards = _shards(path)
    state: State = {}
    for name in sorted(set(shards.values())):
        file = path.with_name(name)
        state |= read_safetensors(file) if file.suffix == ".safetensors" else read_torch(file)
    if absent := sorted(shards.keys() - state.keys()):
        raise CheckpointError(
            f"{path.name} promises tensors that its shards do not hold.",
            asked=str(path),
            found=f"no {', '.join(absent[:8])}",
            because="index and shards belong to different checkpoints",
            instead="get all files of one checkpoint again",
        )
    return {name: state[name] for name in shards}


def _shards(path: Path) -> dict[str, str]:
    """Which file holds each tensor. Names with folders in them are refused: an index stays in its folder."""
    where = atomic.read_json(path).get("weight_map")
    good = isinstance(where, dict) and all(
        isinstance(file, str) and file and Path(file).name == file for file in where.values()
    )
    if not isinstance(where, dict) or not good:
        raise CheckpointError(
            f"{path.name} is no index of shards.",
            asked=str(path),
            because="its weight_map must say for each tensor which file beside the index holds it",
            instead="get the file again, or save the model once more",
        )
    return where


def read_torch(path: str | os.PathLike[str]) -> State:
    """The tensors of a file that torch wrote (.bin, .pt, .pth); code inside it is never run."""
    path = Path(path)
    if not path.is_file():
        raise atomic.missing(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as failure:  # torch raises its own, pickle's, zip's and the system's, by the kind of damage
        raise _damaged(path, failure) from failure
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(
            f"{path.name} holds no tensors by name.",
            asked=str(path),
            found=f"a {type(content).__name__}",
            because="a checkpoint is a dict of tensors, alone or under 'state_dict'",
            instead="torch.save(model.state_dict(), path)",
        )
    return content


def _damaged(path: Path, failure: BaseException) -> CheckpointError:
    first = str(failure).strip().splitlines()
    return CheckpointError(
        f"{path.name} cannot be read.",
        asked=str(path),
        found=f"{path.stat().st_size:,} bytes; {type(failure).__name__}: {first[0] if first else 'no more is known'}",
        because="it is cut short, damaged, or not in the format its name says",
        instead="get the file again, or save the model once more",
    )


# Writing


def write_safetensors(
    path: str | os.PathLike[str], state: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """One file, which replaces what was at `path` only once it is complete."""
    notes = {"format": "pt", **(metadata or {})}  # readers of the format expect to be told whose tensors these are
    atomic.write_atomically(Path(path), lambda temporary: save_file(_alone(state), temporary, metadata=notes))


def write_tensors(
    folder: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str], *, shard_bytes: int = SHARD_BYTES
) -> None:
    """`model.safetensors`, or shards and their index when that would be larger than `shard_bytes`.

    At every moment the folder holds one whole checkpoint, the old or the new. A single file is replaced in one step.
    Shards get names that were never used, so no shard of the old checkpoint is touched before the index, which is
    replaced in one step, names the new ones. Where both a single file and an index exist the single file is read, so
    it appears first and leaves last.
    """
    single, index = folder / SINGLE, folder / INDEX
    shards = split(state, shard_bytes)
    if len(shards) == 1:
        write_safetensors(single, state, metadata)
        _remove_shards(folder, keep=set())
        return
    save = secrets.token_hex(4)
    files = [f"model-{number + 1:05d}-of-{len(shards):05d}-{save}.safetensors" for number in range(len(shards))]
    for file, names in zip(files, shards, strict=True):
        write_safetensors(folder / file, {name: state[name] for name in names}, metadata)
    total = sum(tensor.nbytes for tensor in state.values())
    where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    atomic.write_atomically(
        index, atomic.json_writer({"metadata": {"total_size": total, **metadata}, "weight_map": where})
    )
    single.unlink(missing_ok=True)
    _remove_shards(folder, keep={INDEX, *files})


def split(state: Mapping[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """Names in their order, cut into runs of at most `shard_bytes`; a larger tensor is a run of its own.

    >>> split({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(9), "d": torch.ones(1)}, 20)
    [['a', 'b'], ['c'], ['d']]
    """
    runs: list[list[str]] = [[]]
    filled = 0
    for name, tensor in state.items():
        if runs[-1] and filled + tensor.nbytes > shard_bytes:
            runs.append([])
            filled = 0
        runs[-1].append(name)
        filled += tensor.nbytes
    return runs


def _remove_shards(folder: Path, keep: set[str]) -> None:
    """Shards that no index names any more; the index goes before its shards, so that it never lacks one."""
    if INDEX not in keep:
        (folder / INDEX).unlink(missing_ok=True)
    for file in folder.glob("model-*-of-*.safetensors"):
        if file.name not in keep:
            file.unlink(missing_ok=True)


def _alone(state: Mapping[str, Tensor]) -> State:
    """Tensors that share no memory with each other, laid out plainly: what the format can hold."""
    seen: set[int] = set()
    plain = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        plain[name] = tensor
    return plain
