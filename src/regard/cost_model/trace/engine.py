"""The cost of any module or function from a trace of what it runs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import sympy

from regard.adapters.example_inputs import ExampleInputs
from regard.adapters.fake_copies import TracedTarget, first_line
from regard.adapters.rebuild import Configuration, find_configuration
from regard.cost_model.cost_part import ZERO, CostPart, PassCost
from regard.cost_model.run_mode import RunMode
from regard.cost_model.sizes import Breakdown, Sizes
from regard.cost_model.symbols import Values, name_size, size_symbol, substitute_numbers
from regard.cost_model.trace.critical_path import find_critical_path
from regard.cost_model.trace.inputs import make_example_inputs
from regard.cost_model.trace.operator_costs import OperatorCosts
from regard.cost_model.trace.part_names import PartNames
from regard.cost_model.trace.runner import Runner
from regard.cost_model.trace.size_space import BASE_LAYERS, LAYERS, SizeSpace
from regard.cost_model.trace.symbolic import SymbolFinder, SymbolicTrace, TracedRun
from regard.errors import CostError


def trace_cost(target: Any, given_sizes: Sizes, mode: RunMode) -> Breakdown:
    """What a module or a function costs, with symbols for the sizes of its input and of its configuration.

    It runs a few times with fake tensors: forward in eval mode; forward and backward in the mode it is in, without
    torch's dropout; or one decode step. Multiply-adds, bytes and pairs are sums over its operations, depth is the
    critical path at the sizes asked for. An attention of Regard costs what its description costs by itself. Attention
    of torch that is causal counts the pairs that it allows; with a `backend` the whole square, as torch's own counter
    does.
    """
    traced = TracedTarget(target, mode.dtype)
    inputs = make_example_inputs(traced, given_sizes)
    found = _trace(traced, inputs, given_sizes, mode)
    if inputs.alternative is not None and len(found.symbolic.symbols) < len(inputs.symbols):
        other = _trace(traced, inputs.alternative, given_sizes, mode)
        if len(other.symbolic.symbols) > len(found.symbolic.symbols):
            found = other
    return found.count()


def _trace(traced: TracedTarget, inputs: ExampleInputs, given_sizes: Sizes, mode: RunMode) -> TracedCost:
    runner = Runner(traced, inputs, mode)
    module = traced.module if traced.target is traced.module else None
    configuration = None
    if module is not None and given_sizes.inputs is None:
        configuration = find_configuration(module, given_sizes.image)
    space = _find_space(inputs, configuration)
    notes: dict[str, None] = runner.notes
    own_names = PartNames(traced.module)

    def run(sizes: dict[str, int]) -> TracedRun:
        if configuration is None or all(sizes[name] == size for name, size in configuration.sizes.items()):
            return TracedRun(runner.run(sizes), own_names)
        if not runner.fake:
            raise _cannot_build("it was executed with real tensors")
        try:
            built = configuration.build({name: sizes[name] for name in configuration.sizes})
        except Exception as error:  # constructors of other libraries raise anything
            raise _cannot_build(first_line(error)) from error
        again = TracedTarget(built, mode.dtype)
        others = make_example_inputs(again, _resize_request(given_sizes, sizes))
        return TracedRun(Runner(again, others, mode).run({**others.sizes, **sizes}), PartNames(built))

    finder = SymbolFinder(run, space)
    return TracedCost(traced, inputs, mode, finder, finder.find(), notes)


def _cannot_build(because: str) -> CostError:
    return CostError(
        "The module cannot be built at other sizes.",
        asked="symbols for the sizes of its configuration",
        because=because,
        instead="numbers for them",
    )


def _resize_request(given_sizes: Sizes, sizes: dict[str, int]) -> Sizes:
    """The sizes of a run at another point; what the caller did not give stays open."""
    names = {"batch": "B", "tokens": "N", "keys": "M", "context_tokens": "T"}
    changes: dict[str, Any] = {name: sizes[symbol] for name, symbol in names.items() if symbol in sizes}
    changes = {
        name: size for name, size in changes.items() if name == "batch" or getattr(given_sizes, name) is not None
    }
    if given_sizes.image is not None and "R" in sizes:
        changes["image"] = (sizes["R"], sizes["W"])
    return dataclasses.replace(given_sizes, **changes)


def _find_space(inputs: ExampleInputs, configuration: Configuration | None) -> SizeSpace:
    sizes = {name: inputs.sizes[name] for name in inputs.symbols}
    limits = {name: max(limit, sizes[name]) for name, limit in inputs.limits.items() if name in sizes}
    multiples = {name: ((), step) for name, step in inputs.steps.items() if name in sizes and step > 1}
    tied = {}
    if configuration is None:
        return SizeSpace(sizes, limits=limits, multiples=multiples)
    if "W" in sizes and "R" in configuration.sizes and "W" not in configuration.sizes and sizes["W"] == sizes["R"]:
        tied = {"W": "R"}
    if "S" in configuration.sizes:
        limits.pop("N", None)
        limits.pop("T", None)
    sizes |= {name: size for name, size in configuration.sizes.items() if name not in sizes}
    multiples |= {name: each for name, each in configuration.multiples.items() if name in sizes}
    at_least = {name: other for name, other in configuration.at_least.items() if name in sizes and other in sizes}
    return SizeSpace(sizes, set(configuration.sizes), multiples, at_least, limits, tied)


# Quantities that must be exact at the sizes asked for.
EXACT = {"macs", "exponentials", "pairs", "normalised", "parameters"}


def _add_parts(parts: list[CostPart]) -> dict[str, sympy.Expr]:
    """The totals of all parts; two passes are added."""
    total = sum((part for part in parts), CostPart(""))
    work = total.forward + total.backward
    found = {name: getattr(work, name) for name in ("macs", "exponentials", "bytes", "depth")}
    found |= {name: getattr(total, name) for name in ("parameters", "saved", "pairs", "normalised")}
    return {name: sympy.sympify(formula) for name, formula in found.items()}


@dataclass
class _PartTotals:
    """Operations of one part, counted by what they cost."""

    forward: Counter[Any] = field(default_factory=Counter)
    backward: Counter[Any] = field(default_factory=Counter)
    critical: Counter[Any] = field(default_factory=Counter)
    saved: Counter[Any] = field(default_factory=Counter)
    parameters: Counter[Any] = field(default_factory=Counter)


@dataclass
class TracedCost:
    """A symbolic trace, and the cost that it adds up to."""

    target: TracedTarget
    inputs: ExampleInputs
    mode: RunMode
    finder: SymbolFinder
    symbolic: SymbolicTrace
    notes: dict[str, None]

    def count(self) -> Breakdown:
        known = {size_symbol(name): size for name, size in self._find_known_sizes().items()}
        costs = OperatorCosts(self.mode, known)
        parts = self._make_parts(costs, known)
        values = {**costs.found_values, **known}
        notes = [*self.symbolic.notes, *self.notes, *costs.notes, *self._make_notes(known)]
        differing = self._find_differences(parts, values)
        if differing & EXACT:
            names = ", ".join(sorted(differing & EXACT))
            self.finder.exclude(f"with other sizes {names} follow another formula", set(self.symbolic.symbols))
            return dataclasses.replace(self, symbolic=self.finder.find()).count()
        if "saved" in differing:
            parts = self._keep_real_numbers(parts)
            notes.append("activation_bytes stay a number: at these sizes other tensors are saved")
        if differing & {"bytes", "depth"}:
            notes.append("bytes and depth are those of a batch of two or more: a single row needs fewer copies")
        return Breakdown(parts, values, tuple(dict.fromkeys(notes)), self.target.name)

    # The run at the sizes that were asked for

    def _find_differences(self, parts: list[CostPart], values: Values) -> set[str]:
        """Quantities whose formulas differ from the run at the sizes asked for, if they were found from others."""
        real = self._real_trace
        if self.symbolic.run is real.run:
            return set()
        sizes = {size_symbol(name): size for name, size in self.finder.space.sizes.items()}
        mine, theirs = _add_parts(parts), _add_parts(self._make_parts_of(real, OperatorCosts(self.mode, {}), {}))
        every = {**values, **sizes}
        return {name for name, formula in mine.items() if substitute_numbers(formula, every) != theirs[name]}

    @property
    def _real_trace(self) -> SymbolicTrace:
        run = self.finder.run(self.finder.space.sizes)
        return SymbolicTrace(run, run.trace.operations, run.trace.saved, run.trace.parameters, [])

    def _keep_real_numbers(self, parts: list[CostPart]) -> list[CostPart]:
        real = {
            part.name: part.saved for part in self._make_parts_of(self._real_trace, OperatorCosts(self.mode, {}), {})
        }
        made = [dataclasses.replace(part, saved=real.pop(part.name, ZERO)) for part in parts]
        return made + [CostPart(name, saved=saved) for name, saved in real.items() if saved != 0]

    def _find_known_sizes(self) -> dict[str, int]:
        """Symbols that have a number: those of the configuration, and those of the input that the caller gave."""
        sizes, inputs = self.finder.space.sizes, self.inputs
        given = inputs.known | self.finder.space.configuration
        return {name: sizes[name] for name in self.symbolic.symbols if name in given}

    def _make_parts(self, costs: OperatorCosts, known: Values) -> list[CostPart]:
        sizes = {size_symbol(name): size for name, size in self.finder.space.sizes.items()}
        return self._make_parts_of(self.symbolic, costs, {**sizes, **known})

    def _make_parts_of(self, symbolic: SymbolicTrace, costs: OperatorCosts, sizes: Values) -> list[CostPart]:
        totals = self._add_up(symbolic, costs, sizes)
        deeper: dict[str, _PartTotals] = {}
        if symbolic.deeper is not None:
            deeper = self._add_up(symbolic.deeper, costs, sizes)
        layers = size_symbol(LAYERS) - BASE_LAYERS

        def multiply(part: str, name: str) -> dict[Any, Any]:
            """How often each cost occurs, in terms of the layers."""
            mine: Counter[Any] = getattr(totals.get(part, _PartTotals()), name)
            if not deeper:
                return dict(mine)
            theirs: Counter[Any] = getattr(deeper.get(part, _PartTotals()), name)
            return {key: mine[key] + (theirs[key] - mine[key]) * layers for key in {**mine, **theirs}}

        return [
            CostPart(
                part,
                parameters=_sum_products(multiply(part, "parameters")),
                forward=self._sum_pass(multiply(part, "forward"), multiply(part, "critical"), costs, False),
                backward=self._sum_pass(multiply(part, "backward"), multiply(part, "critical"), costs, True),
                saved=_sum_products(multiply(part, "saved")),
                pairs=_sum_costs(multiply(part, "forward"), costs, "pairs"),
                normalised=_sum_costs(multiply(part, "forward"), costs, "normalised"),
            )
            for part in dict.fromkeys([*totals, *deeper])
        ]

    def _sum_pass(
        self, many: dict[Any, Any], critical: dict[Any, Any], costs: OperatorCosts, backward: bool
    ) -> PassCost:
        fields = {name: _sum_costs(many, costs, name) for name in ("macs", "exponentials", "bytes")}
        deep = {key[1:]: count for key, count in critical.items() if key[0] == backward}
        return PassCost(**fields, depth=_sum_costs(deep, costs, "depth"))

    def _add_up(self, symbolic: SymbolicTrace, costs: OperatorCosts, sizes: Values) -> dict[str, _PartTotals]:
        """Parts in the order in which they run; operations of the same cost are counted together."""
        trace, names = symbolic.run.trace, symbolic.run.names
        keys = [costs.key(operation) for operation in symbolic.operations]
        found: dict[str, _PartTotals] = {}

        def part_of(path: str, name: str, step: str = "") -> _PartTotals:
            if step:
                part = f"{names.find_part(path, '')}.{step}" if path else step
            else:
                part = names.find_part(path, _short_name(name))
            return found.setdefault(part, _PartTotals())

        for key, operation in zip(keys, trace.operations, strict=True):
            for index, each in enumerate(costs.known[key]):
                totals = part_of(operation.path, operation.name, each.name)
                (totals.backward if operation.backward else totals.forward)[key, index] += 1
        for backward in (False, True):
            for place in find_critical_path(trace.operations, lambda p: costs.depth(keys[p], sizes), backward):
                operation = trace.operations[place]
                for index, each in enumerate(costs.known[keys[place]]):
                    totals = part_of(operation.path, operation.name, each.name)
                    totals.critical[backward, keys[place], index] += 1
        last = {operation.path: costs.known[key][-1].name for key, operation in zip(keys, trace.operations, strict=True)
                if operation.attention is not None}  # fmt: skip
        for (path, maker, _), (*_, operand) in zip(trace.saved, symbolic.saved, strict=True):
            step = last.get(path, "") if maker == "regard.attend" else ""
            part_of(path, maker, step).saved[operand.bytes] += 1
        for (path, name, _), (*_, shape) in zip(trace.parameters, symbolic.parameters, strict=True):
            part_of(path, name).parameters[sympy.Mul(*shape)] += 1
        return found

    def _make_notes(self, values: Values) -> list[str]:
        symbolic, space = self.symbolic, self.finder.space
        notes = []
        for name in symbolic.symbols:
            if size_symbol(name) not in values:
                notes.append(f"formulas were found near {name_size(name)} = {space.sizes[name]}; {name} has no number")
        unknown = symbolic.run.trace.unknown
        if unknown:
            notes.append(f"counted without products, which are unknown: {', '.join(sorted(unknown))}")
        causal = ("_scaled_dot_product" in each.name and each.constants[:1] == (True,) for each in symbolic.operations)
        if self.mode.backend is not None and any(causal):
            notes.append("causal attention of torch is counted as the whole square")
        over = [
            name
            for name, limit in self.inputs.limits.items()
            if name in self.inputs.symbols and self.inputs.sizes[name] > limit
        ]
        notes += [
            f"{name_size(name)} = {self.inputs.sizes[name]} is more than the {self.inputs.limits[name]} it is made for"
            for name in over
        ]
        return notes


def _short_name(name: str) -> str:
    """The part of an operation outside of every submodule, and of a parameter of the module itself."""
    return name.split(".")[1].strip("_").removesuffix("_backward") if "." in name else name


def _sum_costs(many: dict[Any, Any], costs: OperatorCosts, name: str) -> sympy.Expr:
    return sympy.Add(*(count * getattr(costs.known[key][index], name) for (key, index), count in many.items()))


def _sum_products(many: dict[Any, Any]) -> sympy.Expr:
    return sympy.Add(*(count * size for size, count in many.items())) if many else ZERO


__all__ = ["trace_cost"]
