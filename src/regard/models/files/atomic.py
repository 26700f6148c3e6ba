"""Writing a file so that a crash leaves the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError

# Hidden, so that no reader takes a leftover for a checkpoint, and beside the target, since only a rename within one
# file system is atomic.
PARTIAL = ".partial"


def partial(path: Path) -> Path:
    """Where a file is written before it takes its name."""
    return path.with_name(f".{path.name}{PARTIAL}")


def stage(path: Path, write: Callable[[Path], None]) -> Path:
    """Write beside `path`, down to the disk; nothing that can be read has changed yet."""
    temporary = partial(path)
    write(temporary)
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    return temporary


def commit(path: Path) -> None:
    """What was staged for `path` takes its name, in one step that cannot be seen half done."""
    os.replace(partial(path), path)
    sync_folder(path.parent)


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """`write(temporary)` makes the file; only when it is complete and on the disk does it replace `path`.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "note.txt"
    >>> write_atomically(path, lambda temporary: temporary.write_text("seven"))
    >>> path.read_text()
    'seven'
    """
    try:
        stage(path, write)
    except BaseException:
        with contextlib.suppress(OSError):
            partial(path).unlink(missing_ok=True)
        raise
    commit(path)


def sweep(folder: Path) -> list[Path]:
    """Remove what interrupted saves left in a folder."""
    leftovers = sorted(folder.glob(f".*{PARTIAL}"))
    for leftover in leftovers:
        leftover.unlink(missing_ok=True)
    return leftovers


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


# JSON, which configurations and indices are written in


def json_text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def json_writer(value: dict[str, Any]) -> Callable[[Path], None]:
    """A writer of this value, for `stage` and `write_atomically`."""
    text = json_text(value)

    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    return write


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a CheckpointError that names the file where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise missing(path) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as failure:
        raise CheckpointError(
            f"{path.name} cannot be read.",
            asked=str(path),
            found=f"{type(failure).__name__}: {failure}",
            because="it is not the JSON it should be, or may not be opened",
            instead="get the file again, or save the model once more",
        ) from failure
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path.name} does not hold what it should.",
            asked=str(path),
            found=f"a {type(value).__name__}",
            because="a configuration or an index is a JSON object, {...}",
            instead="get the file again, or save the model once more",
        )
    return value


def missing(path: Path) -> CheckpointError:
    """The error for a file that is not there."""
    folder = path.parent
    present = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    listing = ", ".join(present[:8]) + (", ..." if len(present) > 8 else "")
    return CheckpointError(
        f"There is no {path.name}.",
        asked=str(path),
        found=f"in {folder}: {listing or 'nothing'}" if folder.is_dir() else f"no folder {folder}",
        because="the file is not there",
        instead="check the path, or save the model there first",
    )
