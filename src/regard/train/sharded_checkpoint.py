"""Checkpoints of runs on several processes, by torch's distributed checkpoint (DCP), in safetensors.

checkpoints/step-00000240/   each process's part of all tensors, with its place in them (shard-*.safetensors), and
                             training.json: the resume point; config.json and the tokenizer, for `from_pretrained`

They are written while training goes on, become visible when all parts are complete, and are read on any number of
processes: each one reads what it holds.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.errors import CheckpointError
from regard.models.io import atomic
from regard.models.io.distributed import MODEL
from regard.models.io.folder import CONFIG
from regard.models.load_state import find_stored_names
from regard.models.pretrained import Pretrained
from regard.train.optimizer import optimizer_state
from regard.train.resume_point import ResumePoint, parse_position

POSITION = "training.json"
WEIGHTS, OPTIMIZER = "weights/", "optimizer/"


def is_sharded(place: Path) -> bool:
    """Whether a checkpoint was written by several processes."""
    return (place / POSITION).is_file()


def collect_state(
    model: Pretrained, optimizer: torch.optim.Optimizer | None, average: dict[str, Tensor] | None
) -> dict[str, Tensor]:
    """What a checkpoint holds, by name; sharded tensors stay sharded."""
    stored = find_stored_names(model)
    weights: dict[str, Tensor] = {
        name: tensor.detach() for name, tensor in model.state_dict().items() if name in stored
    }
    shown = weights if average is None else {name: average.get(name, tensor) for name, tensor in weights.items()}
    state = {f"{MODEL}{name}": tensor for name, tensor in shown.items()}
    if average is not None:
        state |= {f"{WEIGHTS}{name}": tensor for name, tensor in weights.items()}
    if optimizer is not None:
        state |= {f"{OPTIMIZER}{name}": tensor for name, tensor in optimizer_state(optimizer, model).items()}
    return state


class PendingSave:
    """A checkpoint that is being written in the background.

    place: where it will be; work: where it is until then. All processes make it and all of them finish it.
    """

    def __init__(
        self,
        place: Path,
        work: Path,
        model: Pretrained,
        state: dict[str, Tensor],
        position: ResumePoint,
        group: Any,
    ) -> None:
        self.place, self.group, self.work = place, group, work
        # Long imports that one process never needs.
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        if dist.get_rank() == 0:
            atomic.write_and_sync(work / POSITION, atomic.make_json_writer(dataclasses.asdict(position)))
            atomic.write_and_sync(work / CONFIG, atomic.make_json_writer(model.describe_config()))
            for name, content in model.companions.items():
                (work / name).write_bytes(content)
        writer = HuggingFaceStorageWriter(str(work), save_distributed=True)
        saving: Any = async_save(state, storage_writer=writer, process_group=group)
        self.future: Future = saving

    def finish(self) -> None:
        """Wait until all parts are on the disk, and give the checkpoint its name."""
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            self.future.result()
        except CheckpointException as failure:  # of any process; torch tells all of them
            if dist.get_rank() == 0:
                shutil.rmtree(self.work, ignore_errors=True)
            rank, reason = find_first_failure(failure)
            raise CheckpointError(
                f"The checkpoint {self.place.name} cannot be written.",
                asked=str(self.place),
                found=f"on process {rank}, {type(reason).__name__}: {reason}",
                because="every process writes its part",
                instead="free space and permission to write there: the same call resumes from the last checkpoint",
            ) from reason
        dist.barrier(group=self.group)
        if dist.get_rank() == 0:
            with atomic.temporary_folder(self.place.parent) as old:
                atomic.replace_folder(self.work, self.place, old)
        dist.barrier(group=self.group)


def find_first_failure(failure: Any) -> tuple[int, BaseException]:
    """The first process that has failed, and its error, of a CheckpointException of torch."""
    rank, (reason, _) = min(failure.failures.items(), key=lambda each: each[0])
    return rank, reason


def read_position(place: Path) -> ResumePoint:
    """The resume point of a checkpoint."""
    path = place / POSITION
    try:
        return parse_position(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as failure:
        raise CheckpointError(
            f"{path.name} is not of a checkpoint.",
            asked=str(path),
            found=f"{type(failure).__name__}: {failure}",
            because="it has no valid resume point",
            instead=f"remove {place} to resume from an earlier checkpoint or to start again",
        ) from failure


def load_state(place: Path, state: dict[str, Tensor]) -> None:
    """Fill these tensors from a checkpoint; each process reads its own parts, alone or with the others."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(place))
    try:
        found = reader.read_metadata().state_dict_metadata
        shapes = {name: tuple(getattr(each, "size", ())) for name, each in found.items()}
        differing = sorted(name for name, tensor in state.items() if shapes.get(name) != tuple(tensor.shape))
        differing += sorted(name for name in shapes.keys() - state.keys() if name.startswith(MODEL))
        if differing:
            raise CheckpointError(
                f"{place.name} does not fit the recipe.",
                asked=str(place),
                found=f"other tensors: {', '.join(differing[:5])}{', ...' if len(differing) > 5 else ''}",
                because="it was written by a run with another model or optimizer, or a part is missing",
                instead=f"the unmodified folder of the run, or remove {place} to resume from an earlier one or to "
                "start again",
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*single process")  # that is meant
            load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointError:
        raise
    # Readers of damaged files raise anything; what one of several processes raised, torch raises in all of them as a
    # CheckpointException, which is no Exception.
    except (Exception, CheckpointException) as failure:
        if isinstance(failure, CheckpointException):
            failure = find_first_failure(failure)[1]
        raise CheckpointError(
            f"{place.name} cannot be read.",
            asked=str(place),
            found=f"{type(failure).__name__}: {str(failure).splitlines()[0][:200] if str(failure) else ''}",
            because="a part is missing or damaged",
            instead=f"remove {place} to resume from an earlier checkpoint or to start again, or use another folder",
        ) from failure
