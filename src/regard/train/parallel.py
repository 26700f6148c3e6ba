"""A run on several processes: data parallel, sharded, or with sequences cut over them.

Every process makes the same batches, from the seed and the step, and trains on its share of them. The loss is divided
by the targets of all, so that the sum of the gradients over the processes is that of one process, up to the rounding of
the sum. Source of the strategies: torch's DistributedDataParallel and `fully_shard` (FSDP2); nothing replaces them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from regard.distributed import SequenceLayout, context_parallel
from regard.distributed.launch import join_processes, make_group
from regard.errors import ConfigError
from regard.models.parallelize import checkpoint_activations, shard_model
from regard.models.tensor_parallel import Split, split_model
from regard.train.task import Task

STRATEGIES = ("ddp", "fsdp")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Parallelism:
    """How a run is spread over the processes that torchrun starts.

    Attributes:
        strategy: "ddp", every process has the whole model; "fsdp", parameters, gradients and optimizer state are
            sharded. On one process they are the same.
        context: how many processes share a sequence; each of them holds a part of its tokens.
        tensor: how many processes share the heads and hidden channels of every block; with "ddp" and context=1.
        recompute: whether the activations of a block are computed again in the backward pass.
    """

    strategy: str = "ddp"
    context: int = 1
    tensor: int = 1
    recompute: bool = False

    def __post_init__(self) -> None:
        reason, instead = "", ""
        if self.strategy not in STRATEGIES:
            reason, instead = f"the strategy is one of {', '.join(STRATEGIES)}", 'strategy="fsdp"'
        elif self.context < 1 or self.tensor < 1:
            reason, instead = "a sequence or a block has one process at least", "context=1, tensor=1"
        elif self.tensor > 1 and self.strategy != "ddp":
            reason = "blocks are split between whole copies of the model, and fsdp shards what is not split"
            instead = f'strategy="ddp" with tensor={self.tensor}, or strategy="fsdp" with tensor=1'
        elif self.tensor > 1 and self.context > 1:
            reason = "a process shares blocks or sequences with the others, not both"
            instead = f"context={self.context} with tensor=1, or tensor={self.tensor} with context=1"
        if reason:
            raise ConfigError("A run cannot be spread so.", asked=repr(self), because=reason, instead=instead)


class _DataParallel(nn.parallel.DistributedDataParallel):
    """DDP with the methods of the model: the heads of some are called after the forward pass."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Workers:
    """The processes of a run, as one of them sees them.

    Attributes:
        rank, size: this process, and how many there are.
        data_rank, data_size: which share of a batch is this one's.
    """

    def __init__(self, parallelism: Parallelism) -> None:
        self.parallelism = parallelism
        self.rank, self.size = join_processes()
        self.check_same(dataclasses.asdict(parallelism))
        width = parallelism.context * parallelism.tensor
        if self.size % width:
            divisors = [each for each in range(1, self.size + 1) if self.size % each == 0]
            what = "tensor" if parallelism.tensor > 1 else "context"
            raise ConfigError(
                f"{width} processes are to share each {'block' if what == 'tensor' else 'sequence'}, and there "
                + ("is 1." if self.size == 1 else f"are {self.size}."),
                asked=f"{what}={width} (--{what}-parallel {width})",
                found=f"a world size of {self.size}",
                because=f"the processes are divided into groups of {width}",
                instead=f"torchrun --nproc-per-node {width} ..., or {what}={' or '.join(map(str, divisors))}",
            )
        self.data_size = self.size // width
        self.data_rank, inside = divmod(self.rank, width)
        self.context_rank = inside if parallelism.context > 1 else 0
        near = self._make_group([range(first, first + width) for first in range(0, self.size, width)], width)
        self.context_group = near if parallelism.context > 1 else None
        self.tensor_group = near if parallelism.tensor > 1 else None
        # Those that have the same part of the model, whose gradients are averaged.
        tensor = parallelism.tensor
        self.copies = self._make_group([range(first, self.size, tensor) for first in range(tensor)], tensor)
        self.splits: dict[str, Split] = {}

    def _make_group(self, members: list[range], width: int) -> Any:
        """The group that this process is in; all processes make all groups. None for groups of one, or of all."""
        if width == 1:
            return None
        groups = [make_group(each) for each in members]
        return next(group for group, each in zip(groups, members, strict=True) if self.rank in each)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Whether no process has the whole model."""
        return self.size > 1 and (self.parallelism.strategy == "fsdp" or self.parallelism.tensor > 1)

    @property
    def averaged(self) -> int:
        """Over how many processes gradients are averaged."""
        return self.size // self.parallelism.tensor

    # The model

    def spread(self, model: nn.Module, precision: str) -> nn.Module:
        """What is called in a step: the model itself, in place sharded, or DDP around it."""
        if self.parallelism.recompute:
            checkpoint_activations(model)
        if self.size == 1:
            return model
        if self.tensor_group is not None:
            self.splits = split_model(model, self.tensor_group)
            if self.averaged == 1:
                return model
        elif self.is_sharded:
            mesh = init_device_mesh("cpu", (self.size,))
            shard_model(model, mesh, torch.bfloat16 if precision == "bfloat16" else None)
            return model
        return _DataParallel(model, process_group=self.copies, gradient_as_bucket_view=True)

    @contextlib.contextmanager
    def micro_batch(self, forward: nn.Module, is_last: bool) -> Iterator[None]:
        """Gradients are summed over the processes in the last micro-batch of a step only."""
        if self.averaged == 1:
            yield
        elif self.parallelism.strategy == "fsdp":
            forward.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            yield
        elif is_last:
            yield
        else:
            with forward.no_sync():  # type: ignore[operator]
                yield

    def gather_weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Whole tensors on the first process; None on the others. All of them call it."""
        found = {}
        for name, value in weights.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else self._join(name, value)  # type: ignore[operator]
            if self.is_main:
                found[name] = whole
        return found if self.is_main else None

    def _join(self, name: str, part: Tensor) -> Tensor:
        """The whole of a tensor that belongs to a parameter, `name` or `name/state`, where that is split."""
        split = self.splits.get(name.rpartition("/")[0] or name)
        if split is None or not part.ndim:
            return part
        parts = [torch.empty_like(part) for _ in range(self.parallelism.tensor)]
        dist.all_gather(parts, part.contiguous(), group=self.tensor_group)
        return split.join(parts)

    def take_part(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of a tensor that belongs to a parameter."""
        split = self.splits.get(name.rpartition("/")[0] or name)
        if split is None or not whole.ndim:
            return whole
        return split.take(whole, dist.get_rank(self.tensor_group), self.parallelism.tensor)

    # The data

    def check_same(self, settings: dict[str, Any]) -> None:
        """Raise on all processes if one of them has other settings than the first: they would wait for each other."""
        mine = json.loads(json.dumps(settings))
        first = self.share(mine)
        names = sorted(name for name in mine.keys() | first.keys() if mine.get(name) != first.get(name))
        if not self.any(bool(names)):
            return
        raise ConfigError(
            "The processes of this run were not started alike.",
            asked=", ".join(f"{name}={mine.get(name)!r}" for name in names) or "one run on all processes",
            found=", ".join(f"{name}={first.get(name)!r} on the first process" for name in names)
            or "other settings on another process, which names them",
            because="all of them compute parts of the same step",
            instead="the same command, data and version on every machine",
        )

    def check_task(self, task: Task) -> None:
        """Raise if a task cannot be spread so, or is not that of the other processes."""
        self.check_same({**task.recipe.to_json(), "data": task.digest})
        reason = task.check_split() if self.data_size > 1 else None
        if reason is None and self.parallelism.context > 1 and type(task).take_tokens is Task.take_tokens:
            reason = "its sequences cannot be cut over processes; those of a language model can"
        if reason is not None:
            raise ConfigError(
                f"{task.recipe.kind} cannot be trained so on {self.size} processes.",
                asked=repr(self.parallelism),
                because=reason,
                instead="one process, or context=1",
            )

    def check_batch(self, count: int, describe: Callable[[], str]) -> None:
        """Raise if so many micro-batches of the first step are too few for the processes."""
        if count < self.data_size:
            raise ConfigError(
                f"A batch cannot be shared by {self.data_size} processes.",
                asked=f"a batch for {self.data_size} processes, of {self.size}",
                found=f"{describe()}: enough for {count}",
                because="every process needs at least one row of a batch",
                instead="a larger batch, or fewer processes",
            )

    def take_share(self, batches: Sequence[Value]) -> list[tuple[Value, bool]]:
        """This process's micro-batches of a step, and whether they count.

        All processes have equally many, since they meet in each. Where the last batch of an epoch has too few rows,
        some compute the last micro-batch once more, which does not count.
        """
        whole = -(-len(batches) // self.data_size) * self.data_size
        filled = [*batches, *[batches[-1]] * (whole - len(batches))]
        shared = ((each, number < len(batches)) for number, each in enumerate(filled))
        return list(itertools.islice(shared, self.data_rank, None, self.data_size))

    @contextlib.contextmanager
    def cut_sequences(self, tokens: int | None) -> Iterator[SequenceLayout | None]:
        """Inside, attention sees the tokens of all processes that share a sequence."""
        if self.context_group is None or tokens is None:
            yield None
            return
        layout = SequenceLayout(tokens, self.parallelism.context, "zigzag")
        with context_parallel(layout, self.context_group):
            yield layout

    # Numbers

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Each number summed over the processes, those that share a block once."""
        if self.size == 1:
            return values
        total = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(total)
        total /= self.parallelism.tensor  # processes that share a block have the same numbers
        return dict(zip(values, total.tolist(), strict=True))

    def any(self, flag: bool) -> bool:
        """Whether it is so on any process: all of them then act alike."""
        return bool(self.sum({"flag": float(flag)})["flag"]) if self.size > 1 else flag

    def share(self, value: Value) -> Value:
        """What the first process has, of things that JSON can express."""
        if self.size == 1:
            return value
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor(len(text))
        dist.broadcast(length, src=0)
        text = text if self.is_main else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, src=0)
        return json.loads(bytes(text.tolist()).decode())

    def wait(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()

    def find_norm(self, gradients: dict[str, Tensor]) -> float:
        """The norm of all gradients, by the names of the parameters; some are spread over the processes."""
        if self.tensor_group is None:
            norm = nn.utils.get_total_norm(list(gradients.values()))
            return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # type: ignore[operator]
        split = [grad for name, grad in gradients.items() if name in self.splits]
        shared = nn.utils.get_total_norm(split).double().square()
        dist.all_reduce(shared, group=self.tensor_group)
        others = nn.utils.get_total_norm([grad for name, grad in gradients.items() if name not in self.splits])
        return float((shared + others.double().square()).sqrt())
