"""Length penalties: what makes long and short texts comparable."""

from __future__ import annotations

import math
from dataclasses import dataclass

from regard.errors import InputError

# Scores of divisors up to here, or one over it, are ordinary float64 numbers with all their digits.
HUGE = 1e200

__all__ = ["LengthPenalty", "PowerPenalty", "WuPenalty", "parse_penalty"]


@dataclass(frozen=True)
class LengthPenalty:
    """A divisor lp(n) > 0 of the log-probability of a text of n tokens, monotone in n.

    A subclass defines `__call__`. `alpha` above 0 favours long texts, below 0 short ones; 0 is no penalty.
    """

    alpha: float

    def __post_init__(self) -> None:
        if not (isinstance(self.alpha, int | float) and abs(self.alpha) < math.inf):
            raise InputError(
                "The strength of a length penalty is a finite number.",
                asked=f"{type(self).__name__}({self.alpha!r})",
                because="it is the exponent alpha of a length",
                instead="0.0 for no penalty, 0.6 as in Attention Is All You Need",
            )

    def __call__(self, length: int) -> float:
        raise NotImplementedError

    def bound(self, log_probability: float, shortest: int, longest: int) -> float:
        """The best score that a text of this log-probability can reach by growing to a length in this range.

        What is added has log-probability of at most 0, so log p / lp(n) bounds the score at length n; with
        log p <= 0 and lp monotone, that is largest at one of the ends.
        """
        return max(log_probability / self(shortest), log_probability / self(longest))


@dataclass(frozen=True)
class WuPenalty(LengthPenalty):
    """The penalty of Google's translation system and of the first Transformer.

        lp(n) = ((5 + n) / (5 + 1))^alpha

    n: new tokens, the stop token included.

    Source: Wu et al., Google's Neural Machine Translation System (2016), equation 14.

    >>> from regard.models.generation import WuPenalty
    >>> WuPenalty(1.0)(7)
    2.0
    """

    alpha: float = 0.6

    def __call__(self, length: int) -> float:
        return ((5 + length) / 6) ** self.alpha


@dataclass(frozen=True)
class PowerPenalty(LengthPenalty):
    """The penalty of Hugging Face's `length_penalty`; with alpha 1 the score is the mean log-probability.

        lp(n) = n^alpha

    n: new tokens, the stop token included.

    >>> from regard.models.generation import PowerPenalty
    >>> PowerPenalty(2.0)(3)
    9.0
    """

    alpha: float = 1.0

    def __call__(self, length: int) -> float:
        return float(length) ** self.alpha


def parse_penalty(penalty: float | LengthPenalty, longest: int) -> LengthPenalty:
    """The penalty itself, or Wu's of this strength, known to be a good divisor up to this length."""
    read = penalty if isinstance(penalty, LengthPenalty) else WuPenalty(penalty)
    for length in (1, longest):  # monotone: all others lie between
        try:
            divisor = read(length)
        except OverflowError:
            divisor = math.inf
        if not 1 / HUGE <= divisor <= HUGE:
            raise InputError(
                "The length penalty is too strong.",
                asked=f"{read!r} for texts of up to {longest} tokens",
                found=f"lp({length}) = {divisor:.3g}",
                because="scores are log-probabilities divided by it, and would all be zero or infinite",
                instead="0.6 as in Attention Is All You Need, or another number near 1",
            )
    return read
