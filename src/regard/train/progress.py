"""A progress bar, and an interrupt that waits for the end of a step."""

from __future__ import annotations

import signal
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from regard.render.terminal import progress_on_stderr

ReportStep = Callable[[int, float | None, float | None], None]


@contextmanager
def progress_bar(recipe_epochs: int, steps: int, done: int, batch: int, shown: bool) -> Iterator[ReportStep]:
    """A callback for every step: the total number of steps, and the latest loss and accuracy if they changed.

    It draws a progress bar if stderr is a terminal, and clears it at the end.
    """
    if not shown:
        yield lambda done, loss, accuracy: None
        return
    epoch = "epoch {task.fields[epoch]}/{task.fields[epochs]}"
    metrics = "loss {task.fields[loss]}  accuracy {task.fields[accuracy]}  {task.fields[pace]}"
    with progress_on_stderr(epoch, metrics, remaining=True) as progress:
        if progress is None:
            yield lambda done, loss, accuracy: None
            return
        first: dict[str, Any] = {"loss": "-", "accuracy": "-", "pace": ""}
        total = recipe_epochs * steps
        task = progress.add_task("train", total=total, completed=done, epoch=1, epochs=recipe_epochs, **first)

        def report_step(done: int, loss: float | None, accuracy: float | None) -> None:
            fields: dict[str, Any] = {"epoch": min(done // steps + 1, recipe_epochs)}
            if loss is not None:
                fields["loss"] = f"{loss:.4f}"
            if accuracy is not None:
                fields["accuracy"] = f"{accuracy:.2%}"
            speed = progress.tasks[0].speed
            if speed:
                fields["pace"] = f"{speed * batch:,.0f} images/s"
            progress.update(task, completed=done, **fields)

        yield report_step


@contextmanager
def defer_interrupt() -> Iterator[Callable[[], bool]]:
    """Context in which the first Ctrl-C only sets a flag, returned by the yielded function; a second one interrupts.

    No step is left incomplete. Outside the main thread signals are handled as usual.
    """
    interrupted = False

    def set_flag(number: int, frame: types.FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, set_flag)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, before)
