"""TensorBoard logging of a run: loss, metrics, learning rate, and the width of every head."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
import time
from pathlib import Path
from typing import Any

from regard.train.run import Evaluation

FOLDER = "tensorboard"


class TensorBoardLog:
    """Writes scalars for TensorBoard to a run's folder; without a folder, or without tensorboardX, it does nothing.

    first: steps after this one are written again; events that an interrupted run wrote for them are purged.
    """

    def __init__(self, folder: Path | None, first: int) -> None:
        self.folder, self.first = folder, first
        self.writer: Any = None

    def __enter__(self) -> TensorBoardLog:
        if self.folder is None:
            return self
        if importlib.util.find_spec("tensorboardX") is None:
            print("train: no TensorBoard log (pip install 'regard[train]' installs tensorboardX)", file=sys.stderr)
            return self
        from tensorboardX.event_file_writer import EventsWriter  # optional, and slow to import

        messages: Any = importlib.import_module("tensorboardX.proto.event_pb2")

        # Not SummaryWriter: its writer thread dies on a full disk, and `add_scalar` then blocks.
        (self.folder / FOLDER).mkdir(exist_ok=True)
        self.writer = EventsWriter(str(self.folder / FOLDER / "events"))
        if self.first:
            self._write_event(messages.Event(file_version="brain.Event:2"), self.first + 1)
            start = messages.SessionLog(status=messages.SessionLog.START)
            self._write_event(messages.Event(session_log=start), self.first + 1)
        return self

    def __exit__(self, *_: object) -> None:
        if self.writer is not None:
            with contextlib.suppress(OSError):  # every evaluation is flushed; nothing is lost here
                self.writer.close()

    def _write_event(self, event: Any, step: int) -> None:
        event.wall_time, event.step = time.time(), step
        self.writer.write_event(event)

    def write_steps(self, lines: list[dict[str, Any]]) -> None:
        """Write the lines of `steps.jsonl`, as `train/...`."""
        for line in lines:
            self._write_scalars(
                {f"train/{name}": value for name, value in line.items() if name != "step"}, line["step"]
            )

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Write the scalars of an evaluation, and flush."""
        scalars = {"loss": evaluation.loss, "learning_rate": evaluation.learning_rate, "seconds": evaluation.seconds}
        scalars |= {f"validation/{name}": value for name, value in evaluation.metrics.items()}
        for layer, profile in evaluation.head_profiles.items():
            scalars |= {f"width/{layer}/{head}": width for head, width in enumerate(profile.width.tolist())}
            scalars[f"coverage/{layer}"] = profile.coverage()
            scalars[f"degenerate/{layer}"] = int(profile.degenerate().sum())
        self._write_scalars(scalars, evaluation.step)
        if self.writer is not None:
            self.writer.flush()

    def _write_scalars(self, scalars: dict[str, float], step: int) -> None:
        if self.writer is None:
            return
        messages: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        from tensorboardX.summary import scalar

        for name, value in scalars.items():
            if not math.isnan(value):
                self._write_event(messages.Event(summary=scalar(name, value)), step)
