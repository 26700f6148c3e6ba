"""What this machine can do at best: multiply-adds and bytes in a second, measured once and stored in a file.

A limit is what a machine does when nothing disturbs it. So every limit is measured in several rounds, each of them the
median of three calls after a warm-up, and the best round is taken: other programs, or both threads of this one on the
same core, only ever make a round slower. `steady` says how far the middle round stayed behind, or how much less than
all of its threads the program was given. A measurement of a busy machine is used, but not stored for other programs.

Bytes are those that a processor reads and writes: a sum of n bytes moves n, a copy of n bytes moves 2 n. Memory is
allocated once and touched before anything is measured, because a page that the system has yet to hand out costs more
than the bytes in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from regard.errors import CostError
from regard.kernels.library import missing
from regard.kernels.linear import gemv
from regard.models.io.atomic import make_json_writer, write_atomically

SECONDS = 1.4  # for all rounds together; memory and warming up come on top
FEWEST_ROUNDS = 2
STEADY = 0.75  # below it a measurement was disturbed
BUFFER = 1 << 28  # bytes: far more than any cache holds
SIDE = 1024  # rows and columns of the matrices that are multiplied; half of it on a slow machine
FORMAT = 1  # of the file; what another version of Regard wrote is measured again


@dataclass(frozen=True)
class Machine:
    """What a machine can do in a second. Describe any: `Machine("a GPU", 1, peak=19.5e12, bandwidth=1.5e12)`.

    Attributes:
        name: of the processor.
        threads: how many of them work together.
        peak: operations a second in float32, two for each multiply-add: a practical peak, of a large product.
        bandwidth: bytes a second read from memory in one long stream.
        peak_double: the same as `peak` in float64; half of it by default.
        copy_bandwidth: bytes a second, read and written, of a long copy.
        row_bandwidth: bytes of weights a second that a product of one row reads, as in a step of decoding.
        cache, cache_bandwidth: bytes that the last cache holds, and bytes a second read from it; 0 if unknown.
        steady: 1 if nothing disturbed the measurement; below 0.75 the machine counts as busy.
    """

    name: str
    threads: int
    peak: float
    bandwidth: float
    peak_double: float = 0.0
    copy_bandwidth: float = 0.0
    row_bandwidth: float = 0.0
    cache: int = 0
    cache_bandwidth: float = 0.0
    steady: float = 1.0

    def __post_init__(self) -> None:
        for name in ("threads", "peak", "bandwidth"):
            _check(name, getattr(self, name), least_is_zero=False)
        for name in ("peak_double", "copy_bandwidth", "row_bandwidth", "cache", "cache_bandwidth", "steady"):
            _check(name, getattr(self, name), least_is_zero=True)
        for name, other in (
            ("peak_double", self.peak / 2),
            ("copy_bandwidth", self.bandwidth),
            ("row_bandwidth", self.bandwidth),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, other)

    @property
    def was_busy(self) -> bool:
        """Whether others used it while it was measured."""
        return self.steady < STEADY

    @property
    def balance(self) -> float:
        """Operations in the time of a byte: what does fewer of them for each byte it moves waits for memory."""
        return self.peak / self.bandwidth

    def peak_of(self, dtype: torch.dtype) -> float:
        """The peak in these numbers; half precision is computed as float32 here, and counts as such."""
        return self.peak_double if dtype == torch.float64 else self.peak

    def bandwidth_for(self, moved: float) -> float:
        """Bytes a second for something that moves so many again and again: the cache's if they stay there."""
        return self.cache_bandwidth if self.cache_bandwidth and moved <= self.cache else self.bandwidth

    def __str__(self) -> str:
        words = [
            f"{self.name}, {self.threads} thread{'s' if self.threads > 1 else ''}",
            f"{self.peak / 1e9:.0f} GFLOP/s (float64 {self.peak_double / 1e9:.0f})",
            f"{self.bandwidth / 1e9:.1f} GB/s from memory",
            f"balance {self.balance:.1f} FLOP/B",
        ]
        return ", ".join(words) + ("; busy while it was measured" if self.was_busy else "")


def _check(name: str, value: Any, least_is_zero: bool) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (value == 0 and not least_is_zero):
        raise CostError(
            f"A machine has no such {name}.",
            asked=f"{name}={value!r}",
            because="operations and bytes a second are positive numbers",
            instead='Machine("mine", threads=2, peak=150e9, bandwidth=30e9), or this_machine()',
        )


# Stored

_known: dict[tuple[str, str], Machine] = {}  # measured in this process, for folders that cannot be written


