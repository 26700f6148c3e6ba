"""Writing a file so that a crash leaves the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError

try:
    import fcntl
except ImportError:  # not on every system; saves still have unique names there
    fcntl = None

# A file is written in a hidden folder beside its destination and then moved: only a rename within one file system is
# atomic. No other program uses the prefix, so what a killed save left behind can be removed.
WORK = ".regard-save-"
# Where folders cannot be locked, one this old belongs to no running save.
STALE_SECONDS = 24 * 3600


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder inside `folder` for incomplete files, removed at the end."""
    work = make_temporary_folder(folder)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def make_temporary_folder(folder: Path) -> Path:
    """A hidden folder that the caller removes."""
    work = folder / f"{WORK}{secrets.token_hex(4)}"
    work.mkdir()
    return work


def write_and_sync(path: Path, write: Callable[[Path], None]) -> Path:
    """Write a file in a temporary folder and fsync it; no visible file changes yet."""
    usual = path.with_name(f"{path.name}.mode")
    usual.touch()  # the default mode; some writers make files that only their owner may read
    mode = usual.stat().st_mode & 0o777
    os.remove(usual)
    write(path)
    path.chmod(mode)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return path


def move_into_place(staged: Path, path: Path) -> None:
    """Rename a complete file to its destination, atomically."""
    os.replace(staged, path)
    sync_folder(path.parent)


def replace_folder(new: Path, place: Path, work: Path) -> None:
    """Move a complete folder to its name. An old one is moved to `work` first, to be removed with it: after a crash in
    between there is none, and what made the new one is run again from what came before."""
    if place.exists():
        os.replace(place, work / f"{place.name}.old")
    move_into_place(new, place)


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """`write(temporary)` makes the file; only when it is complete and on the disk does it replace `path`.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "note.txt"
    >>> write_atomically(path, lambda temporary: temporary.write_text("seven"))
    >>> path.read_text()
    'seven'
    """
    with temporary_folder(path.parent) as work:
        move_into_place(write_and_sync(work / path.name, write), path)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[bool]:
    """Hold an exclusive lock on this folder; yields False where the system has no such locks.

    The lock is on the folder itself, so it leaves no file behind and is released when its process ends.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY) if fcntl is not None else None
    except OSError:
        descriptor = None
    if fcntl is None or descriptor is None:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # some network file systems lock nothing
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def write_folder_once(path: Path, marker: str, write: Callable[[Path], None]) -> None:
    """`write(temporary)` fills the folder `path`, which appears complete or not at all, unless it holds `marker`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock_folder(path.parent) as alone:
        if (path / marker).is_file():  # another process has written it meanwhile
            return
        remove_stale_folders(path.parent, alone=alone)
        with temporary_folder(path.parent) as work:
            staged = work / path.name
            staged.mkdir()
            write(staged)
            shutil.rmtree(path, ignore_errors=True)  # incomplete: it has no marker
            move_into_place(staged, path)


def find_temporary_folders(folder: Path) -> list[Path]:
    """The temporary folders inside a folder, of running or killed saves."""
    return sorted(place for place in folder.glob(f"{WORK}*") if place.is_dir())


def remove_stale_folders(folder: Path, *, alone: bool) -> None:
    """Remove what killed saves left in a folder. alone: no other save runs there, ensured by a lock."""
    for place in find_temporary_folders(folder):
        with contextlib.suppress(OSError):
            if alone or time.time() - place.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(place, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """A rename is safe from a power cut only once the folder itself is on the disk."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # some systems do not open folders; their renames are as safe as they get
        return
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Reading


def check_file(path: Path) -> None:
    """Raise for a file that does not exist or cannot be opened."""
    try:
        there = path.is_file()
    except OSError as failure:
        raise permission_error(path, failure) from failure
    if not there:
        raise missing_file_error(path)
    if not os.access(path, os.R_OK):
        raise permission_error(path)


def permission_error(path: Path, failure: OSError | None = None) -> CheckpointError:
    """The error for a file without read permission."""
    return CheckpointError(
        f"{path.name} may not be opened by this user.",
        asked=str(path),
        found="no permission to read it" if failure is None else f"{type(failure).__name__}: {failure}",
        because="the system does not let this user read it",
        instead="ask its owner for permission to read (chmod), or copy the file",
    )


def missing_file_error(path: Path) -> CheckpointError:
    """The error for a file that does not exist."""
    folder = path.parent
    try:
        present = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    except OSError:
        present = []
    listing = ", ".join(present[:8]) + (", ..." if len(present) > 8 else "")
    return CheckpointError(
        f"{path.name} does not exist.",
        asked=str(path),
        found=f"in {folder}: {listing or 'nothing'}" if folder.is_dir() else f"no folder {folder}",
        because="a checkpoint is a folder with config.json and weights, or a file of weights beside its config.json"
        if path.name == "config.json"
        else "there is no such file or folder",
        instead="check the path, or save the model there by save_pretrained",
    )


def damage_error(
    path: Path,
    failure: BaseException | str,
    because: str = "it is cut short, damaged, or not in the format its name says",
) -> CheckpointError:
    """The error for a file that is there and cannot be read; `failure` is what reading it ended in."""
    try:
        size = path.stat().st_size
    except OSError:  # it was removed after it had been found
        return missing_file_error(path)
    first = str(failure).strip().splitlines() or ["no further details"]
    return CheckpointError(
        f"{path.name} cannot be read.",
        asked=str(path),
        found=f"{size:,} bytes; {failure if isinstance(failure, str) else f'{type(failure).__name__}: {first[0]}'}",
        because=because,
        instead="get the file again, or save the model once more",
    )


# JSON, which configurations and indices are written in


def format_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def make_json_writer(value: dict[str, Any]) -> Callable[[Path], None]:
    """A writer of this value, for `write_and_sync` and `write_atomically`."""
    text = format_json(value)

    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    return write


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a CheckpointError that names the file where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise missing_file_error(path) from None
    except PermissionError as failure:
        raise permission_error(path, failure) from failure
    except (OSError, ValueError, RecursionError) as failure:
        raise damage_error(path, failure, "it is not the JSON it should be, or may not be opened") from failure
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path.name} does not hold what it should.",
            asked=str(path),
            found=f"a {type(value).__name__}",
            because="a configuration or an index is a JSON object, {...}",
            instead="get the file again, or save the model once more",
        )
    return value
