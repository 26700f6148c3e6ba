"""What this machine can do at best, measured in the same run as everything else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.kernels.bandwidth import allocate_on_huge_pages

READ_FLOATS = 80 * 2**20  # 320 MiB: far more than any cache keeps


@dataclass(frozen=True)
class Limits:
    """Attributes:
    peak: GF/s of multiply-adds with all threads.
    peak_by: how the peak was found.
    sgemm: GF/s of the best large product of two matrices.
    read: GB/s of reading memory, by the fastest of a few operations.
    read_by: that operation.
    """

    peak: float
    peak_by: str
    sgemm: float
    read: float
    read_by: str


def measure() -> Limits:
    sgemm = max(_measure_sgemm(size) for size in (1024, 1536, 2048))
    peak, peak_by = _measure_native_peak() or (sgemm, "the best sgemm, for there is no native library")
    floats = allocate_on_huge_pages(READ_FLOATS, torch.float32).fill_(1.0)  # with 4 KB pages it is slower
    rates = {name: 4e-9 * READ_FLOATS / _fastest_seconds(reader, floats, 5) for name, reader in READERS.items()}
    read_by = max(rates, key=rates.__getitem__)
    return Limits(peak, peak_by, sgemm, rates[read_by], read_by)


def _dot_product(floats: Tensor) -> Tensor:
    first, second = floats.view(2, -1)
    return torch.dot(first, second)


# torch's own reductions differ in how close they come to the memory's limit; the best one counts.
READERS: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "dot": _dot_product, "amax": torch.amax}


def _measure_sgemm(size: int) -> float:
    left, right = torch.randn(2, size, size)
    return 2e-9 * size**3 / _fastest_seconds(lambda matrix: matrix @ right, left, 4)


def _fastest_seconds(function: Callable[[Tensor], Tensor], argument: Tensor, times: int) -> float:
    """Seconds of the fastest run: a limit is what nothing disturbed."""
    spent = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        result = function(argument)
        spent.append(time.perf_counter() - begin)
        result.view(-1)[0].item()
    return min(spent[1:])


def _measure_native_peak() -> tuple[float, str] | None:
    """GF/s of the native library's loop of nothing but multiply-adds, where there is one."""
    try:
        from regard.kernels import library
    except ImportError:
        return None
    if library.missing() is not None:
        return None
    rates = (library.machine_peak(torch.get_num_threads(), seconds=0.1) for _ in range(3))
    return max(rates), f"multiply-adds on registers, {library.name()}"
