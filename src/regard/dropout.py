"""Dropout of attention weights by a counter-based generator: every entry of the mask can be computed alone, and again.

    weight[i, j] -> keep[i, j] weight[i, j] / (1 - p)
    keep[b, h, i, j] = u >= 2^16 p,    u = number j % 8 of the eight 16-bit numbers of Philox4x32-10(counter, seed)
    counter = (j // 8, i, r mod 2^32, r // 2^32),    r = heads b + h

for batch row `b`, head `h`, query `i` and key `j`. So the mask is the same for any tiling, number of threads, backend
and dtype, and a backward pass computes it again instead of keeping it. `p` is rounded to the nearest multiple of 2^-16
below 1, here and in the scale `1 / (1 - p)`: the expectation of a weight is exact.

Source: Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3 (2011). `csrc/dropout.h` computes the
same mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KEYS_AT_ONCE = 8  # numbers of 16 bits in one result of the generator
_LEVELS = 1 << 16
_WORD = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


@dataclass(frozen=True, eq=False)
class Dropout:
    """Which attention weights are dropped.

    Attributes:
        probability: of dropping a weight, above 0 and below 1.
        seed: a tensor `()` of int64: under `torch.compile` and `torch.vmap` it has no value yet.
    """

    probability: float
    seed: Tensor

    def factors(self, row: Tensor, query: Tensor, block: Tensor, dtype: torch.dtype) -> Tensor:
        """What the weights of eight neighbouring keys are multiplied with, 0 or `1 / (1 - p)`: `(..., 8)`.

        `row` is `heads * batch row + head`, `block` is `key // 8`; they broadcast with `query`.
        """
        words = philox((block, query, row & _WORD, row >> 32), self.seed)
        numbers = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1)
        return (numbers >= find_threshold(self.probability)).to(dtype) * keep_scale(self.probability)


def draw_seed() -> Tensor:
    """A seed from torch's default generator, so that `torch.manual_seed` determines it."""
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu")


def find_threshold(probability: float) -> int:
    """Of 65,536 equally likely numbers, how many drop a weight: those below."""
    return min(round(probability * _LEVELS), _LEVELS - 1)


def keep_scale(probability: float) -> float:
    """`1 / (1 - p)`, with `p` as it is rounded."""
    return _LEVELS / (_LEVELS - find_threshold(probability))


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, ...]:
    """Philox4x32-10: four words of 32 random bits for each counter of four words, all as int64."""
    x0, x1, x2, x3 = counter
    key0, key1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        # Products of 32-bit words as int64: they wrap around, which keeps their bits.
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1 = ((product1 >> 32) & _WORD) ^ x1 ^ key0, product1 & _WORD
        x2, x3 = ((product0 >> 32) & _WORD) ^ x3 ^ key1, product0 & _WORD
        key0, key1 = (key0 + _KEY_STEPS[0]) & _WORD, (key1 + _KEY_STEPS[1]) & _WORD
    return x0, x1, x2, x3
