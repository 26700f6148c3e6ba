"""Files of tensors: safetensors, one or in shards, and torch's own read without running anything in them."""

from __future__ import annotations

import errno
import os
import pickle
import re
import secrets
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import CheckpointError
from regard.models.io import atomic

State = dict[str, Tensor]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Larger files than this are inconvenient to move about; others choose the same.
SHARD_BYTES = 5_000_000_000
# The shards that we and others write, and no other file of a user's.
SHARD = re.compile(r"model-\d{5}-of-\d{5}(-[0-9a-f]{8})?\.safetensors")
# The longest name that the usual file systems have, in bytes.
LONGEST_NAME = 255


# Reading


def read_safetensors(path: str | os.PathLike[str]) -> State:
    """The tensors of one file, by name, mapped and not read: a page comes from the disk when it is first touched.

    >>> import tempfile
    >>> file = f"{tempfile.mkdtemp()}/two.safetensors"
    >>> write_safetensors(file, {"a": torch.arange(3.0), "b": torch.ones(2, 5)})
    >>> {name: tuple(tensor.shape) for name, tensor in read_safetensors(file).items()}
    {'a': (3,), 'b': (2, 5)}
    """
    return read_with_metadata(path)[0]


def read_with_metadata(path: str | os.PathLike[str]) -> tuple[State, dict[str, str]]:
    """The tensors of one file and the notes in its header, of one and the same file even if it is replaced now."""
    with _open_safetensors(Path(path)) as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no dict)
        return state, file.metadata() or {}


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    atomic.check_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError, ValueError, RuntimeError) as failure:
        raise atomic.damage_error(path, failure) from failure


def read_index(path: str | os.PathLike[str]) -> State:
    """The tensors of every shard that an index names, and only those the index says are there."""
    path = Path(path)
    shards = _read_weight_map(path)
    state: State = {}
    for name in sorted(set(shards.values())):
        file = path.with_name(name)
        if not file.is_file():
            raise CheckpointError(
                f"There is no {name}.",
                asked=str(file),
                found=f"{path.name} names it",
                because="a shard of this checkpoint is not there",
                instead="get all files of the checkpoint, or save the model once more",
            )
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


def _read_weight_map(path: Path) -> dict[str, str]:
    """Which file holds each tensor. Names with folders in them are refused: an index stays in its folder."""
    where = atomic.read_json(path).get("weight_map")
    if not isinstance(where, dict) or not all(map(_is_file_name, where.values())):
        raise CheckpointError(
            f"{path.name} is no index of shards.",
            asked=str(path),
            because="its weight_map must say for each tensor which file beside the index holds it",
            instead="get the file again, or save the model once more",
        )
    return where


def _is_file_name(name: object) -> bool:
    """Whether this can be the name of a file in the same folder, and nothing else."""
    if not isinstance(name, str) or name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        return False
    return len(name.encode("utf-8", errors="replace")) <= LONGEST_NAME


def read_index_metadata(path: Path) -> dict[str, Any]:
    """The notes in an index of shards."""
    notes = atomic.read_json(path).get("metadata") or {}
    if not isinstance(notes, dict):
        raise CheckpointError(
            f"{path.name} is no index of shards.",
            asked=str(path),
            found=f"metadata that is a {type(notes).__name__}",
            because="its metadata must be an object, {...}",
            instead="get the file again, or save the model once more",
        )
    return notes


# Files of torch


def is_torch(path: Path) -> bool:
    """Whether a file begins as torch's do: a zip archive, or a pickle of any protocol.

    The header of a llama2.c file begins with a width below 2^24, whose fourth byte is zero; no pickle has that.
    """
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PK\x03\x04":
        return True
    if len(start) < 4 or not start[3]:
        return False
    # from protocol 2 on its number comes first; before, what makes a tuple, a dict, a list or a name
    return (start[0] == 0x80 and start[1] <= pickle.HIGHEST_PROTOCOL) or start[0] in b"(}]lc"


