"""Costs against a length: points, and the whole lengths at which one becomes cheaper than another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from regard.caching import lazy_property
from regard.cost_model.cost import QUANTITIES, Cost
from regard.cost_model.symbols import MEANINGS, read_symbol
from regard.errors import CostError, RegardError

# Lengths at which a curve is computed, in each doubling: in a picture with two logarithms most of them lie on lines.
EACH_DOUBLING = 4


@dataclass(frozen=True)
class Crossing:
    """The first whole length from which on another thing is cheaper.

    Attributes:
        length: at this length `before` is no longer the cheaper one.
        before, after: the names of what is cheaper up to here, and from here on.
        value: what `after` costs here.
        equal: whether both cost the same at this very length.
    """

    length: int
    before: str
    after: str
    value: float
    equal: bool

    def __str__(self) -> str:
        if self.equal:
            return f"{self.length:,}: {self.after} costs as much as {self.before}, and less beyond"
        return f"{self.length:,}: from here on {self.after} costs less than {self.before}"


class Curve:
    """A cost at any length, computed once each."""

    def __init__(self, name: str, cost: Cost, keyword: str, of: str) -> None:
        self.name, self.cost, self.keyword, self.of = name, cost, keyword, of
        self.ends: RegardError | None = None  # why it stops before the last length
        self._known: dict[int, int | float | None] = {}

    def at(self, length: int) -> int | float | None:
        """The number at a length; None where the thing does not go so far."""
        if length not in self._known:
            self._known[length] = self._computed(length)
        return self._known[length]

    def _computed(self, length: int) -> int | float | None:
        try:
            return self.cost.at(**{self.keyword: length}).quantity(self.of).value
        except RegardError as refusal:
            self.ends = refusal
            return None


class Curves:
    """Several costs against a length, from `low` to `high`."""

    def __init__(
        self, costs: Mapping[str, Cost], symbol: str = "tokens", of: str = "macs", low: int = 64, high: int = 65536
    ) -> None:
        self.keyword = MEANINGS[str(read_symbol(symbol))][0]
        self.of, self.low, self.high = of, low, high
        if not costs:
            raise CostError("There is no curve to draw.", because="no cost was given", instead='{"softmax": cost(...)}')
        if of not in QUANTITIES:
            raise CostError(
                f"There is no quantity {of!r}.",
                asked=f"of={of!r}",
                because=f"a cost has {', '.join(QUANTITIES)}",
                instead='of="macs"',
            )
        if not 1 <= low < high:
            raise CostError(
                f"No length lies between {low} and {high}.",
                asked=f"low={low}, high={high}",
                because="lengths are whole, at least 1, and go up",
                instead="low=64, high=65536",
            )
        self.curves = [Curve(name, cost, self.keyword, of) for name, cost in costs.items()]
        for curve in self.curves:
            if not self.points(curve):
                refusal = curve.ends
                raise CostError(
                    f"{curve.name} has no {of} to draw.",
                    asked=f"{of} for {self.keyword} from {low:,} to {high:,}",
                    found=refusal.headline if refusal is not None else "it is nothing at every length",
                    because=refusal.because if refusal is not None else "nothing has no logarithm",
                    instead="the other sizes as keywords of cost(...), or another quantity",
                ) from refusal

    @lazy_property
    def lengths(self) -> list[int]:
        """Whole lengths, evenly apart as logarithms, with every power of two among them."""
        first, last = math.floor(math.log2(self.low)), math.ceil(math.log2(self.high))
        steps = range(first * EACH_DOUBLING, last * EACH_DOUBLING + 1)
        inside = {round(2 ** (step / EACH_DOUBLING)) for step in steps}
        return sorted({self.low, self.high, *(length for length in inside if self.low < length < self.high)})

    def points(self, curve: Curve) -> list[tuple[int, int | float]]:
        """Lengths and numbers of a curve, as far as it goes and wherever it is more than nothing."""
        found = [(length, curve.at(length)) for length in self.lengths]
        return [(length, value) for length, value in found if value is not None and value > 0]

    @lazy_property
    def crossings(self) -> list[Crossing]:
        """Where any two curves cross, by bisection on whole lengths; the shortest first.

        Two crossings between neighbouring points of the curves, a fifth of their length apart, cancel and are missed.
        """
        found = []
        for one, other in itertools.combinations(self.curves, 2):
            found += self._between(one, other)
        return sorted(found, key=lambda crossing: (crossing.length, crossing.before, crossing.after))

    def _between(self, one: Curve, other: Curve) -> list[Crossing]:
        found, last, before = [], 0, self.low
        for length in self.lengths:
            sign = _sign(one, other, length)
            if sign is None:
                break
            if sign and last and sign != last:
                at = _first(one, other, before, length, last)
                cheap, dear = (one, other) if sign < 0 else (other, one)
                value = cheap.at(at)
                assert value is not None
                found.append(Crossing(at, dear.name, cheap.name, value, _sign(one, other, at) == 0))
            if sign:
                last, before = sign, length
        return found


def _sign(one: Curve, other: Curve, length: int) -> int | None:
    mine, theirs = one.at(length), other.at(length)
    if mine is None or theirs is None:
        return None
    return (mine > theirs) - (mine < theirs)


def _first(one: Curve, other: Curve, left: int, right: int, sign: int) -> int:
    """The first length at which the difference no longer has this sign; it has at `left` and has not at `right`."""
    while right - left > 1:
        middle = (left + right) // 2
        left, right = (middle, right) if _sign(one, other, middle) == sign else (left, middle)
    return right
