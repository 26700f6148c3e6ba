"""The checkpoints of a run: of one process, or written and read by several together."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from regard.models.io import atomic
from regard.models.pretrained import Pretrained
from regard.train import checkpoint
from regard.train.parallel import Workers
from regard.train.resume_point import ResumePoint
from regard.train.sharded_checkpoint import PendingSave, collect_state


class Store:
    """Where a run keeps its checkpoints; without a folder, nowhere."""

    def __init__(self, folder: Path | None, workers: Workers) -> None:
        self.folder, self.workers = folder, workers
        self._pending: tuple[PendingSave, int] | None = None
        # Collectives of the background must not meet those of training.
        self._group = dist.new_group(backend="gloo") if folder is not None and workers.size > 1 else None

    def find_newest(self) -> Path | None:
        """The newest checkpoint; all processes get the same one."""
        if self.folder is None:
            return None
        found = checkpoint.find_checkpoints(self.folder) if self.workers.is_main else []
        name = self.workers.share(found[-1].name if found else None)
        return None if name is None else self.folder / checkpoint.CHECKPOINTS / name

    def restore(
        self, place: Path, model: Pretrained, optimizer: torch.optim.Optimizer, average: dict[str, Tensor] | None
    ) -> ResumePoint:
        """Restore the states of model, optimizer and moving average, and return the resume point."""
        return checkpoint.restore(place, model, optimizer, average)

    def save(
        self,
        model: Pretrained,
        optimizer: torch.optim.Optimizer,
        position: ResumePoint,
        average: dict[str, Tensor] | None,
        keep: int,
    ) -> None:
        """Write a checkpoint of the present step, and remove all but the `keep` newest; by several processes, in the
        background."""
        if self.folder is None:
            return
        if self.workers.size == 1:
            checkpoint.save(self.folder, model, optimizer, position, average, keep)
            return
        self.finish()
        place = self.folder / checkpoint.CHECKPOINTS / f"step-{position.step:08d}"
        work = ""
        if self.workers.is_main:
            place.parent.mkdir(exist_ok=True)
            work = atomic.make_temporary_folder(place.parent).name
        work = self.workers.share(work)
        state = collect_state(model, optimizer, average)
        self._pending = PendingSave(place, state, position, self._group, place.parent / work), keep

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        if self._pending is None or self.folder is None:
            return
        (pending, keep), self._pending = self._pending, None
        pending.finish()
        if self.workers.is_main:
            checkpoint.remove_old(self.folder, keep)
