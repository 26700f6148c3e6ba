"""Letters for sizes: a few runs at nearby sizes, and a polynomial for every size in them.

With the sizes a run was asked for as origin and `x`, `y`, ... the distances to them, every size of every tensor is

    s = s0 + sum_x (a_x x + b_x x^2) + sum over two and more letters of c x y ...

which one more run along each letter and one for each set of letters determine, exactly, in fractions; where squares are
needed, a second run along each letter. Another run, in which all letters have other values, must then have the sizes
that are foretold. A letter for which it has not, or with which other operations run, stays a number.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import sympy

from regard.adapters.example_inputs import ExampleInputs
from regard.cost_model.letters import MEANINGS, letter
from regard.cost_model.trace.operation import Operand, Operation
from regard.cost_model.trace.recording import Trace
from regard.errors import CostError

Sizes = dict[str, int]
Runner = Callable[[Sizes], Trace]
# What must agree where operations do not: multiply-adds, exponentials, pairs, normalised numbers.
Totals = Callable[[list[Operation]], tuple[sympy.Expr, ...]]


@dataclass
class Fit:
    """Operations and kept tensors with formulas for sizes.

    Attributes:
        trace: the run at the origin, whose operations have whole numbers.
        operations, kept: the same with formulas.
        letters: those that the formulas have, and `origin`, the numbers they were read off at.
    """

    trace: Trace
    operations: list[Operation]
    kept: list[tuple[str, str, Operand]]
    letters: list[str]
    origin: Sizes
    notes: list[str] = field(default_factory=list)


class Unfit(Exception):
    """Why a letter stays a number."""


def fitted(run: Runner, inputs: ExampleInputs, totals: Totals) -> Fit:
    """A run at the sizes that were asked for, with as many letters as can be had."""
    sizes, letters = inputs.sizes, inputs.symbols
    runs: dict[tuple[int, ...], Any] = {}

    def remembered(at: Sizes) -> Trace:
        key = tuple(at.values())
        if key not in runs:
            try:
                runs[key] = run(at)
            except CostError as error:
                runs[key] = error
        if isinstance(runs[key], CostError):
            raise runs[key]
        return runs[key]

    asked = remembered(sizes)
    notes: list[str] = []
    origin, axes, reasons = dict(sizes), {}, {}
    for name in letters:
        try:
            axes[name] = _axis(remembered, origin, name, inputs)
        except Unfit as why:
            reasons[name] = str(why)
            if name == "B" and sizes["B"] == 1:
                # One row of a batch does without some copies, so that letters are read off at two rows.
                with contextlib.suppress(Unfit, CostError):
                    axes[name] = _axis(remembered, {**sizes, "B": 2}, name, inputs)
                    origin = {**sizes, "B": 2}
    for chosen in _subsets(list(axes)):
        at = origin if "B" in chosen else dict(sizes)
        try:
            fit = _solved(remembered, at, {name: axes[name] for name in chosen})
            if at != sizes:
                _check_single(fit, asked, sizes, totals)
                notes.append("bytes and depth are those of a batch of two or more: one row does without some copies")
        except Unfit as why:
            reasons |= {name: str(why) for name in axes if name not in reasons}
            continue
        fit.notes = notes + [_stays(name, sizes, reasons[name]) for name in letters if name not in chosen]
        return fit
    raise AssertionError("a run without letters is a fit")


def _stays(name: str, sizes: Sizes, why: str) -> str:
    return f"{MEANINGS[name][0]} stays the number {sizes[name]}: {why}"


def _subsets(names: list[str]) -> Iterable[tuple[str, ...]]:
    """All letters first, then fewer; the batch is the last to be given up."""
    for size in range(len(names), -1, -1):
        yield from sorted(combinations(names, size), key=lambda chosen: "B" not in chosen)


def _axis(run: Runner, origin: Sizes, name: str, inputs: ExampleInputs) -> list[int]:
    """Four values of a letter, the first of them the origin's, with which the same operations run."""
    base = run(origin)
    step, limit = inputs.steps.get(name, 1), max(inputs.limits.get(name, math.inf), origin[name])
    why = "it is made for no other size"
    for sign in (1, -1):
        values = [origin[name] + sign * step * count for count in range(4)]
        if values[-1] < 1 or values[-1] > limit:
            continue
        try:
            _same(base, run({**origin, name: values[1]}), f"with {values[1]}")
            return values
        except CostError as error:
            why = f"with {values[1]} it fails ({_reason(error)})"
    raise Unfit(why)


def _reason(error: CostError) -> str:
    return (error.found or error.headline).splitlines()[0][:160]


def _same(one: Trace, other: Trace, when: str) -> None:
    """Refuse runs of which one did other operations."""
    if len(one.operations) != len(other.operations) or len(one.kept) != len(other.kept):
        raise Unfit(f"{when} other operations run")
    if any(len(mine[-1].shape) != len(theirs[-1].shape) for mine, theirs in zip(one.kept, other.kept, strict=True)):
        raise Unfit(f"{when} other tensors are kept")
    for mine, theirs in zip(one.operations, other.operations, strict=True):
        if mine.skeleton() != theirs.skeleton():
            raise Unfit(f"{when} other operations run, the first in {mine.path or 'the module itself'}: {theirs.name}")


# Solving


def _vector(trace: Trace) -> list[int]:
    found = [size for operation in trace.operations for size in operation.sizes()]
    return found + [size for *_, operand in trace.kept for size in operand.shape]


