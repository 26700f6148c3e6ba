"""Endless streams of examples: which ones a step takes follows from the seed and the step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy as np
import torch

from regard.errors import InputError
from regard.train.task import seed_of


def make_rng(seed: int, name: str, number: int) -> random.Random:
    """The random generator of a stream for one step or epoch."""
    return random.Random(seed_of(seed, name, number))


def make_generator(seed: int, name: str, number: int) -> torch.Generator:
    """The same for tensors."""
    return torch.Generator().manual_seed(seed_of(seed, name, number))


class Stream:
    """The rows of a table in random order, epoch after epoch.

    name: of the stream, which separates its random numbers from those of others.
    make_table: the rows of an epoch, each a few integers, from the random generator of the epoch. Epochs may differ
        in size a little; each gives as many rows as the first has, taking some of its own twice or leaving some out.
    """

    def __init__(self, name: str, seed: int, make_table: Callable[[random.Random], Iterable[tuple[int, ...]]]) -> None:
        self.name, self.seed, self.make_table = name, seed, make_table
        self._epochs: dict[int, np.ndarray] = {}
        self.size = len(self._make_epoch(0))

    def take(self, step: int, count: int) -> list[tuple[int, ...]]:
        """The rows that a step trains on."""
        rows = []
        for number in range(step * count, (step + 1) * count):
            epoch, index = divmod(number, self.size)
            table = self._make_epoch(epoch)
            rows.append(tuple(table[index % len(table)].tolist()))
        return rows

    def _make_epoch(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            rng = make_rng(self.seed, self.name, epoch)
            table = np.array(list(self.make_table(rng)), dtype=np.int64)
            if not len(table):
                raise InputError(
                    f"There is no example for the task {self.name!r}.",
                    asked=f"the task {self.name!r}",
                    because="the text is too short, or none of its sentences is suitable",
                    instead="more text, or other tasks",
                )
            generator = torch.Generator().manual_seed(rng.getrandbits(63))
            order = torch.randperm(len(table), generator=generator).numpy()
            self._epochs = {number: kept for number, kept in self._epochs.items() if number == epoch - 1}
            self._epochs[epoch] = table[order]
        return self._epochs[epoch]
