"""The leak of soft heads: how much weight falls on other pixels, as a function of the steepness alpha."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from regard.errors import CalculusError


def theta(alpha: float) -> float:
    r"""The sum of the unnormalised weights of a line of keys: Jacobi's theta function.

        theta(alpha) = sum over all integers j of e^{-alpha j^2} = sqrt(pi / alpha) sum_j e^{-pi^2 j^2 / alpha}

    `alpha`: the steepness of the score `-alpha (k - q - step)^2`. The second form (Poisson's) is used where `alpha` is
    below pi; either way a few terms are enough.

        >>> import math
        >>> from regard.convert.leakage import theta
        >>> theta(1.0), 1 + 2 * math.exp(-1) + 2 * math.exp(-4) + 2 * math.exp(-9)
        (1.7726372..., 1.7726369...)
    """
    return 1 + _theta_minus_one(alpha)


def leak(alpha: float, dims: int = 2, *, null: bool = False) -> float:
    r"""The largest share of its weight that a head puts on other pixels than its target.

        leak = 1 - theta(alpha)^{-dims}

    the limit for a pixel far from the borders; near a border there are fewer other pixels and it is smaller. It is
    about `2 dims e^{-alpha}` for a large `alpha`. The error of an output is at most `leak (max - min) sum_h |W^(h)|`,
    max and min of the image. With the null key (`null=True`), whose score is `-alpha / 2`, it is the share of that
    key and of the other pixels,

        leak = 1 - 1 / (theta^dims + e^{-alpha / 2})

    about `e^{-alpha / 2}`. The share of the pixels when an offset ends outside is slightly smaller.

    Computed without cancellation: small leaks have full precision.

    Source: lemma 2 of Cordonnier, Loukas and Jaggi (ICLR 2020) states the limit 0; the rate is derived here.

        >>> from regard.convert import leak
        >>> leak(4.0), leak(40.0), leak(32.0, null=True)
        (0.06942539959..., 1.69934...e-17, 1.1253...e-07)
    """
    if not alpha >= 0 or dims < 1:
        raise CalculusError(
            "There is no such leak.",
            asked=f"leak({alpha}, dims={dims})",
            because="a steepness is not negative, and an image has one axis or more",
            instead="leak(16.0, dims=2)",
        )
    if alpha == 0:
        return 1.0
    log_theta = math.log1p(_theta_minus_one(alpha))
    if not null:
        return -math.expm1(-dims * log_theta)
    others = math.expm1(dims * log_theta) + math.exp(-alpha / 2)
    return others / (1 + others)


def steepness(tolerance: float, dims: int = 2, *, null: bool = False) -> float:
    r"""The smallest `alpha` whose leak is at most `tolerance`.

    The exact root of `leak(alpha, dims) = tolerance`. `ln(2 dims / tolerance)` is always enough, and nearly the same
    for a small tolerance; with the null key it is about `2 ln(1 / tolerance)`.

        >>> import math
        >>> from regard.convert import steepness
        >>> round(steepness(1e-6), 8), round(math.log(4 / 1e-6), 8)
        (15.20180417, 15.20180492)
        >>> round(steepness(1e-6, null=True), 4)
        27.631
    """
    if not 0 < tolerance < 1:
        nothing = tolerance <= 0
        raise CalculusError(
            "No finite steepness leaks nothing." if nothing else "Any steepness will do for that.",
            asked=f"steepness({tolerance})",
            because="every key has a positive weight, however far away" if nothing else "a leak is a share, below 1",
            instead="a tolerance above 0, or alpha=math.inf, which picks pixels" if nothing else "steepness(1e-6)",
        )
    low, high = 0.0, 1.0
    while leak(high, dims, null=null) > tolerance:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if leak(middle, dims, null=null) > tolerance else (low, middle)
    return high


@dataclass(frozen=True)
class Hardness:
    """The `alpha` from which on a soft head equals a hard one in a dtype (see `hardness`)."""

    rounds: float
    vanishes: float
    flushes: float


def hardness(dtype: torch.dtype, dims: int = 2) -> Hardness:
    r"""The steepness from which on a soft head equals a hard one in this dtype.

        rounds     2 dims e^{-alpha} is below half an ulp of 1: the sum of all weights rounds to that of the pixel
        vanishes   e^{-alpha} is below half the smallest number: a neighbour's weight is exactly 0
        flushes    the same where the processor flushes subnormal numbers to zero

    With an integer `alpha` and the square completed, scores are exact as long as they are below `2 / eps`.

        >>> from regard.convert import hardness
        >>> hardness(torch.float32)
        Hardness(rounds=18.0218..., vanishes=103.9720..., flushes=87.3365...)
    """
    if not dtype.is_floating_point:
        raise CalculusError(
            f"{dtype} has no fractions.",
            asked=f"hardness({dtype})",
            because="weights lie between 0 and 1",
            instead="torch.float32, or another floating-point format",
        )
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps  # the smallest subnormal number
    rounds = math.log(2 * dims) - math.log(info.eps / 2)
    return Hardness(rounds, math.log(2) - _log_of_tiny(smallest), -math.log(info.smallest_normal))


def _log_of_tiny(number: float) -> float:
    return math.log2(number) * math.log(2)


def _theta_minus_one(alpha: float) -> float:
    """`theta(alpha) - 1`, without cancellation."""
    if alpha >= math.pi:
        return 2 * sum(math.exp(-alpha * j * j) for j in range(1, 16))
    dual = 2 * sum(math.exp(-(math.pi**2) * j * j / alpha) for j in range(1, 16)) if alpha > 0.01 else 0.0
    return math.sqrt(math.pi / alpha) * (1 + dual) - 1