def this_machine(refresh: bool = False) -> Machine:
    """The machine this runs on, with as many threads as torch uses now.

    It is measured once, in about two seconds, and stored in `~/.cache/regard/machine.json` (`$XDG_CACHE_HOME/regard` if
    that is set), one entry for each processor, number of threads and version of torch. `refresh` measures again.
    What was measured while others used the machine is not written there, and holds for this program only.
    """
    file, key = cache_file(), _key()
    if not refresh:
        found = _known.get((str(file), key)) or _read(file).get(key)
        if found is not None:
            return found
    machine = measured()
    _known[str(file), key] = machine
    if machine.was_busy:
        return machine
    # The file is optional: where it cannot be written, the next process measures again.
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        entries = {**_read(file), key: machine}
        plain = {name: dataclasses.asdict(entry) for name, entry in entries.items()}
        write_atomically(file, make_json_writer({"format": FORMAT, "machines": plain}))
    return machine


def cache_file() -> Path:
    """The file of measurements."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    # The standard has relative folders ignored.
    base = Path(folder) if os.path.isabs(folder) else Path(os.path.expanduser("~")) / ".cache"
    return base / "regard" / "machine.json"


def _key() -> str:
    return f"{processor()} | {torch.get_num_threads()} threads | torch {torch.__version__}"


def _read(file: Path) -> dict[str, Machine]:
    """What the file says; nothing where it is missing, damaged, or of another version."""
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        entries = held["machines"] if held["format"] == FORMAT else {}
        return {str(key): _entry(entry) for key, entry in entries.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _entry(entry: Any) -> Machine:
    if not isinstance(entry["name"], str):
        raise TypeError(entry)
    return Machine(**entry)


# Measured


def measured() -> Machine:
    """Measure now, whatever the file says."""
    threads, cache = torch.get_num_threads(), last_cache()
    with torch.no_grad(), torch.inference_mode(False):
        tasks = _tasks(cache)
        rates: dict[str, list[float]] = {name: [] for name in tasks}
        for run, _ in tasks.values():
            run()
        begin, used = time.perf_counter(), time.process_time()
        while len(rates["peak"]) < FEWEST_ROUNDS or time.perf_counter() - begin < SECONDS:
            for name, (run, amount) in tasks.items():
                rates[name].append(amount / statistics.median(_seconds(run) for _ in range(3)))
    given = (time.process_time() - used) / (time.perf_counter() - begin) / threads
    best = {name: max(found) for name, found in rates.items()}
    # Reading is as fast as the fastest way to read.
    best["bandwidth"] = max(best["bandwidth"], best.pop("largest"), best["row_bandwidth"], best["copy_bandwidth"])
    best["cache_bandwidth"] = max(best.get("cache_bandwidth", 0.0), best["bandwidth"] if cache else 0.0)
    steady = min([given, *(statistics.median(rates[name]) / max(rates[name]) for name in ("peak", "bandwidth")), 1.0])
    return Machine(processor(), threads, cache=cache, steady=steady, **best)


def _tasks(cache: int) -> dict[str, tuple[Callable[[], object], float]]:
    """What is run, and how many operations or bytes that is. Nothing here draws random numbers: they are others'."""
    stream = _filled(BUFFER // 4)
    half = len(stream) // 2
    rows = stream.view(-1, 4096)
    one = rows[:1].clone()
    side = _side()
    tasks: dict[str, tuple[Callable[[], object], float]] = {
        "peak": (_product(side, torch.float32), 2 * side**3),
        "peak_double": (_product(3 * side // 4, torch.float64), 2 * (3 * side // 4) ** 3),
        "bandwidth": (lambda: stream.sum(), stream.nbytes),
        "largest": (lambda: stream.amax(), stream.nbytes),
        "copy_bandwidth": (lambda: stream[:half].copy_(stream[half:]), 2 * stream[:half].nbytes),
        # What a step of decoding does with every matrix: by our kernel if there is one.
        "row_bandwidth": (lambda: (gemv if missing() is None else linear)(one, rows), rows.nbytes),
    }
    if cache:
        part = stream[: min(cache // 4, 1 << 23) // 4]
        tasks["cache_bandwidth"] = (lambda: [part.sum() for _ in range(8)], 8 * part.nbytes)
    return tasks


def _filled(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in memory that the system has handed out: every page is written."""
    return torch.full(shape, 0.5, dtype=dtype, device="cpu")


def _product(side: int, dtype: torch.dtype) -> Callable[[], object]:
    left, right, out = (_filled(side, side, dtype=dtype) for _ in range(3))
    return lambda: torch.mm(left, right, out=out)


def _side() -> int:
    """Smaller matrices where one product of the usual size would take long."""
    small = _product(SIDE // 2, torch.float32)
    small()
    return SIDE if _seconds(small) < 0.02 else SIDE // 2


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def processor() -> str:
    """The processor's name, as the system knows it."""
    with contextlib.suppress(OSError):
        named = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if named:
            return named[1].strip()
    return platform.processor() or platform.machine() or "unknown processor"


def last_cache() -> int:
    """Bytes of the largest cache that a core can read from; 0 where the system does not say."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            found = re.fullmatch(r"(\d+)([KMG]?)", file.read_text(encoding="utf-8").strip())
            if found:
                sizes.append(int(found[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[found[2]])
    return max(sizes)