def read_torch(path: str | os.PathLike[str]) -> State:
    """The tensors of a file that torch wrote (.bin, .pt, .pth); code inside it is never run."""
    path = Path(path)
    atomic.check_file(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about protocols and kinds of tensors, which are judged below
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as failure:
        raise _unpickling_error(path, failure) from None  # torch's own message advises to run it
    except Exception as failure:  # torch raises its own, pickle's, zip's and the system's, by the kind of damage
        raise atomic.damage_error(path, failure) from failure
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise CheckpointError(
            f"{path.name} holds no tensors by name.",
            asked=str(path),
            found=f"a {type(content).__name__}",
            because="a checkpoint is a dict of tensors, alone or under 'state_dict'",
            instead="torch.save(model.state_dict(), path)",
        )
    for name, tensor in content.items():
        _check_dense(path, name, tensor)
    return content


def _unpickling_error(path: Path, failure: pickle.UnpicklingError) -> CheckpointError:
    """Why torch did not read a pickle: something in it is more than tensors, or it is damaged."""
    wanted = re.search(r"GLOBAL ([\w.]+)", str(failure))
    if wanted is None and "Unsupported" not in str(failure):
        return atomic.damage_error(path, ValueError("no pickle that torch writes"))
    return CheckpointError(
        f"{path.name} contains code, which is never run.",
        asked=str(path),
        found=f"a pickle that calls {wanted[1]}" if wanted else "a pickle with more in it than tensors need",
        because="only tensors are read from such a file; a pickle may call any function",
        instead="a safetensors version of this checkpoint",
    )


def _check_dense(path: Path, name: str, tensor: Tensor) -> None:
    """Refuse tensors that are no plain rows of numbers."""
    sort = "without memory (meta)" if tensor.is_meta else "quantised" if tensor.is_quantized else ""
    if tensor.layout != torch.strided:
        sort = f"sparse ({tensor.layout})"
    if sort:
        raise CheckpointError(
            f"{path.name}: {name!r} is no plain tensor.",
            asked=str(path),
            found=f"a tensor that is {sort}",
            because="a model is made of dense tensors whose numbers are all there",
            instead="tensors that were made dense, or loaded to memory, before they are saved",
        )


# Writing


def write_safetensors(
    path: str | os.PathLike[str], state: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """One file, which replaces what was at `path` only once it is complete."""
    path = Path(path)
    with atomic.lock_folder(path.parent), atomic.temporary_folder(path.parent) as work:
        _write_file(path, work, state, metadata or {})


def _write_file(path: Path, work: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """The library writes to a file of another name first, and may leave that behind: so it writes in `work`."""
    notes = {"format": "pt", **metadata}  # readers of the format expect to be told whose tensors these are
    plain = _copy_shared(path, state)

    def write(file: Path) -> None:
        try:
            save_file(plain, file, metadata=notes)
        except SafetensorError as failure:  # the library wraps what the system says, as of a full disk
            code = re.search(r"os error (\d+)", str(failure))
            raise OSError(int(code[1]) if code else errno.EIO, str(failure), str(path)) from failure

    atomic.move_into_place(atomic.write_and_sync(work / path.name, write), path)


def write_tensors(
    folder: Path,
    work: Path,
    state: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """`model.safetensors`, or shards and their index when that would be larger than `shard_bytes`; made in `work`.

    At every moment the folder holds one whole checkpoint, the old or the new. A single file is replaced in one step.
    Shards get names that were never used, so no shard of the old checkpoint is touched before the index, which is
    replaced in one step, names the new ones. Where both a single file and an index exist the single file is read, so
    it appears first and leaves last.
    """
    single, index = folder / SINGLE, folder / INDEX
    shards = split_into_shards(state, shard_bytes)
    if len(shards) == 1:
        _write_file(single, work, state, metadata)
        _remove_shards(folder, keep=set())
        return
    save = secrets.token_hex(4)
    files = [f"model-{number + 1:05d}-of-{len(shards):05d}-{save}.safetensors" for number in range(len(shards))]
    for file, names in zip(files, shards, strict=True):
        _write_file(folder / file, work, {name: state[name] for name in names}, metadata)
    total = sum(tensor.nbytes for tensor in state.values())
    where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    content = {"metadata": {"total_size": total, **metadata}, "weight_map": where}
    atomic.move_into_place(atomic.write_and_sync(work / INDEX, atomic.make_json_writer(content)), index)
    single.unlink(missing_ok=True)
    _remove_shards(folder, keep={INDEX, *files})


def split_into_shards(state: Mapping[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """Names in their order, cut into runs of at most `shard_bytes`; a larger tensor is a run of its own.

    >>> split_into_shards({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(9), "d": torch.ones(1)}, 20)
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
        if SHARD.fullmatch(file.name) and file.name not in keep:
            file.unlink(missing_ok=True)


def _copy_shared(path: Path, state: Mapping[str, Tensor]) -> State:
    """Tensors that share no memory with each other, laid out plainly: what the format can hold."""
    seen: set[int] = set()
    plain = {}
    for name, tensor in state.items():
        _check_dense(path, name, tensor)
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.nbytes() != tensor.nbytes or storage.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        plain[name] = tensor
    return plain
