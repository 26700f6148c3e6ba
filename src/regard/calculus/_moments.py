"""The distribution of a dot product of random vectors: why scores are divided by sqrt(dim)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from regard.calculus._arguments import read_number, read_whole_number
from regard.errors import CalculusError


@dataclass(frozen=True)
class DotProductMoments:
    """Moments of `s = beta a . b` for independent standard normal vectors of `dim` numbers.

    >>> DotProductMoments(dim=4).fourth
    72.0
    """

    dim: int
    beta: float = 1.0

    @property
    def mean(self) -> float:
        """E[s] = 0."""
        return 0.0

    @property
    def variance(self) -> float:
        """E[s^2] = beta^2 D."""
        return self.beta**2 * self.dim

    @property
    def fourth(self) -> float:
        """E[s^4] = beta^4 (3 D^2 + 6 D)."""
        return self.beta**4 * (3.0 * self.dim**2 + 6.0 * self.dim)

    @property
    def excess_kurtosis(self) -> float:
        """E[s^4] / E[s^2]^2 - 3 = 6 / D: heavier tails than a normal, less so in more dimensions."""
        return 6.0 / self.dim

    def standard_error(self, samples: int) -> float:
        """Standard deviation of the mean of s^2 over independent samples: beta^2 sqrt((2 D^2 + 6 D) / n)."""
        if read_whole_number("standard_error", "samples", samples) < 1:
            raise CalculusError(
                "A standard error needs samples.",
                asked=f"samples = {samples}",
                because="the mean of no numbers is not defined",
                instead="samples of 1 or more",
            )
        return self.beta**2 * math.sqrt((2.0 * self.dim**2 + 6.0 * self.dim) / samples)


def dot_product_moments(dim: int, beta: float = 1.0) -> DotProductMoments:
    """Moments of a score when query and key are independent standard normal vectors.

        s = beta a . b
        E[s] = 0,   E[s^2] = beta^2 D,   E[s^4] = beta^4 (3 D^2 + 6 D),   excess kurtosis 6 / D

    a, b: query and key with D = `dim` independent N(0, 1) numbers each; beta: inverse temperature. The
    variance grows with D, which saturates the softmax; `beta = 1/sqrt(D)` makes it one. Averaging n samples
    of s^2 estimates the variance with standard error `beta^2 sqrt((2 D^2 + 6 D) / n)`.

    Source: Bishop & Bishop, Deep Learning, exercise 12.4, which asks for the variance; it needs only
    independence, zero mean and unit variance. The fourth moment uses that the numbers are normal (E[a^4] =
    3).

    Where we differ: beta is part of the score, so the scaled score needs no second formula.

    >>> dot_product_moments(64).variance, dot_product_moments(64, beta=1 / 8).variance
    (64.0, 1.0)
    """
    if read_whole_number("dot_product_moments", "dim", dim) < 1:
        raise CalculusError(
            "A dot product needs vectors with at least one number.",
            asked=f"dim = {dim}",
            because="an empty sum is always 0 and has no kurtosis",
            instead="the head's dim, 1 or more",
        )
    return DotProductMoments(int(dim), read_number("dot_product_moments", "beta", beta))
