"""Numbers that were read off a tensor, with the expression of the arithmetic that was done with them."""

from __future__ import annotations

from collections.abc import Callable


class RecordedNumber(float):
    """A float with an expression: `{3}` in it stands for variable 3 of a recording."""

    expression: str

    def __new__(cls, value: float, expression: str) -> RecordedNumber:
        number = super().__new__(cls, value)
        number.expression = expression
        return number

    def __neg__(self) -> RecordedNumber:
        return RecordedNumber(-float(self), f"-{self.expression}")

    def __abs__(self) -> RecordedNumber:
        return RecordedNumber(abs(float(self)), f"abs({self.expression})")


def _write_value(value: object) -> str:
    if isinstance(value, RecordedNumber):
        return value.expression
    return f"float('{value}')" if value != value or value in (float("inf"), -float("inf")) else repr(value)


def _make_operators(symbol: str, name: str) -> tuple[Callable, Callable]:
    plain = getattr(float, name)
    mirrored = getattr(float, f"__r{name[2:]}")

    def forward(self: RecordedNumber, other: object) -> object:
        value = plain(float(self), other)
        return (
            value
            if value is NotImplemented
            else RecordedNumber(value, f"({self.expression} {symbol} {_write_value(other)})")
        )

    def backward(self: RecordedNumber, other: object) -> object:
        value = mirrored(float(self), other)
        return (
            value
            if value is NotImplemented
            else RecordedNumber(value, f"({_write_value(other)} {symbol} {self.expression})")
        )

    return forward, backward


for _symbol, _name in (("+", "__add__"), ("-", "__sub__"), ("*", "__mul__"), ("/", "__truediv__"), ("**", "__pow__")):
    _forward, _backward = _make_operators(_symbol, _name)
    setattr(RecordedNumber, _name, _forward)
    setattr(RecordedNumber, f"__r{_name[2:]}", _backward)
