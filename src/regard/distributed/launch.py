"""The processes that torchrun started: their group, with a time limit, and errors instead of waiting forever."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from regard.errors import ConfigError

MINUTES = 10.0  # that a process waits for another before it gives up
VARIABLE = "REGARD_TIMEOUT_MINUTES"
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Whether torchrun, or something like it, started this process as one of several."""
    return dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1


def join_processes(minutes: float | None = None) -> tuple[int, int]:
    """Join the other processes; this one's rank, and how many there are. (0, 1) if there are no others.

    minutes: how long one waits for another: 10, or the environment variable REGARD_TIMEOUT_MINUTES. A process that
        died or never started then ends the others with an error.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if not is_launched():
        return 0, 1
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise ConfigError(
            "This process does not know the others.",
            asked=f"WORLD_SIZE={os.environ.get('WORLD_SIZE')}",
            found=f"no {' and no '.join(missing)} in the environment",
            because="torchrun sets them for every process that it starts",
            instead="torchrun --nproc-per-node 2 -m regard train gpt ...",
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = datetime.timedelta(minutes=minutes or float(os.environ.get(VARIABLE, MINUTES)))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=limit, **_find_store(rank, size, limit))
        # What is created on demand waits for everyone; done here, a process that is missing is missed at once.
        dist.barrier()
    except (RuntimeError, ValueError) as failure:
        raise ConfigError(
            f"Process {rank} of {size} found no others.",
            asked=f"{size} processes, the first at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            found=f"{type(failure).__name__}: {str(failure).splitlines()[0]}",
            because=f"all of them have to start within {limit.total_seconds() / 60:g} minutes and reach the first",
            instead=f"the same torchrun command on every machine; {VARIABLE} for a longer wait",
        ) from failure
    atexit.register(_leave)
    return rank, size


def _find_store(rank: int, size: int, limit: datetime.timedelta) -> dict[str, Any]:
    """Where processes that torchrun has started again meet: not where the dead ones have left their addresses.

    With a c10d rendezvous, torchrun keeps one store for all attempts, and a process that is quick reads the address of
    one that was killed. By default, the environment names the store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, size, is_master=False, timeout=limit)  # pyright: ignore[reportPrivateImportUsage]
    prefix = f"regard/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    own = dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]
    return {"store": own, "rank": rank, "world_size": size}


@contextlib.contextmanager
def wait_for_first() -> Iterator[None]:
    """What is inside runs on the first process, then on the others: they find what it downloaded and computed."""
    rank, size = join_processes()
    if size > 1 and rank > 0:
        dist.barrier()
    yield
    if size > 1 and rank == 0:
        dist.barrier()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
