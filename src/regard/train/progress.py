"""A progress bar, and an interrupt that waits for the end of a step."""

from __future__ import annotations

import signal
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from regard.render.terminal import progress_on_stderr


@dataclass
class StepReport:
    """What the progress bar shows after a step.

    Attributes:
        step: optimizer steps so far.
        loss: of this step.
        metrics: of the last evaluation.
        units_per_second: tokens or images a second, over the last steps.
        peak_share: the share of the machine's peak that is used; None where it is not known.
    """

    step: int
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    units_per_second: float | None = None
    peak_share: float | None = None


ReportStep = Callable[[StepReport], None]


@contextmanager
def progress_bar(total: int, done: int, unit: str, shown: bool) -> Iterator[ReportStep | None]:
    """A callback that draws a report, or None if nothing is drawn: stderr is not a terminal, or it was switched off."""
    if not shown:
        yield None
        return
    with progress_on_stderr("step {task.completed}/{task.total}", "{task.fields[text]}", remaining=True) as progress:
        if progress is None:
            yield None
            return
        task = progress.add_task("train", total=total, completed=done, text="")
        yield lambda report: progress.update(task, completed=report.step, text=describe_report(report, unit))


def describe_report(report: StepReport, unit: str) -> str:
    """Loss, metrics, throughput and the share of the peak, in one line.

    >>> describe_report(StepReport(3, 1.5, {"accuracy": 0.25}, 12345.6, 0.42), "tokens")
    'loss 1.5000  accuracy 25.00%  12,346 tokens/s  42% of peak'
    """
    parts = [] if report.loss is None else [f"loss {report.loss:.4f}"]
    parts += [format_metric(name, value) for name, value in report.metrics.items()]
    if report.units_per_second is not None:
        parts.append(f"{report.units_per_second:,.0f} {unit}/s")
    if report.peak_share is not None:
        parts.append(f"{report.peak_share:.0%} of peak")
    return "  ".join(parts)


def format_metric(name: str, value: float) -> str:
    """A metric for people: accuracies in percent. The validation loss is told from that of a step.

    >>> format_metric("loss", 2.5), format_metric("mlm_accuracy", 0.5)
    ('validation loss 2.5000', 'mlm accuracy 50.00%')
    """
    text = f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4f}"
    return f"{'validation loss' if name == 'loss' else name.replace('_', ' ')} {text}"


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
    before: Any = signal.signal(signal.SIGINT, set_flag)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, before)
