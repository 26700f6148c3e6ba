"""The symbols of a target, and the sizes of the runs from which its formulas are found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import sympy

from regard.cost_model.symbols import name_size, size_symbol

LAYERS = "L"
BASE_LAYERS = 2  # with which symbols are found; one more run has a layer more
GRID = ("R", "W")  # rows and columns of a grid, which has 2 n - 1 relative positions along each
# Which remainders by the window, patch or stride the rows and columns of the runs have: none, some, or any.
ALIGNED, RAGGED, ANY = "aligned", "ragged", "any"

Variable = tuple[sympy.Expr, list[int]]  # an expression in the symbols, and its values at some points


class SymbolError(Exception):
    """Why a symbol stays a number."""


@dataclass
class SizeSpace:
    """The symbols of a target.

    Attributes:
        sizes: the number of every symbol: of the input, then of the configuration.
        configuration: those that need the module to be built again.
        multiples, at_least: as in `adapters.rebuild.Configuration`.
        limits: the largest number of a symbol.
        tied: symbols that are always as large as another: the columns of a square image.
        remainders: for rows and columns that are cut into windows or patches, which of their remainders the runs have:
            `ALIGNED`, `RAGGED` or `ANY`.
    """

    sizes: dict[str, int]
    configuration: set[str] = field(default_factory=set)
    multiples: dict[str, tuple[tuple[str, ...], int]] = field(default_factory=dict)
    at_least: dict[str, str] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    remainders: dict[str, str] = field(default_factory=dict)

    def points(self, active: set[str], count: int, skip: int = 0) -> list[dict[str, int]]:
        """Sizes of `count` runs, in which every active symbol has another value each time.

        skip: so many others come first, which have other remainders.
        """
        found = [dict(self.sizes) for _ in range(count + skip)]
        chosen: list[tuple[int, ...]] = []
        for name in self._in_order():
            if name in self.tied or name == LAYERS:
                continue
            of, step = self._multiple(name)
            units = [step * math.prod(point[other] for other in of) for point in found]
            if name in active:
                floor = [point.get(self.at_least.get(name, ""), 0) for point in found]
                values = self._choose(name, units, floor, chosen)
            elif of:
                values = [each * max(1, self.sizes[name] // self._unit(name)) for each in units]
            else:
                values = [self.sizes[name]] * len(found)
            for point, value in zip(found, values, strict=True):
                point[name] = value
        for point in found:
            point.update({name: point[other] for name, other in self.tied.items()})
            if LAYERS in active:
                point[LAYERS] = BASE_LAYERS
        return found[skip:]

    def variables(self, active: set[str], points: list[dict[str, int]]) -> list[Variable]:
        """What sizes are made of: expressions in the symbols, and their values at some points."""
        found: list[Variable] = []
        for name in self._in_order():
            if name in self.tied or name == LAYERS or name not in active:
                continue  # what is not active is a multiple of others, which are recognised themselves
            of, _ = self._multiple(name)
            divisors = [other for other in of if other in active]
            quotient = size_symbol(name) / sympy.Mul(*(size_symbol(other) for other in divisors))
            units = [math.prod(point[other] for other in divisors) for point in points]
            values = [point[name] // unit for point, unit in zip(points, units, strict=True)]
            if divisors and any(point[name] % unit for point, unit in zip(points, units, strict=True)):
                found.append((size_symbol(name), [point[name] for point in points]))
                quotient = sympy.floor(quotient)
            found.append((quotient, values))
            if name in GRID:
                found.append((2 * quotient - 1, [2 * value - 1 for value in values]))
        return found

    # Rows and columns that are cut into windows or patches

    def list_remainders(self) -> list[dict[str, str]]:
        """Which remainders the runs may have, for all rows and columns that are cut; those that say most come first.

        A size that is a whole number of windows has the shortest formulas among others that are. Another one is
        compared with sizes of all remainders, or with those that are padded too.
        """
        cut = [name for name in self.sizes if name in GRID and name not in self.tied and self._unit(name) > 1]
        own = {name: RAGGED if self.sizes[name] % self._unit(name) else ALIGNED for name in cut}
        if RAGGED not in own.values():
            return [own]
        every = [dict(zip(cut, each, strict=True)) for each in itertools.product(*((ANY, own[name]) for name in cut))]
        return sorted(every, key=lambda each: sum(one != ANY for one in each.values()))

    def roundings(self, active: set[str], points: list[dict[str, int]]) -> dict[str, list[Variable]]:
        """For rows and columns of any remainder, how many windows or patches they have, whole or cut."""
        found: dict[str, list[Variable]] = {}
        for name, mode in self.remainders.items():
            of, step = self._multiple(name)
            if name in active and mode != ALIGNED and not of:
                symbol, sides = size_symbol(name), [point[name] for point in points]
                found[name] = [(symbol, sides)]
                for each in (each for each in range(2, step + 1) if step % each == 0):
                    found[name].append((sympy.ceiling(symbol / each), [-(-side // each) for side in sides]))
                    found[name].append((sympy.floor(symbol / each), [side // each for side in sides]))
        return found

    def describe_unit(self, names: list[str]) -> str:
        """What rows and columns are cut into, in pixels or tokens."""
        units = []
        for name in names:
            of, step = self._multiple(self.tied.get(name, name))
            units.append("".join(f"{each} = {self.sizes[each]}" for each in of) if of else str(step))
        return " and ".join(dict.fromkeys(units))

    def _unit(self, name: str) -> int:
        of, step = self._multiple(name)
        return step * math.prod(self.sizes[other] for other in of)

    def _find_remainder(self, name: str, unit: int, index: int) -> int:
        """None at first, where it may be none; then one, one less than the unit, and others."""
        mode = self.remainders.get(name, ALIGNED)
        if unit == 1 or mode == ALIGNED or (mode == ANY and index == 0):
            return 0
        index = index - 1 if mode == ANY else index
        others = [1, unit - 1, unit // 2, unit // 3 + 1]
        return others[(index + GRID.index(name)) % len(others)] % unit or 1

    def _multiple(self, name: str) -> tuple[tuple[str, ...], int]:
        of, step = self.multiples.get(name, ((), 1))
        return tuple(other for other in of if other in self.sizes), step

    def _in_order(self) -> list[str]:
        """Symbols after those that they are multiples of, or at least as large as."""
        order: list[str] = []

        def add(name: str) -> None:
            if name not in order and name in self.sizes:
                for other in (*self.multiples.get(name, ((), 1))[0], self.at_least.get(name, name)):
                    if other != name:
                        add(other)
                order.append(name)

        for name in sorted(self.sizes, key=lambda each: self.sizes[each]):
            add(name)
        return order

    def _choose(self, name: str, units: list[int], floor: list[int], chosen: list[tuple[int, ...]]) -> list[int]:
        """Multiples of the units: by the next number, which is even where the size is odd, then by primes.

        They rise in another proportion than those of every other symbol: `D - 6` would pass for `E` where both rise by
        1, 5 and 7.
        """
        own = self.sizes[name] // self._unit(name)
        limit = self.limits.get(name, math.inf)
        upward = max(units) * (own + 60) <= limit
        next_to = (4 if name == "B" and own == 1 else own + 1) if upward else own - 1
        primes = itertools.islice(_primes_near(max(own, 2) if upward else own, upward), len(units) + 12)
        fitting = [
            each
            for each in dict.fromkeys((next_to, *primes))
            if min(units) * each >= max(max(floor), 1) and max(units) * each <= limit
        ]
        rests = [self._find_remainder(name, unit, index) for index, unit in enumerate(units)]
        first = (own, 2) if name == "B" and own == 1 else (own,)  # formulas are found with one batch row or with two
        orders = itertools.permutations(fitting[: len(units) + 6], len(units))
        for counts in sorted(orders, key=lambda each: (sum(each[:2]), sum(each))):  # large sizes cross thresholds
            rises = [tuple(count - start for count in counts) for start in first]
            if len(counts) < 2 or not any(_are_proportional(mine, other) for mine in rises for other in chosen):
                chosen += rises
                return [unit * count + rest for unit, count, rest in zip(units, counts, rests, strict=True)]
        raise SymbolError(f"{name_size(name)} has too few other sizes up to {limit}")


def _are_proportional(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether the first two numbers are, which are all that the fewest runs have."""
    return one[0] * other[1] == one[1] * other[0]


def _primes_near(start: int, upward: bool) -> Iterator[int]:
    numbers = range(start + 1, start + 10_000) if upward else range(start - 1, 1, -1)
    return (each for each in numbers if all(each % factor for factor in range(2, math.isqrt(each) + 1)))
