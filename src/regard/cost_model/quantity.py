"""A number and the formula it comes from."""

from __future__ import annotations

from typing import Any

import sympy

from regard.caching import lazy_property
from regard.cost_model.symbols import Values, find_common_values, fix_differing, substitute_numbers
from regard.errors import CostError


class Quantity:
    """A number and the formula it comes from. It compares, adds and prints as the number.

    >>> from regard import Attention, cost
    >>> macs = cost(Attention(), tokens=256, dim=64).macs
    >>> macs.formula
    2*B*H*N**2*d
    >>> macs.value, macs == 2 * 256**2 * 64, f"{macs:,}"
    (8388608, True, '8,388,608')
    """

    def __init__(self, formula: Any, values: Values | None = None, unit: str = "") -> None:
        self.formula: sympy.Expr = sympy.sympify(formula)
        self.values: dict[sympy.Symbol, Any] = dict(values or {})
        self.unit = unit

    @lazy_property
    def value(self) -> int | float:
        """The number: an `int` wherever it is whole."""
        number = substitute_numbers(self.formula, self.values)
        if number.free_symbols:
            missing = ", ".join(sorted(map(str, number.free_symbols)))
            raise CostError(
                "A formula has no number yet.",
                asked=f"the value of {self.formula}",
                because=f"nothing says how large {missing} is",
                instead="the sizes as keywords of cost(...), or .formula",
            )
        number = sympy.simplify(number) if not number.is_number else number
        whole = sympy.Integer(number) if number.is_integer else None
        return int(whole) if whole is not None else float(number)

    @property
    def known(self) -> bool:
        """Whether every symbol has a number."""
        return all(symbol in self.values for symbol in self.formula.free_symbols)

    def at(self, values: Values) -> Quantity:
        """The same formula with other numbers."""
        return Quantity(self.formula, {**self.values, **values}, self.unit)

    def _joined(self, other: Any, operate: Any) -> Quantity:
        if not isinstance(other, Quantity):
            return Quantity(operate(self.formula, sympy.sympify(other)), self.values, self.unit)
        common = find_common_values(self.values, other.values)
        mine, theirs = (
            fix_differing(self.formula, self.values, common),
            fix_differing(other.formula, other.values, common),
        )
        return Quantity(operate(mine, theirs), common, self.unit)

    def __add__(self, other: Any) -> Quantity:
        return self._joined(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> Quantity:
        return self._joined(other, lambda a, b: a - b)

    def __mul__(self, other: Any) -> Quantity:
        return self._joined(other, lambda a, b: a * b)

    def __truediv__(self, other: Any) -> Quantity:
        return self._joined(other, lambda a, b: sympy.cancel(a / b))

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: Any) -> Quantity:
        return Quantity(other) - self

    def __rtruediv__(self, other: Any) -> Quantity:
        return Quantity(other) / self

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __eq__(self, other: object) -> bool:
        return self.value == (other.value if isinstance(other, Quantity) else other)

    def __lt__(self, other: Any) -> bool:
        return self.value < _number(other)

    def __le__(self, other: Any) -> bool:
        return self.value <= _number(other)

    def __gt__(self, other: Any) -> bool:
        return self.value > _number(other)

    def __ge__(self, other: Any) -> bool:
        return self.value >= _number(other)

    def __hash__(self) -> int:
        return hash(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __format__(self, how: str) -> str:
        return format(self.value, how)

    def __repr__(self) -> str:
        if not self.formula.free_symbols:
            return f"{self.value:,}"
        # A formula without a number is shown as it is, not refused: a notebook shows every value.
        return f"{self.value:,} = {self.formula}" if self.known else str(self.formula)


def _number(other: Any) -> Any:
    return other.value if isinstance(other, Quantity) else other
