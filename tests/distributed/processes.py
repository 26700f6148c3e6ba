"""A few processes that are started once and run functions of the tests together, by gloo."""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

TIMEOUT = 120  # seconds that a process waits for another


def _serve(rank: int, size: int, store: str, threads: int, connection: Connection) -> None:
    torch.set_num_threads(threads)
    if threads == 1 and hasattr(os, "sched_setaffinity"):  # each on a core of its own, while there are enough
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    limit = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    while True:
        message = connection.recv()
        if message is None:
            break
        function, arguments = message
        try:
            connection.send((True, function(rank, size, **arguments)))
        except BaseException:
            connection.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Processes:
    """`size` processes of so many threads each."""

    def __init__(self, size: int, store: str, threads: int) -> None:
        context = get_context("spawn")
        self.size, self.connections, self.processes = size, [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, threads, theirs), daemon=True)
            process.start()
            self.connections.append(mine)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """The results of `function(rank, size, **arguments)` on all processes; raises if one of them failed."""
        for connection in self.connections:
            connection.send((function, arguments))
        results = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(2 * TIMEOUT):
                raise TimeoutError(f"process {rank} of {self.size} does not answer")
            results.append(connection.recv())
        failures = [f"process {rank}:\n{text}" for rank, (fine, text) in enumerate(results) if not fine]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in results]

    def close(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.terminate()


@contextlib.contextmanager
def start_processes(size: int, threads: int = 1) -> Iterator[Processes]:
    """Processes that end with the context."""
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(size, os.path.join(folder, "store"), threads)
        try:
            yield processes
        finally:
            processes.close()


# Fixtures, which the conftest.py of a folder imports


@pytest.fixture(scope="package")
def two() -> Iterator[Processes]:
    with start_processes(2) as processes:
        yield processes


@pytest.fixture(scope="package")
def four() -> Iterator[Processes]:
    with start_processes(4) as processes:
        yield processes
