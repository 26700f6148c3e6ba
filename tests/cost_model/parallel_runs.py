"""Training steps on real processes: what their collectives are given, what their sockets send, what they allocate."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.distributed import SequenceLayout, context_parallel, count_traffic, ring_attend
from regard.models import GPT, GPTConfig
from regard.models.parallelize import checkpoint_activations, shard_model
from regard.models.tensor_parallel import split_model
from tests.cost_model.allocator import allocated, storage_bytes

KINDS = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}
BYTES_ACKED = 120  # of the struct tcp_info of Linux


class CountCollectives(TorchDispatchMode):
    """Bytes of the tensors that are reduced or gathered, by kind, and how many collectives there were.

    The largest argument is the whole tensor: the output of an all-gather, the input of a reduce-scatter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.payload: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        # Messages of ring attention are counted by itself.
        if func.namespace == "c10d" and name not in ("send", "recv_", "barrier"):
            kind = KINDS.get(name, name)
            tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            self.payload[kind] = self.payload.get(kind, 0) + max(each.nbytes for each in tensors)
            self.calls[kind] = self.calls.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


def count_socket_bytes() -> int:
    """Bytes that this process has sent over TCP and that have arrived, headers of gloo included."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                    info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, BYTES_ACKED)[0]
    return total


def make_model(**config: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**config))


class Run:
    """A model that is spread over the processes, and a training step of it."""

    def __init__(self, rank: int, size: int, config: dict, strategy: dict, batch: int, tokens: int) -> None:
        self.model = model = make_model(**config)
        kind, context = strategy["strategy"], strategy.get("context") or 1
        context = size if kind == "context" else context
        if strategy.get("recompute"):
            checkpoint_activations(model)
        self.forward: nn.Module = model
        if kind == "tensor":
            split_model(model, dist.group.WORLD)
        elif kind == "fsdp":
            shard_model(model, dist.init_device_mesh("cpu", (size,)), strategy.get("param_dtype"))
        else:
            self.forward = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        self.layout, self.group, words = None, None, {}
        whole = torch.zeros(batch, tokens, dtype=torch.long)
        if context > 1:
            groups = [dist.new_group(list(range(at, at + context))) for at in range(0, size, context)]
            self.group = groups[rank // context]
            self.layout = SequenceLayout(tokens, context, strategy.get("layout", "zigzag"))
            words = {"positions": self.layout.positions(rank % context)}
            whole = self.layout.take(whole, rank % context, dim=1)
        self.inputs, self.words = whole, words

    def run_passes(self) -> None:
        cut = contextlib.nullcontext() if self.layout is None else context_parallel(self.layout, self.group)
        with cut:
            self.forward(self.inputs, **self.words).mean().backward()

    def step(self) -> None:
        self.run_passes()
        self.optimizer.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()


def count_step(rank: int, size: int, config: dict, strategy: dict, batch: int, tokens: int) -> dict[str, Any]:
    """What a process sends in a step: payloads of collectives, ring messages, and bytes on its sockets."""
    run = Run(rank, size, config, strategy, batch, tokens)
    for _ in range(2):  # in its second step DDP puts the gradients into buckets in the order in which they came
        run.step()
        run.clear()
    dist.barrier()
    before = count_socket_bytes()
    with CountCollectives() as collectives, count_traffic() as traffic:
        run.run_passes()
    dist.barrier()
    sockets = count_socket_bytes() - before
    parameters = sum(getattr(each, "_local_tensor", each).nbytes for each in run.model.parameters())
    return {
        "parameters": parameters,
        "payload": collectives.payload,
        "calls": collectives.calls,
        "ring": traffic.sent,
        "sockets": sockets,
    }


def measure_peak(rank: int, size: int, config: dict, strategy: dict, batch: int, tokens: int) -> int:
    """The most bytes that a process has from torch's allocator in its third step."""
    run = Run(rank, size, config, strategy, batch, tokens)
    for _ in range(2):
        run.step()
        run.clear()
    parameters = [getattr(each, "_local_tensor", each) for each in run.model.parameters()]
    state = [
        getattr(each, "_local_tensor", each)
        for several in run.optimizer.state.values()
        for each in several.values()
        if isinstance(each, Tensor)
    ]
    buckets = 0 if run.forward is run.model else sum(each.nbytes for each in parameters)  # DDP keeps them between steps
    held = storage_bytes([*parameters, *state, run.inputs]) + buckets
    return held + allocated(run.step).peak


def count_ring(rank: int, size: int, tokens: int, layout: str, sizes: dict, options: dict) -> dict[str, int]:
    """What `ring_attend` sends, forward and backward."""
    cut = SequenceLayout(tokens, size, layout)
    heads, kv_heads, dim, value_dim = (sizes[name] for name in ("heads", "kv_heads", "dim", "value_dim"))
    own, dtype = cut.count(rank), sizes.get("dtype", torch.float32)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    tensors = [torch.ones(sizes["batch"], h, own, d, dtype=dtype, requires_grad=True) for h, d in shapes]
    with count_traffic() as traffic:
        output = ring_attend(*tensors, layout=cut, **options)
        output.backward(torch.ones_like(output))
    return traffic.sent
