"""Concurrent calls, calls during another call, and calls that draw random numbers."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.adapters import rng
from regard.adapters.base import Adapter
from regard.adapters.dispatch_mode import HigherOrderDispatchMode

# Places inside one call at which another is made in a second thread, and the seconds that it may take.
PLACES, PATIENCE = 6, 0.5


def is_random(subject: Adapter, call: Callable[[Adapter], Tensor], *words: object) -> bool:
    """Whether the output depends on torch's random numbers: it is determined by their seed.

    `words` identify the call; the result is cached by them.
    """
    known = _RANDOM.setdefault(subject, {})
    if words not in known:
        outputs = []
        with suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():
            other = subject.copy_unused()
            for seed in (0, 1, 1, 0):  # no memory of a few calls has this order
                rng.seed_generators(seed)
                outputs.append(call(other).nan_to_num())
                if len(outputs) == 2 and torch.equal(outputs[0], outputs[1]):
                    break
        same = [torch.equal(outputs[one], outputs[two]) for one, two in ((0, 3), (1, 2), (0, 1)) if len(outputs) == 4]
        known[words] = same == [True, True, False]
    return known[words]


_RANDOM: WeakKeyDictionary[Adapter, dict[tuple, bool]] = WeakKeyDictionary()


def with_fixed_seed(subject: Adapter) -> Adapter:
    """The same subject, which draws the same numbers in every call."""
    other = copy.copy(subject)

    def run(x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            rng.seed_generators(0)
            return subject.run(x, mask)

    other.run = run  # type: ignore[method-assign]
    other.copy_unused = lambda: with_fixed_seed(subject.copy_unused())  # type: ignore[method-assign]
    return other


class _Interruption(HigherOrderDispatchMode):
    """Counts operations, and at one of them lets something else happen."""

    def __init__(self, place: int = -1, happen: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.count, self.place, self.happen = 0, place, happen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.count == self.place and self.happen is not None:
            self.happen()
        self.count += 1
        return self.call(func, args, kwargs)


def run_interrupted(
    subject: Adapter, x: Tensor, mask: Tensor | None, others: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, str]]:
    """One call is stopped midway while another thread makes another call on the same instance.

    Yields the output alone, the output when interrupted, and the failure of the interruption if there is none.
    """
    subject.run(x, mask)
    with _Interruption() as counted:
        alone = subject.run(x, mask)  # being watched may change what a compiled part does
    step = max(1, counted.count // PLACES)
    waiting: list[threading.Thread] = []
    for place in range(0, counted.count, step):
        for other in others:

            def happen(other: Tensor = other) -> None:
                thread = threading.Thread(target=_run_suppressing_errors, args=(subject, other), daemon=True)
                thread.start()
                thread.join(PATIENCE)
                if thread.is_alive():  # it waits for a lock, as it may
                    waiting.append(thread)

            effect = ""
            try:
                with _Interruption(place, happen):
                    found = subject.run(x, mask)
            except Exception as failure:  # alone it ran
                found, effect = torch.full_like(alone, torch.nan), f"was lost: {type(failure).__name__}"
            yield alone, found, effect
            if waiting:
                waiting[0].join()
                return


def _run_suppressing_errors(subject: Adapter, x: Tensor) -> None:
    with suppress(Exception), torch.no_grad():
        subject.run(x)


def run_concurrently(
    subject: Adapter, inputs: Sequence[Tensor], mask: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Two threads call one instance repeatedly. Yields each output alone, and the output found."""
    alone = [subject.run(question, mask) for question in inputs]
    outputs: list[list[Tensor]] = [[], []]
    gate = threading.Barrier(2)

    def call(number: int) -> None:
        gate.wait(20 * PATIENCE)
        with torch.no_grad():
            for _ in range(8):
                try:
                    outputs[number].append(subject.run(inputs[number], mask))
                except Exception:  # alone it ran
                    outputs[number].append(torch.full_like(alone[number], torch.nan))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for expected, found in zip(alone, outputs, strict=True):
        for output in found:
            yield expected, output
