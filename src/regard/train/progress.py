"""A progress bar, and an interrupt that waits for the end of a step."""

from __future__ import annotations

import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Tell = Callable[[int, float | None, float | None], None]


@contextmanager
def bar(recipe_epochs: int, steps: int, done: int, batch: int, shown: bool) -> Iterator[Tell]:
    """A callback for every step: the total number of steps, and the latest loss and accuracy if they changed.

    It draws a progress bar if stderr is a terminal, and clears it at the end.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda done, loss, accuracy: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]}  accuracy {task.fields[accuracy]}  {task.fields[pace]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        first: dict[str, Any] = {"loss": "-", "accuracy": "-", "pace": ""}
        total = recipe_epochs * steps
        task = progress.add_task("train", total=total, completed=done, epoch=1, epochs=recipe_epochs, **first)

        def tell(done: int, loss: float | None, accuracy: float | None) -> None:
            fields: dict[str, Any] = {"epoch": min(done // steps + 1, recipe_epochs)}
            if loss is not None:
                fields["loss"] = f"{loss:.4f}"
            if accuracy is not None:
                fields["accuracy"] = f"{accuracy:.2%}"
            speed = progress.tasks[0].speed
            if speed:
                fields["pace"] = f"{speed * batch:,.0f} images/s"
            progress.update(task, completed=done, **fields)

        yield tell


@contextmanager
def patient() -> Iterator[Callable[[], bool]]:
    """Context in which the first Ctrl-C only sets a flag, returned by the yielded function; a second one interrupts.

    No step is left incomplete. Outside the main thread signals are handled as usual.
    """
    asked = False

    def wait(number: int, frame: types.FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, wait)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
