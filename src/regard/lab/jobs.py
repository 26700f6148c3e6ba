"""The queue of the lab's work: a few threads, one job of a model at a time, and every job can be cancelled."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from regard.errors import InputError

MOST_WAITING = 1024
MOST_WAITING_IN_LANE = 256


class Busy(InputError):
    """More work is waiting than is worth waiting for."""


class Cancelled(Exception):
    """The page that asked for this work no longer waits for it."""


class Job:
    """What a piece of work is given: whether it is still wanted, and where it reports its progress."""

    def __init__(self, report: Callable[[dict[str, Any]], None] = lambda line: None) -> None:
        self._cancelled = threading.Event()
        self._report = report

    def cancel(self) -> None:
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def check(self) -> None:
        """Raise `Cancelled` if nobody waits for the result."""
        if self._cancelled.is_set():
            raise Cancelled

    def report(self, line: dict[str, Any]) -> None:
        """Send a line before the result."""
        self.check()
        self._report(line)

    def progress(self, done: int, total: int, label: str, **more: Any) -> None:
        self.report({"progress": {"done": done, "total": total, "label": label}, **more})


class Workers:
    """Runs jobs in threads. Jobs of one lane, such as a model, run one after the other; lanes run side by side.

    At most `most_waiting` jobs wait, and `most_in_lane` of one lane; the next one is refused with `Busy`.
    """

    def __init__(
        self,
        threads: int | None = None,
        most_waiting: int = MOST_WAITING,
        most_in_lane: int = MOST_WAITING_IN_LANE,
    ) -> None:
        self.threads = threads or min(max((os.cpu_count() or 2) // 2, 2), 8)
        self.most_waiting, self.most_in_lane = most_waiting, most_in_lane
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="lab")
        self._free = asyncio.Semaphore(self.threads)
        self._lanes: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting: dict[str, int] = defaultdict(int)

    @property
    def waiting(self) -> int:
        return sum(self._waiting.values())

    async def run(self, lane: str, work: Callable[[Job], Any], job: Job) -> Any:
        """The result of `work(job)`; cancelling this coroutine cancels the job."""
        if self.waiting >= self.most_waiting or self._waiting[lane] >= self.most_in_lane:
            raise Busy(
                "The lab is busy.",
                asked=f"one more computation of {lane}",
                found=f"{self.waiting} waiting, {self._waiting[lane]} of them for {lane}",
                because="every computation takes a thread, and what waits for long is rarely wanted still",
                instead="the same again in a moment",
            )
        self._waiting[lane] += 1
        try:
            await self._lanes[lane].acquire()
            try:
                await self._free.acquire()
            except BaseException:
                self._release(lane, 0)
                raise
        finally:
            self._waiting[lane] -= 1
        if job.is_cancelled:
            self._release(lane, 1)
            raise Cancelled
        future = asyncio.get_running_loop().run_in_executor(self._pool, work, job)
        # The lane is free when the thread is done, which is later than the cancellation of who waits here.
        future.add_done_callback(lambda done: self._finish(lane, done))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            job.cancel()
            raise

    def _finish(self, lane: str, done: asyncio.Future) -> None:
        if not done.cancelled():
            done.exception()  # seen, so that an abandoned job does not complain about it
        self._release(lane, 1)

    def _release(self, lane: str, threads: int) -> None:
        for _ in range(threads):
            self._free.release()
        self._lanes[lane].release()
        if not self._lanes[lane].locked() and not self._waiting[lane]:
            self._lanes.pop(lane, None)
            self._waiting.pop(lane, None)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
