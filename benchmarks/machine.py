"""What the machine is, and how busy other programs kept it during a measurement."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

import regard

# Settings that change timings; glibc's decide whether every large temporary is page-faulted again at each call.
SETTINGS = (
    "OMP_PROC_BIND",
    "OMP_NUM_THREADS",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "LD_PRELOAD",
    "REGARD_NATIVE_LIBRARY",
)
DISTURBED = 0.15  # cores used by others from which on a measurement is marked


def describe() -> dict:
    """Processor, versions, settings and date, for the report."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "processor": _read_processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "regard": regard.__version__,
        "commit": _read_commit(),
        "environment": {name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


def _read_processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _read_commit() -> str | None:
    """The commit that was measured, marked when files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        here = Path(__file__).parent
        return subprocess.run(command, cwd=here, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@dataclass(frozen=True)
class Load:
    """Cores in use on average: `own` by this process, `others` by all others; `None` where it is unknown.

    With two threads `own` near 1 instead of 2 says that both sat on one core, or that little ran in parallel.
    """

    own: float
    others: float | None

    @property
    def disturbed(self) -> bool:
        return self.others is not None and self.others > DISTURBED

    def __str__(self) -> str:
        others = "unknown" if self.others is None else f"{self.others:.2f}"
        return f"cores in use: own {self.own:.2f}, others {others}" + ("  ~ DISTURBED" if self.disturbed else "")


class Watch:
    """Measures the use of the processor: `with Watch() as watch: ...`, then `watch.load`."""

    def __enter__(self) -> Watch:
        self._begin = (time.perf_counter(), time.process_time(), _read_busy_seconds())
        return self

    def __exit__(self, *_: object) -> None:
        begin, own_begin, busy_begin = self._begin
        spent = max(time.perf_counter() - begin, 1e-9)
        own, busy = (time.process_time() - own_begin) / spent, _read_busy_seconds()
        # The kernel counts in steps of 10 ms, so a short measurement can come out a little below nothing.
        others = None if busy is None or busy_begin is None else max(0.0, (busy - busy_begin) / spent - own)
        self.load = Load(own, others)


def _read_busy_seconds() -> float | None:
    """Seconds that all cores together have not been idle; what a hypervisor took away counts as busy."""
    file = Path("/proc/stat")
    if not file.exists():
        return None
    user, nice, system, _idle, _waiting, *rest = map(int, file.read_text().split("\n", 1)[0].split()[1:])
    interrupts_and_stolen = sum(rest[:3])  # what follows, guests, is already part of `user` and `nice`
    return (user + nice + system + interrupts_and_stolen) / os.sysconf("SC_CLK_TCK")
