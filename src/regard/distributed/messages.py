"""Messages between the processes of a group, and a count of their bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


@dataclass
class Traffic:
    """Bytes that this process has sent, by kind of message, and how many messages they were."""

    sent: dict[str, int] = field(default_factory=dict)
    messages: int = 0

    @property
    def bytes(self) -> int:
        return sum(self.sent.values())

    def add(self, kind: str, size: int) -> None:
        self.sent[kind] = self.sent.get(kind, 0) + size
        self.messages += 1


_traffic: ContextVar[Traffic | None] = ContextVar("traffic", default=None)


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what this process sends for attention over several processes inside the context, backward included."""
    traffic = Traffic()
    token = _traffic.set(traffic)
    try:
        yield traffic
    finally:
        _traffic.reset(token)


class Message:
    """A message that is sent and one that is received at the same time; either may be missing."""

    def __init__(
        self, kind: str, group: Group | None, outgoing: tuple[Tensor, int] | None, incoming: tuple[Tensor, int] | None
    ) -> None:
        self.received = None if incoming is None else incoming[0]
        self._outgoing = outgoing  # must live until it has been sent
        operations = []
        if outgoing is not None:
            tensor, peer = outgoing
            operations.append(dist.P2POp(dist.isend, tensor, group=group, group_peer=peer))
            if (traffic := _traffic.get()) is not None:
                traffic.add(kind, tensor.nbytes)
        if incoming is not None:
            operations.append(dist.P2POp(dist.irecv, incoming[0], group=group, group_peer=incoming[1]))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor | None:
        """What was received, once all has arrived and has left."""
        for work in self._works:
            work.wait()
        self._outgoing = None
        return self.received


def gather_all(tensor: Tensor, group: Group | None) -> list[Tensor]:
    """The tensors of all processes, which have equal shapes, in the order of their ranks."""
    size = dist.get_world_size(group)
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size)]
    if (traffic := _traffic.get()) is not None:
        traffic.add("gather", tensor.nbytes * (size - 1))
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
