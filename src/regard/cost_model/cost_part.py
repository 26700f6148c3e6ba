"""The parts of a cost: what one step of a computation does, in formulas."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import sympy

from regard.cost_model.symbols import Values, fix_differing

ZERO = sympy.Integer(0)


def _add(one: Any, other: Any) -> Any:
    """Field by field."""
    pairs = {f.name: (getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one)}
    return dataclasses.replace(one, **{name: a + b for name, (a, b) in pairs.items() if name != "name"})


def _times(one: Any, factor: Any) -> Any:
    values = {f.name: getattr(one, f.name) for f in dataclasses.fields(one) if f.name != "name"}
    return dataclasses.replace(one, **{name: value * factor for name, value in values.items()})


@dataclass(frozen=True)
class PassCost:
    """What one pass through a part takes.

    Attributes:
        macs: multiply-adds of matrix products and convolutions.
        exponentials: calls of exp that a softmax makes.
        bytes: what is read and written if every operation reads its operands and writes its result once.
        depth: steps on the longest path if every binary operation takes one step and there are processors enough.
    """

    macs: sympy.Expr = ZERO
    exponentials: sympy.Expr = ZERO
    bytes: sympy.Expr = ZERO
    depth: sympy.Expr = ZERO

    def __add__(self, other: PassCost) -> PassCost:
        return _add(self, other)

    def __mul__(self, factor: Any) -> PassCost:
        return _times(self, factor)


@dataclass(frozen=True)
class CostPart:
    """A named step, and its formulas. Names have dots where parts have parts: `block.attention.scores`.

    Attributes:
        parameters: learned numbers; one that is used twice belongs to the first part that uses it.
        forward, backward: the two passes.
        saved: bytes that the forward pass saves for the backward pass, beside parameters and the model's own input.
        pairs: allowed pairs of a query and a key, over all heads and rows.
        normalised: numbers that a norm reads.
    """

    name: str
    parameters: sympy.Expr = ZERO
    forward: PassCost = field(default_factory=PassCost)
    backward: PassCost = field(default_factory=PassCost)
    saved: sympy.Expr = ZERO
    pairs: sympy.Expr = ZERO
    normalised: sympy.Expr = ZERO

    def __add__(self, other: CostPart) -> CostPart:
        return _add(self, other)

    def __mul__(self, factor: Any) -> CostPart:
        return _times(self, factor)

    def fix_differing(self, values: Values, common: Values) -> CostPart:
        """The part with its own number for every symbol that means another number elsewhere."""

        def settle(value: Any) -> Any:
            if isinstance(value, PassCost):
                fields = {f.name: settle(getattr(value, f.name)) for f in dataclasses.fields(value)}
                return dataclasses.replace(value, **fields)
            return value if isinstance(value, str) else fix_differing(sympy.sympify(value), values, common)

        return dataclasses.replace(self, **{f.name: settle(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def with_prefix(self, prefix: str) -> CostPart:
        """The part as a part of another."""
        return dataclasses.replace(self, name=f"{prefix}.{self.name}" if self.name else prefix) if prefix else self


def group_parts(parts: list[CostPart], levels: int | None = None) -> dict[str, CostPart]:
    """Parts of the same name, or the same first `levels` words of it, as one; in the order in which they come."""
    found: dict[str, CostPart] = {}
    for part in parts:
        name = part.name if levels is None else ".".join(part.name.split(".")[:levels])
        found[name] = dataclasses.replace(found[name] + part if name in found else part, name=name)
    return found