def _solved(run: Runner, origin: Sizes, axes: dict[str, list[int]]) -> Fit:
    """Formulas in the letters of `axes`, tested by one more run: straight ones first, then such with squares."""
    base = run(origin)
    names = list(axes)
    groups = [chosen for size in range(2, len(names) + 1) for chosen in combinations(names, size)]

    def vector(point: Sizes) -> Trace:
        try:
            made = run(point)
        except CostError as error:
            raise Unfit(f"with {_told(point, names)} it fails ({_reason(error)})") from error
        _same(base, made, f"with {_told(point, names)}")
        return made

    near = [vector({**origin, name: axes[name][1]}) for name in names]
    mixed = [vector({**origin, **{name: axes[name][1] for name in chosen}}) for chosen in groups]
    test = [vector({**origin, **{name: axes[name][3] for name in names}})] if names else []
    traces = [base, *near, *mixed, *test]
    solved = _columns(traces, names, origin, axes, groups, squares=False)
    if solved is None:
        far = [vector({**origin, name: axes[name][2]}) for name in names]
        traces = [base, *near, *far, *mixed, *test]
        solved = _columns(traces, names, origin, axes, groups, squares=True)
    if solved is None:
        raise Unfit(f"sizes grow with {' and '.join(MEANINGS[name][0] for name in names)} in no simple way")
    found, operations = iter(solved), []
    for operation, flags in zip(base.operations, _repeated(traces), strict=True):
        operations.append(operation.with_sizes([next(found) for _ in operation.sizes()], flags))
    kept = [(path, by, one._replace(shape=tuple(next(found) for _ in one.shape))) for path, by, one in base.kept]
    return Fit(base, operations, kept, names, origin)


def _columns(
    traces: list[Trace],
    names: list[str],
    origin: Sizes,
    axes: dict[str, list[int]],
    groups: list[tuple[str, ...]],
    squares: bool,
) -> list[sympy.Expr] | None:
    """A formula for every size of the first run, or none if one of them is foretold wrong."""
    table = np.array([_vector(trace) for trace in traces], dtype=np.int64)
    columns, which = np.unique(table, axis=1, return_inverse=True)
    found = [_polynomial(column, names, origin, axes, groups, squares) for column in columns.T.tolist()]
    if any(each is None for each in found):
        return None
    return [found[number] for number in which.ravel().tolist()]  # type: ignore[misc]


def _told(point: Sizes, names: list[str]) -> str:
    return ", ".join(f"{MEANINGS[name][0]} {point[name]}" for name in names)


def _repeated(traces: list[Trace]) -> list[list[tuple[bool, ...]]]:
    """Which axes are the same memory again, in any of the runs: an axis of one does not tell."""
    found = []
    for several in zip(*(trace.operations for trace in traces), strict=True):
        operands = zip(*([*each.reads.values(), *each.writes] for each in several), strict=True)
        found.append([tuple(map(any, zip(*(one.repeated for one in same), strict=True))) for same in operands])
    return found


def _check_single(fit: Fit, asked: Trace, sizes: Sizes, totals: Totals) -> None:
    """Formulas that were read off at two rows must have the products of one."""
    values: Any = {letter(name): sizes[name] for name in fit.letters}
    foretold = [each.subs(values) for each in totals(fit.operations)]
    if foretold != list(totals(asked.operations)):
        raise Unfit("one row is read in another way than several")


def _polynomial(
    column: list[int],
    names: list[str],
    origin: Sizes,
    axes: dict[str, list[int]],
    groups: list[tuple[str, ...]],
    squares: bool,
) -> sympy.Expr | None:
    """The formula of one size from its values at all points, the last of which is the test."""
    start = column[0]
    if all(value == start for value in column):
        return sympy.Integer(start)
    values = iter(column[1:])
    near = {name: Fraction(next(values) - start) for name in names}
    far = {name: Fraction(next(values) - start) for name in names} if squares else {}
    slopes: dict[str, tuple[Fraction, Fraction]] = {}
    for name in names:
        x, y = (Fraction(axes[name][place] - origin[name]) for place in (1, 2))
        bend = (near[name] / x - far[name] / y) / (x - y) if squares else Fraction(0)
        slopes[name] = near[name] / x - bend * x, bend
    mixed: dict[tuple[str, ...], Fraction] = {}

    def at(distance: dict[str, Fraction]) -> Fraction:
        total = Fraction(start)
        for name, x in distance.items():
            total += slopes[name][0] * x + slopes[name][1] * x * x
        for chosen, factor in mixed.items():
            if all(name in distance for name in chosen):
                for name in chosen:
                    factor = factor * distance[name]
                total += factor
        return total

    for chosen in groups:
        distance = {name: Fraction(axes[name][1] - origin[name]) for name in chosen}
        missing = next(values) - at(distance)
        for x in distance.values():
            missing /= x
        mixed[chosen] = missing
    if at({name: Fraction(axes[name][3] - origin[name]) for name in names}) != next(values):
        return None
    made: sympy.Expr = sympy.Integer(start)
    distances = {name: letter(name) - origin[name] for name in names}
    for name, (slope, bend) in slopes.items():
        made += _rational(slope) * distances[name] + _rational(bend) * distances[name] ** 2
    for chosen, factor in mixed.items():
        made += _rational(factor) * sympy.Mul(*(distances[name] for name in chosen))
    return sympy.expand(made)


def _rational(number: Fraction) -> sympy.Expr:
    return sympy.Integer(number.numerator) / sympy.Integer(number.denominator)
