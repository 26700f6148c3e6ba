"""The bandwidth of reading memory in one long stream, which bounds decoding."""

from __future__ import annotations

import mmap
import time

import torch
from torch import Tensor

HUGE_PAGE = 1 << 21


def allocate_on_huge_pages(count: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor of one axis that begins on a huge page, where the system has them.

    Its storage is as long as itself, so that a saved file is not longer.
    """
    size = count * torch.empty((), dtype=dtype).element_size()
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=dtype)
    memory = mmap.mmap(-1, size + 2 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    # The last page is a huge one if more than half of it is needed.
    length = (size + HUGE_PAGE // 2) // HUGE_PAGE * HUGE_PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, start, length)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start)


def measure_bandwidth(size: int = 1 << 28, seconds: float = 0.2) -> float:
    """Bytes a second of reading `size` bytes on huge pages with all threads, the best of many passes."""
    floats = allocate_on_huge_pages(size // 4, torch.float32).fill_(1.0)
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        begin = time.perf_counter()
        floats.sum()
        best = min(best, time.perf_counter() - begin)
    return size / best
