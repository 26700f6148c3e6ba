"""The memory behind tensors: an id for every storage, and the bytes that a run allocates and releases."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor


class StorageLog:
    """Ids of storages, and every allocation and release of a run, in order.

    A storage is watched by a weak reference, so that recording a run does not change when its tensors die. Torch reuses
    the address of a storage that was released; an id is used once.

    Attributes:
        changes: bytes that were allocated, or with a minus released.
        changed_ids: the id of the storage of each change.
    """

    def __init__(self) -> None:
        self.changes: list[int] = []
        self.changed_ids: list[int] = []
        self._watched: dict[int, tuple[int, int, weakref.ref]] = {}  # by address: id, bytes, weak reference
        self._next_id = itertools.count(1)

    def add_existing(self, tensors: Iterable[Tensor]) -> int:
        """Tensors that exist before the run and outlive it; the bytes of their storages, each once."""
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._watched:
                self._watch(storage, 0)
                total += storage.nbytes()
        return total

    def find_id(self, tensor: Tensor) -> int:
        """The id of a tensor that an operation reads; 0 for one without a storage. One not yet seen existed before."""
        if tensor.layout is not torch.strided:
            return 0
        storage = tensor.untyped_storage()
        known = self._watched.get(storage._cdata)
        return self._watch(storage, 0) if known is None else known[0]

    def find_written_id(self, tensor: Tensor) -> int:
        """The id of a tensor that an operation returns. One not yet seen was allocated by it."""
        if tensor.layout is not torch.strided:
            return 0
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        known = self._watched.get(address)
        if known is None:
            number = self._watch(storage, size)
            self._add_change(number, size)
            return number
        number, before, watch = known
        if 0 < before != size:  # an output that was given is resized
            self._add_change(number, size - before)
            self._watched[address] = number, size, watch
        return number

    def _watch(self, storage: torch.UntypedStorage, size: int) -> int:
        address, number = storage._cdata, next(self._next_id)
        self._watched[address] = number, size, weakref.ref(storage, lambda _: self._release(address))
        return number

    def _release(self, address: int) -> None:
        number, size, _ = self._watched.pop(address)
        if size:
            self._add_change(number, -size)

    def _add_change(self, number: int, size: int) -> None:
        self.changes.append(size)
        self.changed_ids.append(number)

    @property
    def live_bytes(self) -> int:
        """Bytes that were allocated by the run and are not released yet."""
        return sum(self.changes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at one time, beside what existed before."""
        return max(itertools.accumulate(self.changes), default=0)

    def find_passing_peak(self) -> int:
        """The peak without what is still alive now: each such storage counts at the moment of its allocation only.

        After a backward pass these are the gradients, which data parallelism moves to buffers of its own at once.
        """
        lasting = {number for number, size, _ in self._watched.values() if size}
        live = peak = 0
        for number, change in zip(self.changed_ids, self.changes, strict=True):
            if number in lasting:
                peak = max(peak, live + change)
            else:
                live += change
                peak = max(peak, live)
        return peak
