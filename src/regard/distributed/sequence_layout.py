"""Which process holds which tokens of a sequence that is cut over several."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ConfigError
from regard.patterns.submatrix import Runs, count_tokens

KINDS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class SequenceLayout:
    """The tokens of each process.

    "contiguous": process r of P has the r-th of P chunks, as a window or blocks want it: neighbours are local.
    "zigzag": of 2 P chunks, process r has number r and number 2 P - 1 - r, so that under a causal pattern all have
    equally many pairs (the first chunk sees least, the last one most).

    Chunks have equally many tokens, or differ by one where the number of tokens is not divisible.

        >>> SequenceLayout(16, 2, "zigzag").runs(0)
        ((0, 4), (12, 16))
    """

    tokens: int
    processes: int
    kind: str = "contiguous"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"There is no layout {self.kind!r}.",
                asked=f"SequenceLayout({self.tokens}, {self.processes}, {self.kind!r})",
                because="tokens are cut into chunks that are dealt out in order or zigzag",
                instead='"contiguous" or "zigzag"',
            )
        if self.processes < 1 or self.tokens < 0:
            raise ConfigError(
                f"{self.tokens} tokens cannot be cut over {self.processes} processes.",
                asked=f"SequenceLayout({self.tokens}, {self.processes})",
                because="there is at least one process, and no negative number of tokens",
                instead="SequenceLayout(4096, 2)",
            )

    def runs(self, process: int) -> Runs:
        """The tokens of a process, as runs `[start, stop)`; neighbouring chunks are one run, empty ones none."""
        chunks = 2 * self.processes if self.kind == "zigzag" else self.processes
        mine = (process, chunks - 1 - process) if self.kind == "zigzag" else (process,)
        found: list[tuple[int, int]] = []
        for chunk in mine:
            start, stop = self.tokens * chunk // chunks, self.tokens * (chunk + 1) // chunks
            if found and found[-1][1] == start:
                found[-1] = found[-1][0], stop
            elif start < stop:
                found.append((start, stop))
        return tuple(run for run in found if run[0] < run[1])

    def count(self, process: int) -> int:
        """How many tokens a process has."""
        return count_tokens(self.runs(process))

    def take(self, tensor: Tensor, process: int, dim: int = -2) -> Tensor:
        """The part of a whole tensor that a process holds; tokens lie along `dim`."""
        runs = self.runs(process) or ((0, 0),)
        parts = [tensor.narrow(dim, start, stop - start) for start, stop in runs]
        return torch.cat(parts, dim) if len(parts) != 1 else parts[0]

    def join(self, parts: list[Tensor], dim: int = -2) -> Tensor:
        """The whole tensor from the parts of all processes, in their order."""
        pieces: list[tuple[int, Tensor]] = []
        for process, part in enumerate(parts):
            at = 0
            for start, stop in self.runs(process):
                pieces.append((start, part.narrow(dim, at, stop - start)))
                at += stop - start
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda each: each[0])] or parts[:1], dim)

    def positions(self, process: int) -> Tensor:
        """The token numbers of a process, in the order in which it holds them."""
        numbers = [torch.arange(start, stop) for start, stop in self.runs(process)]
        return torch.cat(numbers) if numbers else torch.zeros(0, dtype=torch.int64)
