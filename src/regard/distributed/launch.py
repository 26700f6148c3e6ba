"""The processes that torchrun started: their group, with a time limit, and errors instead of waiting forever."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import math
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from regard.errors import ConfigError, ProcessError, RegardError

MINUTES = 10.0  # that a process waits for another before it gives up
VARIABLE = "REGARD_TIMEOUT_MINUTES"
# What errors of messages say; those of gloo are plain RuntimeErrors.
LOST = re.compile("/gloo/|nccl|pair closure|connection (closed|reset|refused)|broken pipe", re.IGNORECASE)
NOISE = re.compile(r"^\[[^\]]*\] | This is typically caused.*")  # where in gloo, and advice
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Whether torchrun, or something like it, started this process as one of several."""
    return dist.is_initialized() or _read_variable("WORLD_SIZE", int, "a number of processes", "1") > 1


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
    size = _read_variable("WORLD_SIZE", int, "a number of processes")
    rank = _read_variable("RANK", int, f"the number of one of {size} processes, from 0", below=size)
    limit = datetime.timedelta(minutes=minutes or _read_variable(VARIABLE, float, "minutes", str(MINUTES)))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"  # each for the tensors of its device
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


def _read_variable(name: str, kind: type, meaning: str, default: str = "", below: float = math.inf) -> Any:
    """A number in the environment."""
    text = os.environ.get(name, default)
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    least = 0 if kind is int else math.ulp(0.0)
    if not (least <= value < below and value < 1e6):
        raise ConfigError(
            f"{name} is not {meaning}.",
            asked=f"{name}={text}",
            because="the environment says how many processes there are, which this one is, and how long it waits",
            instead="torchrun, which sets RANK and WORLD_SIZE; " + f"{VARIABLE}=30 for half an hour",
        )
    return value


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


def make_group(ranks: Iterable[int] | None = None, backend: str | None = None) -> Any:
    """A group of some processes, or of all, with the time limit of the others; all processes make all groups.

    torch gives a new group its own default of 30 minutes, whatever the limit of the first one is.
    """
    members = None if ranks is None else list(ranks)
    return dist.new_group(members, timeout=_find_limit(), backend=backend)


def _find_limit() -> datetime.timedelta | None:
    """How long the processes wait for one another now; None where their backend does not say."""
    world: Any = dist.group.WORLD
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            return world._get_backend(torch.device(device)).options._timeout
    return None


@contextlib.contextmanager
def explain_lost_processes() -> Iterator[None]:
    """Raise failures of messages inside as what they mean: another process died or does not answer."""
    try:
        yield
    except RuntimeError as failure:
        first = (str(failure).splitlines() or [""])[0]
        told = isinstance(failure, RegardError) or not dist.is_initialized()
        if told or not (isinstance(failure, dist.DistError) or LOST.search(first)):
            raise
        limit = _find_limit()
        minutes = MINUTES if limit is None else limit.total_seconds() / 60
        raise ProcessError(
            f"Process {dist.get_rank()} of {dist.get_world_size()} has lost another one.",
            asked=f"an answer within {minutes:g} minutes",
            found=f"{type(failure).__name__}: {NOISE.sub('', first)}",
            because="it was killed, has failed for a reason of its own, or takes longer",
            instead="the errors of the other processes; torchrun --max-restarts 3 to go on from the last checkpoint; "
            f"{VARIABLE} for a longer wait",
        ) from failure


def is_first_here() -> bool:
    """Whether this is the first process of its machine; of all processes where the launcher does not number them."""
    rank, size = join_processes()
    return size == 1 or int(os.environ.get("LOCAL_RANK", rank)) == 0


@contextlib.contextmanager
def wait_for_first() -> Iterator[None]:
    """What is inside runs on the first process, on the first of every other machine, then on the rest.

    They find what the first one downloaded and computed, or that of their machine where it has a disk of its own.
    """
    rank, size = join_processes()
    turns = 2 if size > 1 else 0
    before = 0 if rank == 0 else min(turns, 1 if is_first_here() else 2)
    _wait(before)
    yield
    _wait(turns - before)


def _wait(times: int) -> None:
    with explain_lost_processes():
        for _ in range(times):
            dist.barrier()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
