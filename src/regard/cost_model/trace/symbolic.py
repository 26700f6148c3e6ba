"""Symbols for sizes: a few runs at neighbouring sizes, and an expression for every size in them.

The sizes of one run after the other are chosen so that no two symbols are alike: the next size, which is even where
the first is odd, then distinct primes, or multiples where one size divides another. Every size of every tensor is then
recognised from its values in these runs, as a product of symbols, or as a sum of few such products with small
coefficients, and one more run than is needed must agree. Sizes of the input (batch, tokens, rows and columns of an
image) vary with the input, those of the configuration (width, heads, hidden size, vocabulary, layers) by building the
module again. A symbol whose sizes are not recognised, or with which other operations run, stays a number.

Rows and columns that are cut into windows or patches are a case of their own: a formula that holds for whole windows
need not hold for others. It is compared with a run at the next size, and a note says for which sizes it holds. Where
the size asked for is no whole number of windows, the runs have different remainders, and sizes are recognised with
`ceiling(R/w)` and `floor(R/w)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import sympy

from regard.cost_model.symbols import name_size, size_symbol
from regard.cost_model.trace.operation import Operand, Operation
from regard.cost_model.trace.part_names import PartNames
from regard.cost_model.trace.recorder import Trace
from regard.cost_model.trace.size_expressions import recognise_rounded, recognise_size
from regard.cost_model.trace.size_space import ALIGNED, BASE_LAYERS, LAYERS, RAGGED, SizeSpace, SymbolError
from regard.errors import CostError

POINTS = 3  # beside the run at the sizes that were asked for
HELD_OUT = 2  # more runs where rows and columns have remainders
MIN_RUNS = 3  # enough to recognise products of sizes and to check them; sums need one more


@dataclass
class TracedRun:
    """A trace and the names of its parts."""

    trace: Trace
    names: PartNames


@dataclass
class SymbolicTrace:
    """Operations, saved tensors and parameters with expressions for sizes.

    Attributes:
        run: the run at the sizes that were asked for, whose operations have integers.
        operations, saved, parameters: the same with expressions.
        symbols: those that the expressions have.
        deeper: with a symbol for layers, a run with one layer more, in the same expressions.
    """

    run: TracedRun
    operations: list[Operation]
    saved: list[tuple[str, str, Operand]]
    parameters: list[tuple[str, str, tuple[Any, ...]]]
    symbols: list[str]
    deeper: SymbolicTrace | None = None
    notes: list[str] = field(default_factory=list)

    def list_sizes(self) -> list[Any]:
        """In the order of `_list_sizes`."""
        return _list_sizes(self)


Runner = Callable[[dict[str, int]], TracedRun]


class SymbolFinder:
    """Finds as many symbols as the runs of a target allow."""

    def __init__(self, run: Runner, space: SizeSpace) -> None:
        self.space = space
        self._run = run
        self._runs: dict[tuple[Any, ...], TracedRun | CostError] = {}
        self._excluded: dict[str, str] = {}

    def exclude(self, reason: str, symbols: set[str]) -> None:
        """Do without some of these symbols: layers first, then the configuration, then all."""
        names = symbols & {LAYERS} or symbols & self.space.configuration or symbols - {"B"} or symbols
        self._excluded |= dict.fromkeys(names, reason)

    def run(self, sizes: dict[str, int]) -> TracedRun:
        key = tuple(sorted(sizes.items()))
        if key not in self._runs:
            try:
                self._runs[key] = self._run(sizes)
            except CostError as error:
                self._runs[key] = error
        found = self._runs[key]
        if isinstance(found, CostError):
            raise found
        return found

    def find(self) -> SymbolicTrace:
        """The run at the sizes that were asked for, with as many symbols as can be had."""
        real = self.run(self.space.sizes)  # what fails at the sizes that were asked for fails
        reasons = dict(self._excluded)
        active = set(self.space.sizes) - set(self.space.tied) - set(reasons)
        *others, last = self.space.list_remainders()
        for self.space.remainders in others:
            with contextlib.suppress(SymbolError):
                return self._finish(self._fit_any_batch(active), active, reasons)
        self.space.remainders = last
        for attempt in range(5):
            try:
                return self._finish(self._fit_any_batch(active), active, reasons)
            except SymbolError as why:
                reason = str(why)
            if attempt == 0 and (cut := set(last) & active):
                # Rows and columns that are cut are the likeliest reason; the others take many runs to tell apart.
                with contextlib.suppress(SymbolError):
                    made = self._fit_any_batch(active - cut)
                    return self._finish(made, active - cut, reasons | dict.fromkeys(cut, reason))
            if attempt == 0:
                dropped = self._find_single_culprit(active, reasons) or self._find_culprits(active, reasons)
            elif attempt == 1:
                dropped = self._find_joint_culprits(active, reasons) or {LAYERS} & active
            else:
                dropped = active & self.space.configuration or active - {"B"} or active
            reasons |= {name: reason for name in dropped if name not in reasons}
            active = active - dropped
            if not active:
                break
        made = SymbolicTrace(real, real.trace.operations, real.trace.saved, real.trace.parameters, [])
        return self._finish(made, set(), reasons)

    def _finish(self, made: SymbolicTrace, active: set[str], reasons: dict[str, str]) -> SymbolicTrace:
        sizes = self.space.sizes
        made.notes += [
            f"{name_size(name)} stays the number {sizes[name]}: {reasons[name]}"
            for name in sizes
            if name not in active and name in reasons
        ]
        return made

    def _fit_any_batch(self, active: set[str]) -> SymbolicTrace:
        """With a batch of one, which is what most ask for; with two where a single row runs other operations."""
        reason = ""
        for batch in (1, 2) if "B" in active and self.space.sizes["B"] == 1 else (self.space.sizes.get("B", 1),):
            origin = {**self.space.sizes, **({"B": batch} if "B" in self.space.sizes else {})}
            try:
                return self._fit(active, origin)
            except (SymbolError, CostError) as why:
                reason = str(why) if isinstance(why, SymbolError) else f"another size fails ({_first_line(why)})"
        raise SymbolError(reason)

    def _find_single_culprit(self, active: set[str], reasons: dict[str, str]) -> set[str]:
        """The last symbol without which all others can be had: one that crosses a threshold, alone or with others.

        A few runs, where looking at each symbol by itself and then at all together takes several for each.
        """
        origin = self._find_joint_origin(active)
        for name in [each for each in reversed(self.space.sizes) if each in active and each != LAYERS]:
            with contextlib.suppress(SymbolError, CostError):
                self._recognise([origin, *self.space.points(active - {name}, POINTS)], active - {name})
                self._find_culprits(active, reasons, [name])  # the reason, where it has one by itself
                return {name}
        return set()

    def _find_joint_origin(self, active: set[str]) -> dict[str, int]:
        """The sizes that were asked for, with as many layers and batch rows as other points have at least."""
        origin = {**self.space.sizes, **({LAYERS: BASE_LAYERS} if LAYERS in active else {})}
        return {**origin, "B": max(2, origin["B"])} if "B" in active else origin

    def _find_culprits(self, active: set[str], reasons: dict[str, str], names: list[str] | None = None) -> set[str]:
        """Symbols with which alone, and with the sizes that are multiples of them, other operations run."""
        names = [each for each in self.space.sizes if each in active and each != LAYERS] if names is None else names
        found: set[str] = set()
        origin = {**self.space.sizes, **({"B": max(2, self.space.sizes["B"])} if "B" in active else {})}
        for name in names:
            try:
                points = self.space.points({name}, 2)
                if "B" in active and name != "B":
                    points = [{**point, "B": origin["B"]} for point in points]
                self._recognise([origin, *points], {name}, quick=True)
            except (SymbolError, CostError) as why:
                found.add(name)
                reasons[name] = str(why) if isinstance(why, SymbolError) else f"another size fails ({_first_line(why)})"
        return found

    def _find_joint_culprits(self, active: set[str], reasons: dict[str, str]) -> set[str]:
        """Symbols that change the operations together with others, which are added one after the other."""
        found: set[str] = set()
        layers, origin = {LAYERS} & active, self._find_joint_origin(active)
        for name in [each for each in self.space.sizes if each in active and each != LAYERS]:
            taken = active - found - set(list(self.space.sizes)[list(self.space.sizes).index(name) + 1 :])
            try:
                for point in self.space.points(taken | layers, POINTS):
                    _check_same(self.run(origin).trace, self.run(point).trace, point, taken, self.space.sizes)
            except (SymbolError, CostError) as why:
                found.add(name)
                reasons[name] = str(why) if isinstance(why, SymbolError) else f"another size fails ({_first_line(why)})"
        return found

    def _fit(self, active: set[str], origin: dict[str, int]) -> SymbolicTrace:
        if LAYERS in active:
            origin = {**origin, LAYERS: BASE_LAYERS}
        points = [origin, *self.space.points(active, POINTS)]
        made = self._recognise(points, active)
        made.notes = self._check_remainders(made, points[0], active)
        if LAYERS in active:
            made.deeper = self._deepen(made, points[1:])
        return made

    def _check_remainders(self, made: SymbolicTrace, origin: dict[str, int], active: set[str]) -> list[str]:
        """Compare formulas in rows and columns that are cut with runs of other remainders; notes on where they hold."""
        remainders = {name: each for name, each in self.space.remainders.items() if name in active}
        aligned = [name for name, each in remainders.items() if each == ALIGNED]
        ragged = [name for name, each in remainders.items() if each == RAGGED]
        if len(aligned) < len(remainders):
            for point in self.space.points(active, HELD_OUT, skip=POINTS):
                self._compare(made, point, active)
        if aligned:
            point = origin | {name: origin[name] + 1 for name in aligned}
            point |= {name: point[other] for name, other in self.space.tied.items()}
            try:
                self._compare(made, point, active)
            except CostError:  # no other size is accepted
                aligned = []
            except SymbolError:
                aligned += [name for name, other in self.space.tied.items() if other in aligned]
            else:
                aligned = []
        return [
            f"formulas hold for {' and '.join(map(name_size, names))} that are {what} {self.space.describe_unit(names)}"
            for names, what in ((aligned, "multiples of"), (ragged, "no multiples of"))
            if names
        ]

    def _compare(self, made: SymbolicTrace, point: dict[str, int], active: set[str]) -> None:
        """Refuse expressions that a run at other sizes does not have."""
        trace = self.run(point).trace
        _check_same(made.run.trace, trace, point, active, self.space.sizes)
        numbers: Any = {size_symbol(name): sympy.Integer(size) for name, size in point.items()}
        expressions = made.list_sizes()
        values = {each: sympy.sympify(each).xreplace(numbers) for each in dict.fromkeys(expressions)}
        for expression, size in zip(expressions, _list_sizes(trace), strict=True):
            if values[expression] != size:
                raise SymbolError(f"a size of {size} is not {expression}")

    def _recognise(self, points: list[dict[str, int]], active: set[str], quick: bool = False) -> SymbolicTrace:
        base = self.run(points[0])
        runs = [base]
        expressions: list[sympy.Expr | None] = []
        columns: list[tuple[int, ...]] = []
        for point in points[1:]:
            runs.append(self.run(point))
            _check_same(base.trace, runs[-1].trace, point, active, self.space.sizes)
            columns = list(zip(*(_list_sizes(each.trace) for each in runs), strict=True))
            if len(runs) == MIN_RUNS and len(runs) < len(points) and not self.space.roundings(active, points):
                expressions = self._express(columns, points[:MIN_RUNS], active, with_sums=False)
                if None not in expressions:
                    break
        else:
            expressions = self._express(columns, points, active, with_sums=True)
        unknown = next((column[0] for column, each in zip(columns, expressions, strict=True) if each is None), None)
        if unknown is not None:
            raise SymbolError(f"a size of {unknown} depends on it in no simple way" if quick else
                              f"a size of {unknown} is no simple expression of the others")  # fmt: skip
        found = iter(expressions)
        operations = []
        flags = _merge_repeated([run.trace for run in runs])
        for operation, repeated in zip(base.trace.operations, flags, strict=True):
            operations.append(operation.with_sizes([next(found) for _ in operation.sizes()], repeated))
        saved = [
            (path, maker, one._replace(shape=tuple(next(found) for _ in one.shape), storage=0))
            for path, maker, one in base.trace.saved
        ]
        parameters = [(path, name, tuple(next(found) for _ in shape)) for path, name, shape in base.trace.parameters]
        symbols = [name for name in self.space.sizes if name in active]
        return SymbolicTrace(base, operations, saved, parameters, symbols)

    def _express(
        self, columns: list[tuple[int, ...]], points: list[dict[str, int]], active: set[str], with_sums: bool
    ) -> list[sympy.Expr | None]:
        """An expression for every size; None for one that is not recognised."""
        variables, roundings = self.space.variables(active, points), self.space.roundings(active, points)
        known = {column: recognise_size(column, variables, with_sums) for column in dict.fromkeys(columns)}
        if roundings:
            plain = self.space.variables(active - set(roundings), points)
            for column in known:
                rounded = recognise_rounded(column, plain, list(roundings.values()))
                known[column] = known[column] if rounded is None else rounded
        return [known[column] for column in columns]

    def _deepen(self, made: SymbolicTrace, points: list[dict[str, int]]) -> SymbolicTrace:
        """A run with one layer more, whose operations must be among those of the layers before.

        They are found by their sizes, so at a point where no two different expressions have the same value.
        """
        for point in points:
            shallow = self.run(point)
            operations = _index_unique(
                (_identify(each, shallow.names), symbolic.sizes(), symbolic)
                for each, symbolic in zip(shallow.trace.operations, made.operations, strict=True)
            )
            saved = _index_unique(
                ((shallow.names.find_part(path, ""), maker, one.shape, one.item), symbolic.shape, symbolic)
                for (path, maker, one), (*_, symbolic) in zip(shallow.trace.saved, made.saved, strict=True)
            )
            parameters = _index_unique(
                ((shallow.names.find_part(path, ""), name, shape), symbolic, symbolic)
                for (path, name, shape), (*_, symbolic) in zip(shallow.trace.parameters, made.parameters, strict=True)
            )
            if operations is None or saved is None or parameters is None:
                continue
            deep = self.run({**point, LAYERS: BASE_LAYERS + 1})
            try:
                return SymbolicTrace(
                    deep,
                    [operations[_identify(each, deep.names)] for each in deep.trace.operations],
                    [
                        (path, maker, saved[deep.names.find_part(path, ""), maker, one.shape, one.item])
                        for path, maker, one in deep.trace.saved
                    ],
                    [
                        (path, name, parameters[deep.names.find_part(path, ""), name, shape])
                        for path, name, shape in deep.trace.parameters
                    ],
                    made.symbols,
                )
            except KeyError as missing:
                raise SymbolError("a layer more runs other operations") from missing
        raise SymbolError("sizes of different meaning are equal at every size that was tried")


def _index_unique(entries: Iterable[tuple[Any, Any, Any]]) -> dict[Any, Any] | None:
    """Values by key, or None where one key has values of different expressions."""
    found: dict[Any, tuple[Any, Any]] = {}
    for key, expressions, value in entries:
        expressions = list(expressions)
        if found.setdefault(key, (expressions, value))[0] != expressions:
            return None
    return {key: value for key, (_, value) in found.items()}


def _first_line(error: CostError) -> str:
    return (error.found or error.because).splitlines()[0][:160]


def _identify(operation: Operation, names: PartNames) -> tuple[Any, ...]:
    """The operation without the index of its layer."""
    name, path, *rest = operation.structure()
    return name, names.find_part(path, ""), *rest, tuple(operation.sizes())


def _check_same(one: Trace, other: Trace, point: dict[str, int], active: set[str], sizes: dict[str, int]) -> None:
    """Refuse runs of which one executed other operations."""
    changed = [name for name in sizes if name in active and point[name] != sizes[name]]
    when = "with " + ", ".join(f"{name_size(name)} {point[name]}" for name in changed)
    if len(one.operations) != len(other.operations) or len(one.saved) != len(other.saved):
        raise SymbolError(f"{when} other operations run")
    if len(one.parameters) != len(other.parameters):
        raise SymbolError(f"{when} it has other parameters")
    if any(len(mine[-1].shape) != len(theirs[-1].shape) for mine, theirs in zip(one.saved, other.saved, strict=True)):
        raise SymbolError(f"{when} other tensors are saved")
    for mine, theirs in zip(one.operations, other.operations, strict=True):
        if mine.structure() != theirs.structure():
            raise SymbolError(
                f"{when} other operations run, the first in {mine.path or 'the module itself'}: {theirs.name}"
            )


def _list_sizes(trace: Trace | SymbolicTrace) -> list[Any]:
    found = [size for operation in trace.operations for size in operation.sizes()]
    found += [size for *_, operand in trace.saved for size in operand.shape]
    return found + [size for *_, shape in trace.parameters for size in shape]


def _merge_repeated(traces: list[Trace]) -> list[list[tuple[bool, ...]]]:
    """Which axes have stride 0 in any of the runs: an axis of size one does not tell."""
    found = []
    for several in zip(*(trace.operations for trace in traces), strict=True):
        operands = zip(*([*each.reads.values(), *each.writes] for each in several), strict=True)
        found.append([tuple(map(any, zip(*(one.repeated for one in same), strict=True))) for same in operands])
    return found
