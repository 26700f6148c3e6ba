"""Random blocks of keys, as in BigBird."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.caching import lru_cache_small
from regard.errors import PatternError
from regard.patterns.arguments import check_integer, set_integer
from regard.patterns.base import Pattern
from regard.patterns.box import Array, Lengths, TokenBox, coverage


@dataclass(frozen=True, repr=False)
class Random(Pattern):
    """A query sees `count` blocks of keys drawn at random for its own block, the same on every machine.

    Blocks hold `block` tokens. The draw is without repetition and depends on `seed`, the query's block and the number
    of key blocks alone. When keys arrive one by one the number of blocks grows and the draw changes with it; `tokens`
    fixes the length that blocks are drawn from, so that a cache and a full run agree.

    BigBird (Zaheer et al. 2020) is `Window(...) | First(...) | Random(...)`.
    """

    count: int
    seed: int
    block: int = 1
    tokens: int | None = None

    def __post_init__(self) -> None:
        set_integer(self, "count", self.count, 0)
        set_integer(self, "block", self.block, 1)
        object.__setattr__(self, "seed", check_integer("Random", "seed", self.seed))
        if self.tokens is not None:
            set_integer(self, "tokens", self.tokens, 1)

    @property
    def _needs_key_length(self) -> bool:
        return self.tokens is None

    @property
    def _is_scattered(self) -> bool:
        return True

    def _check_lengths(self, lengths: Lengths) -> None:
        if self.tokens is not None and lengths.keys > self.tokens:
            raise PatternError(
                "Random draws from fewer tokens than there are.",
                asked=repr(self),
                found=f"{lengths.keys} keys",
                because="the keys beyond `tokens` would never be drawn",
                instead=f"tokens={lengths.keys} or more, or no tokens at all",
            )

    def _count_key_blocks(self, keys: int) -> int:
        """How many key blocks there are to draw from."""
        return -(-(keys if self.tokens is None else self.tokens) // self.block)

    def draw_key_blocks(self, query_block: Array, keys: int) -> Array:
        """The key blocks drawn for each query block: `(*query_block.shape, min(count, blocks))`, unsorted."""
        universe = self._count_key_blocks(keys)
        count = min(self.count, universe)
        chosen = np.empty((*query_block.shape, count), dtype=np.int64)
        # Floyd's sampling: `count` steps, no list of candidates, and every subset equally likely.
        for place, largest in enumerate(range(universe - count, universe)):
            candidate = (_hash_draw(self.seed, query_block, largest) % np.uint64(largest + 1)).astype(np.int64)
            taken = (chosen[..., :place] == candidate[..., None]).any(-1)
            chosen[..., place] = np.where(taken, largest, candidate)
        return chosen

    def _allows(self, i: Tensor, j: Tensor, row: Tensor, lengths: Lengths) -> Tensor:
        columns, lowest = _make_draw_table(self, lengths, i.device)
        if not columns or not len(columns[0]):
            return (i == j) & (i != j)
        block = (torch.div(i, self.block, rounding_mode="floor") - lowest).clamp(0, len(columns[0]) - 1)
        wanted = torch.div(j, self.block, rounding_mode="floor")
        # One draw after the other: a compiled FlexAttention takes elementwise masks, and this one is.
        return functools.reduce(torch.logical_or, [column[block] == wanted for column in columns])

    def _box_coverage(self, query: TokenBox, key: TokenBox, row: Array, lengths: Lengths) -> Array:
        first, last = query.first // self.block, query.last // self.block
        low, high = key.first // self.block, key.last // self.block
        universe = max(self._count_key_blocks(lengths.keys), 1)
        reach = np.int64(1) << 30  # two block numbers in one integer
        spans, which = np.unique((first + reach) * 2 * reach + last + reach, return_inverse=True)
        low_block, high_block = spans // (2 * reach) - reach, spans % (2 * reach) - reach
        width = high_block - low_block + 1
        draws = _sort_draws(self, lengths, low_block.tobytes(), high_block.tobytes())
        inside = np.searchsorted(draws, which * universe + np.minimum(high, universe - 1), "right")
        inside = inside - np.searchsorted(draws, which * universe + low, "left")
        return coverage(inside > 0, inside == width[which] * (high - low + 1))

    def _count_pairs(self, lengths: Lengths) -> int:
        # A block of keys is drawn whole; only the last block can be short.
        if not lengths.keys or not lengths.queries:
            return 0
        position = np.arange(lengths.offset, lengths.keys)
        blocks, held = np.unique(position // self.block, return_counts=True)
        start = self.draw_key_blocks(blocks, lengths.keys) * self.block
        width = np.clip(lengths.keys - start, 0, self.block)
        return int((width.sum(-1) * held).sum())


@lru_cache_small(maxsize=2)
def _sort_draws(pattern: Random, lengths: Lengths, first: bytes, last: bytes) -> Array:
    """The draws of every span of query blocks in one sorted list: number of the span, then key block."""
    low, high = np.frombuffer(first, dtype=np.int64), np.frombuffer(last, dtype=np.int64)
    width = high - low + 1
    owner = np.repeat(np.arange(width.size), width)
    member = np.arange(owner.size) - np.repeat(np.cumsum(width) - width, width) + low[owner]
    universe = max(pattern._count_key_blocks(lengths.keys), 1)
    return np.sort((owner[:, None] * universe + pattern.draw_key_blocks(member, lengths.keys)).reshape(-1))


@lru_cache_small(maxsize=2)
def _make_draw_table(pattern: Random, lengths: Lengths, device: torch.device) -> tuple[tuple[Tensor, ...], int]:
    """The first, second, ... draw of every query block there is, and the number of the first such block."""
    lowest = lengths.offset // pattern.block if lengths.queries else 0
    highest = (lengths.keys - 1) // pattern.block
    with torch.inference_mode(False):  # a cached tensor outlives the caller's mode
        table = torch.from_numpy(pattern.draw_key_blocks(np.arange(lowest, highest + 1), lengths.keys)).to(device)
        return tuple(column.contiguous() for column in table.unbind(-1)), lowest


def _hash_draw(seed: int, block: Array, step: int) -> Array:
    """A 64-bit hash of three integers (the finaliser of SplitMix64), the same on every machine."""
    with np.errstate(over="ignore"):
        state = block.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed & (2**64 - 1))
        state = _finalize_splitmix64(state) + np.uint64(step) * np.uint64(0xD1B54A32D192ED03)
        return _finalize_splitmix64(state)


def _finalize_splitmix64(state: Array) -> Array:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
