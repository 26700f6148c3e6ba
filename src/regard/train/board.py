"""What TensorBoard shows of a run: loss, accuracy, rate, and the width of every head."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

from regard.train.run import Epoch

BOARD = "tensorboard"


class Board:
    """Writes scalars for TensorBoard to a run's folder; without a folder, or without tensorboardX, it does nothing.

    first: epochs after this one are written anew; what an interrupted run wrote of them is hidden.
    """

    def __init__(self, folder: Path | None, first: int) -> None:
        self.folder, self.first = folder, first
        self.writer: Any = None

    def __enter__(self) -> Board:
        if self.folder is None:
            return self
        if importlib.util.find_spec("tensorboardX") is None:
            print("train: no logs for TensorBoard (pip install 'regard[train]' brings tensorboardX)", file=sys.stderr)
            return self
        from tensorboardX import SummaryWriter  # an extra, and slow to import

        self.writer = SummaryWriter(str(self.folder / BOARD), purge_step=self.first + 1 if self.first else None)
        return self

    def __exit__(self, *_: object) -> None:
        if self.writer is not None:
            self.writer.close()

    def note(self, epoch: Epoch) -> None:
        """Write an epoch down."""
        if self.writer is None:
            return
        scalars = {"loss": epoch.loss, "accuracy": epoch.accuracy, "rate": epoch.rate, "seconds": epoch.seconds}
        for layer, gaze in epoch.gazes.items():
            scalars |= {f"width/{layer}/{head}": width for head, width in enumerate(gaze.width.tolist())}
            scalars[f"coverage/{layer}"] = gaze.coverage()
            scalars[f"degenerate/{layer}"] = int(gaze.degenerate().sum())
        for name, value in scalars.items():
            if not math.isnan(value):
                self.writer.add_scalar(name, value, epoch.number)
        self.writer.flush()
