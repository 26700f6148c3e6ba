"""Files that commands write, and the status line while they run."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.errors import InputError
from regard.render.files import write_file

STDOUT = "-"


def check_writable(*files: str | None) -> None:
    """Raise for output files that cannot be written, before the work begins."""
    for file in files:
        if file is None or file == STDOUT:
            continue
        path = Path(file)
        if path.is_dir() or not path.resolve().parent.is_dir():
            raise InputError(
                f"{file} cannot be written.",
                because="it is a folder" if path.is_dir() else f"there is no folder {path.resolve().parent}",
                instead="the name of a file in an existing folder",
            )


def write_json(value: Any, file: str | Path) -> None:
    """Write a value as JSON to a file, or to stdout if the file is `-`."""
    text = json.dumps(value, indent=2) + "\n"
    if str(file) == STDOUT:
        print(text, end="")
    else:
        write_file(file, text)
        report_written(file)


def report_written(*files: str | Path) -> None:
    """Name written files on stderr."""
    for file in files:
        print(f"wrote {file}", file=sys.stderr)


@contextmanager
def status(message: str, after: float = 1.0) -> Iterator[None]:
    """Show a message on stderr, if it is a terminal, while something takes longer than `after` seconds."""
    if not sys.stderr.isatty():
        yield
        return
    stream, shown = sys.stderr, threading.Event()

    def show() -> None:
        shown.set()
        print(f"{message} ...", end="", file=stream, flush=True)

    timer = threading.Timer(after, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if shown.is_set():
            print("\r\x1b[K", end="", file=stream, flush=True)
