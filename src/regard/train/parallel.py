"""A run on several processes: data parallel, sharded, or with sequences cut over them.

Every process makes the same batches, from the seed and the step, and trains on its share of them. The loss is divided
by the targets of all, so that the sum of the gradients over the processes is that of one process, up to the rounding of
the sum. Source of the strategies: torch's DistributedDataParallel and `fully_shard` (FSDP2); nothing replaces them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from regard.distributed import SequenceLayout, context_parallel
from regard.distributed.launch import join_processes
from regard.errors import ConfigError
from regard.models.parallelize import checkpoint_activations, shard_model
from regard.train.task import Task

STRATEGIES = ("ddp", "fsdp")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Parallelism:
    """How a run is spread over the processes that torchrun starts; on one process it changes nothing.

    Attributes:
        strategy: "ddp", every process has the whole model; "fsdp", parameters, gradients and optimizer state are
            sharded.
        context: how many processes share a sequence; each of them holds a part of its tokens.
        recompute: whether the activations of a block are computed again in the backward pass.
    """

    strategy: str = "ddp"
    context: int = 1
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES or self.context < 1:
            raise ConfigError(
                "A run cannot be spread so.",
                asked=repr(self),
                because=f"the strategy is one of {', '.join(STRATEGIES)}, and a sequence has one process at least",
                instead='Parallelism("fsdp")',
            )


class Workers:
    """The processes of a run, as one of them sees them.

    Attributes:
        rank, size: this process, and how many there are.
        data_rank, data_size: which share of a batch is this one's.
    """

    def __init__(self, parallelism: Parallelism) -> None:
        self.parallelism = parallelism
        self.rank, self.size = join_processes()
        if self.size % parallelism.context:
            raise ConfigError(
                f"{self.size} processes cannot share sequences {parallelism.context} by {parallelism.context}.",
                asked=f"context={parallelism.context} on {self.size} processes",
                because="groups of equal size share the sequences",
                instead=f"a divisor of {self.size}",
            )
        self.data_size = self.size // parallelism.context
        self.data_rank, self.context_rank = divmod(self.rank, parallelism.context)
        self.context_group = self._make_groups() if parallelism.context > 1 else None

    def _make_groups(self) -> Any:
        """The processes that share this one's sequences; all processes make all groups."""
        width, mine = self.parallelism.context, None
        for first in range(0, self.size, width):
            group = dist.new_group(list(range(first, first + width)))
            mine = group if first == self.data_rank * width else mine
        return mine

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        return self.size > 1 and self.parallelism.strategy == "fsdp"

    # The model

    def spread(self, model: nn.Module, precision: str) -> nn.Module:
        """What is called in a step: the model itself, in place sharded, or DDP around it."""
        if self.parallelism.recompute:
            checkpoint_activations(model)
        if self.size == 1:
            return model
        if self.is_sharded:
            mesh = init_device_mesh("cpu", (self.size,))
            shard_model(model, mesh, torch.bfloat16 if precision == "bfloat16" else None)
            return model
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    @contextlib.contextmanager
    def micro_batch(self, forward: nn.Module, is_last: bool) -> Iterator[None]:
        """Gradients are summed over the processes in the last micro-batch of a step only."""
        if self.size == 1:
            yield
        elif self.is_sharded:
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
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[operator]
            if self.is_main:
                found[name] = whole
        return found if self.is_main else None

    # The data

    def check_task(self, task: Task) -> None:
        """Raise if a task cannot be spread so."""
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

    def take_share(self, batches: Sequence[Value], describe: Callable[[], str]) -> list[Value]:
        """This process's micro-batches of a step."""
        if len(batches) % self.data_size:
            raise ConfigError(
                f"A batch cannot be shared by {self.data_size} processes.",
                asked=f"{len(batches)} micro-batches for {self.data_size} processes",
                found=describe(),
                because="every process needs at least one row of every micro-batch",
                instead="a larger batch_size, or fewer processes",
            )
        return list(batches[self.data_rank :: self.data_size])

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
        """Each number summed over the processes."""
        if self.size == 1:
            return values
        total = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(total)
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

    def find_norm(self, gradients: list[Tensor]) -> float:
        """The norm of all gradients; those of sharded parameters are spread over the processes."""
        norm = nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # type: ignore[operator]
