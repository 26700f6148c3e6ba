"""Random inputs from a seed and a purpose: the same on every machine and in every order of calls."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


def seed_generators(seed: int) -> None:
    """`torch.manual_seed`, which formats and keeps a stack trace for every kind of accelerator that is not there."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


class Rng:
    """A random generator seeded by a number and by what the numbers are for, and by nothing else."""

    def __init__(self, seed: int, *words: object) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, *words)).encode()))

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Standard normal numbers, drawn in float64 so that every precision sees the same ones, rounded."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Integers from `low` to `high`, `high` not included."""
        return torch.randint(low, high, shape, generator=self.generator)

    def integer(self, low: int, high: int) -> int:
        return int(self.integers(low, high, 1))

    def permutation(self, count: int) -> Tensor:
        """An order other than the given one, wherever there is another."""
        identity = torch.arange(count)
        for _ in range(8):
            order = torch.randperm(count, generator=self.generator)
            if count < 2 or not torch.equal(order, identity):
                return order
        return identity.roll(1)

    def signs(self, *shape: int) -> Tensor:
        return self.integers(0, 2, *shape) * 2.0 - 1.0
