"""Numbers that were read off a tensor and remember the arithmetic that was done with them."""

from __future__ import annotations

from collections.abc import Callable


class Number(float):
    """A float with an expression: `{3}` in it stands for variable 3 of a recording."""

    expression: str

    def __new__(cls, value: float, expression: str) -> Number:
        number = super().__new__(cls, value)
        number.expression = expression
        return number

    def __neg__(self) -> Number:
        return Number(-float(self), f"-{self.expression}")

    def __abs__(self) -> Number:
        return Number(abs(float(self)), f"abs({self.expression})")


def _written(value: object) -> str:
    if isinstance(value, Number):
        return value.expression
    return f"float('{value}')" if value != value or value in (float("inf"), -float("inf")) else repr(value)


def _operator(symbol: str, name: str) -> tuple[Callable, Callable]:
    plain = getattr(float, name)
    mirrored = getattr(float, f"__r{name[2:]}")

    def forward(self: Number, other: object) -> object:
        value = plain(float(self), other)
        return value if value is NotImplemented else Number(value, f"({self.expression} {symbol} {_written(other)})")

    def backward(self: Number, other: object) -> object:
        value = mirrored(float(self), other)
        return value if value is NotImplemented else Number(value, f"({_written(other)} {symbol} {self.expression})")

    return forward, backward


for _symbol, _name in (("+", "__add__"), ("-", "__sub__"), ("*", "__mul__"), ("/", "__truediv__"), ("**", "__pow__")):
    _forward, _backward = _operator(_symbol, _name)
    setattr(Number, _name, _forward)
    setattr(Number, f"__r{_name[2:]}", _backward)
