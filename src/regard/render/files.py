"""Output files: the suffix selects the format, and the folder is created."""

from __future__ import annotations

import os
from pathlib import Path

from regard.errors import InputError


def check_suffix(path: str | os.PathLike[str], suffixes: tuple[str, ...]) -> Path:
    """The path, if its suffix is one of these."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(
            "The path is not a file name.",
            asked=f"path={path!r}"[:80],
            because=f"{type(path).__name__} is neither a string nor a path",
            instead=f'path="picture{suffixes[0]}"',
        )
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise InputError(
            f"A picture cannot be written as {path.suffix or 'a file without a suffix'}.",
            asked=str(path),
            because=f"it is written as {', '.join(suffixes)}",
            instead=" or ".join(str(path.with_suffix(suffix)) for suffix in suffixes),
        )
    return path


def write_file(path: str | os.PathLike[str], data: str | bytes) -> Path:
    """Write a file, text as UTF-8, and create its folder."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as failure:
        raise InputError(
            f"{path} cannot be written.",
            found=f"{type(failure).__name__}: {failure}",
            because="the operating system refuses",
            instead="a file in a writable folder",
        ) from failure
    return path
