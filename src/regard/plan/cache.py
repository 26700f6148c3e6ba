"""A cache that is bounded by what it holds, not by how many things.

Plans are found again by pattern and lengths. A pattern that never changes costs once; a batch of new lengths at every
step must not pile up, so the least recently used plans leave when the kept ones grow too large.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

Made = TypeVar("Made")


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """What is remembered outlives the caller's modes: no tracing, no transforms, no inference tensors, only the CPU."""
    with (
        torch._C._DisableFuncTorch(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.device("cpu"),
    ):
        yield


def keep(limit: int, weigh: Callable[[Any], int]) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Remember results of a function, least recently used out first, while they weigh at most `limit` bytes."""

    def decorate(make: Callable[..., Made]) -> Callable[..., Made]:
        kept: OrderedDict[tuple, tuple[Made, int]] = OrderedDict()
        lock = threading.Lock()

        @functools.wraps(make)
        def remembered(*arguments, **words) -> Made:
            name = (arguments, tuple(sorted(words.items())))
            with lock:
                if name in kept:
                    kept.move_to_end(name)
                    return kept[name][0]
            with plainly():
                made = make(*arguments, **words)
            with lock:
                kept[name] = (made, weigh(made))
                while len(kept) > 1 and sum(weight for _, weight in kept.values()) > limit:
                    kept.popitem(last=False)
            return made

        remembered.kept = kept  # type: ignore[attr-defined]
        remembered.cache_clear = kept.clear  # type: ignore[attr-defined]
        return remembered

    return decorate
