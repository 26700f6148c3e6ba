"""The checkpoints of a run: of one process, or written and read by several together."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from regard.distributed.launch import make_group
from regard.errors import CheckpointError
from regard.models.io import atomic
from regard.models.pretrained import Pretrained
from regard.train import checkpoint
from regard.train.optimizer import load_optimizer_state, make_optimizer, optimizer_state
from regard.train.parallel import Workers
from regard.train.resume_point import ResumePoint
from regard.train.sharded_checkpoint import PendingSave, collect_state
from regard.train.task import Task

VISIBLE = 60.0  # seconds after which a network file system shows what another machine has written
Whole = tuple[Pretrained, torch.optim.Optimizer, dict[str, Tensor] | None]


class Store:
    """Where a run keeps its checkpoints; without a folder, nowhere."""

    def __init__(self, folder: Path | None, workers: Workers, task: Task) -> None:
        self.folder, self.workers, self.task = folder, workers, task
        self._pending: tuple[PendingSave, int] | None = None
        # Collectives of the background must not meet those of training.
        self._group = make_group(backend="gloo") if folder is not None and workers.size > 1 else None

    def check_folder(self) -> None:
        """Raise if a process does not see the folder that the first one has claimed: it is on another machine."""
        if self.folder is None or self.workers.size == 1:
            return
        claim, deadline = self.folder / checkpoint.RECIPE, time.monotonic() + VISIBLE
        while not claim.is_file() and time.monotonic() < deadline:
            time.sleep(0.5)
        if self.workers.any(not claim.is_file()):
            raise CheckpointError(
                f"Not all processes see the run in {self.folder}.",
                asked=f"a run in {self.folder} on {self.workers.size} processes",
                found=f"{'a' if claim.is_file() else 'no'} {claim.name} for process {self.workers.rank}",
                because="every process writes its part of a checkpoint there and reads those of others",
                instead="a folder on a file system that all machines share, by the same path",
            )

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
        if not self.workers.splits:
            return checkpoint.restore(place, model, optimizer, average)
        whole = self._make_whole(model, average)
        position = checkpoint.restore(place, *whole)
        take = self.workers.take_part
        with torch.no_grad():
            for name, parameter in whole[0].named_parameters():
                model.get_parameter(name).copy_(take(name, parameter))
            for name, buffer in whole[0].named_buffers():
                model.get_buffer(name).copy_(take(name, buffer))
            for name, tensor in (average or {}).items():
                tensor.copy_(take(name, (whole[2] or {})[name]))
        state = optimizer_state(whole[1], whole[0])
        load_optimizer_state(optimizer, model, {name: take(name, tensor) for name, tensor in state.items()})
        return position

    def _make_whole(self, model: Pretrained, average: dict[str, Tensor] | None) -> Whole:
        """Model, optimizer and moving average as one process has them; the weights are any."""
        with torch.random.fork_rng(devices=[]):
            whole = self.task.build_model().to(next(model.parameters()).dtype)
        whole.companions |= model.companions
        tensors = checkpoint.averaged_tensors(whole)
        copies = None if average is None else {name: tensor.clone() for name, tensor in tensors.items()}
        return whole, make_optimizer(self.task, whole), copies

    def _save_split(
        self,
        model: Pretrained,
        optimizer: torch.optim.Optimizer,
        position: ResumePoint,
        average: dict[str, Tensor] | None,
        keep: int,
    ) -> None:
        """The checkpoint of one process, written by the first, which gets the parts of the others."""
        gather = self.workers.gather_weights
        weights, state = gather(checkpoint.averaged_tensors(model)), gather(optimizer_state(optimizer, model))
        averaged = None if average is None else gather(average)
        if weights is None or state is None or self.folder is None:
            return
        whole, whole_optimizer, _ = self._make_whole(model, average)
        checkpoint.copy_buffers(whole, model, self.workers.splits)
        checkpoint.copy_weights(whole, weights)
        load_optimizer_state(whole_optimizer, whole, state)
        checkpoint.save(self.folder, whole, whole_optimizer, position, averaged, keep)

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
        if self.workers.splits:
            self._save_split(model, optimizer, position, average, keep)
            return
        self.finish()
        place = self.folder / checkpoint.CHECKPOINTS / f"step-{position.step:08d}"
        work = ""
        if self.workers.is_main:
            place.parent.mkdir(exist_ok=True)
            work = atomic.make_temporary_folder(place.parent).name
        work = self.workers.share(work)
        # Statistics of batch norms differ between processes, and any of them may write one: it is that of the first.
        buffers = [tensor for _, tensor in model.named_buffers()]
        buffers += [] if average is None else [average[name] for name, _ in model.named_buffers() if name in average]
        for tensor in buffers:
            dist.broadcast(tensor, src=0)
        state = collect_state(model, optimizer, average)
        self._pending = PendingSave(place, place.parent / work, model, state, position, self._group), keep

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        if self._pending is None or self.folder is None:
            return
        (pending, keep), self._pending = self._pending, None
        pending.finish()
        if self.workers.is_main:
            checkpoint.remove_old(self.folder, keep)
