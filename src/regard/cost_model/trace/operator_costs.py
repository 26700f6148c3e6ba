"""Prices the operations of a trace: each by the formula of its operator, an attention by its description."""

from __future__ import annotations

from typing import Any

import sympy
from torch import Tensor

from regard.attention import Attention
from regard.cost_model.attention.attention import count_attention
from regard.cost_model.attention.shape import Shape
from regard.cost_model.run_mode import RunMode
from regard.cost_model.symbols import Values, find_common_values, fix_differing, size_symbols, substitute_numbers
from regard.cost_model.trace.operation import Operation
from regard.cost_model.trace.operator_formulas import FORMULAS, OperatorCost, count_elementwise

QUANTITIES = ("macs", "exponentials", "bytes", "depth", "pairs", "normalised")


def cost_of_operator(operation: Operation, mode: RunMode) -> OperatorCost:
    """What an operation costs; an unknown one moves its bytes, takes one step and multiplies nothing."""
    formula = FORMULAS.get(operation.name) or FORMULAS.get(operation.name.removesuffix("_"), count_elementwise)
    return formula(operation, mode)._replace(bytes=count_bytes(operation))


OWN = set(size_symbols("P Z r"))  # symbols that an attention brings along


class OperatorCosts:
    """Costs of operations, each kind and size computed once.

    values: the numbers of the symbols that have one; attention patterns have formulas that depend on them.
    """

    def __init__(self, mode: RunMode, values: Values) -> None:
        self.mode, self.values = mode, values
        self.known: dict[Any, list[OperatorCost]] = {}
        self.found_values: dict[sympy.Symbol, Any] = {}
        self.notes: dict[str, None] = {}
        self._depths: dict[Any, int] = {}

    def key(self, operation: Operation) -> Any:
        """Identifies operations of equal cost."""
        described = "" if operation.attention is None else describe_attention(operation.attention)
        key = (operation.name, tuple(operation.reads.items()), operation.writes, operation.constants,
               operation.is_attention, operation.is_factor, operation.backward, operation.grid, described)  # fmt: skip
        if key not in self.known:
            costs = self._cost_of_attention(operation) if operation.attention is not None else None
            if costs is None:
                costs = [cost_of_operator(operation, self.mode)]
                if _is_empty(operation):
                    costs = [costs[0]._replace(depth=0)]
            self.known[key] = [
                each._replace(**{name: sympy.expand(sympy.sympify(getattr(each, name))) for name in QUANTITIES})
                for each in costs
            ]
        return key

    def _cost_of_attention(self, operation: Operation) -> list[OperatorCost]:
        assert operation.attention is not None
        query, key, value = (operation.reads[name].shape for name in ("query", "key", "value"))
        sizes = [sympy.sympify(size) for size in (*query[:1], query[2], key[2], query[1], key[1], query[3], value[3])]
        shape = Shape(*sizes, values=dict(self.values), sides=operation.grid, keeps=False)
        found = count_attention(operation.attention, shape, self.mode)
        self.notes |= dict.fromkeys(found.notes)
        # A symbol of one attention, such as P, may stand for another number in the next.
        common = find_common_values(self.values, self.found_values, found.values)
        common = {symbol: number for symbol, number in common.items() if symbol in self.values or symbol in OWN}
        self.found_values |= {symbol: number for symbol, number in found.values.items() if symbol in common}
        costs = []
        for part in found.parts:
            work = part.backward if operation.backward else part.forward
            pairs = 0 if operation.backward else part.pairs
            each = (work.macs, work.exponentials, work.bytes, work.depth, pairs)
            macs, exponentials, moved, depth, pairs = (
                fix_differing(sympy.sympify(one), found.values, common) for one in each
            )
            costs.append(OperatorCost(macs, exponentials, moved, depth, pairs, name=part.name))
        return costs

    def depth(self, key: Any, sizes: Values) -> int:
        """The depth of an operation at some sizes."""
        if key not in self._depths:
            numbers = {**self.found_values, **sizes}
            self._depths[key] = sum(int(substitute_numbers(each.depth, numbers)) for each in self.known[key])
        return self._depths[key]


def _is_empty(operation: Operation) -> bool:
    """An empty sum takes no step, and neither does an empty result."""
    first = next(iter(operation.reads.values()), None)
    return (first is not None and first.numel == 0) or all(operand.numel == 0 for operand in operation.writes)


def describe_attention(attention: Attention) -> str:
    """Equal for descriptions of equal cost."""
    bias = f"tensor {tuple(attention.bias.shape)}" if isinstance(attention.bias, Tensor) else repr(attention.bias)
    return f"{attention.pattern!r} {attention.scale} {bias} {attention.feature_map!r}"


def is_known(name: str) -> bool:
    """Whether all products of an operation are counted: torch's own are, those of others need a rule."""
    if name in FORMULAS or name.removesuffix("_") in FORMULAS:
        return True
    return name.startswith(("aten.", "prim.", "prims.", "profiler.", "regard.attend")) and not name.startswith(HIDING)


# Operations of torch with products inside that have no formula here.
HIDING = ("aten._cdist", "aten.linalg_", "aten._linalg_", "aten._fft", "aten.cholesky", "aten.triangular_solve")


# Bytes


def count_bytes(operation: Operation) -> Any:
    """Bytes read and written. A tensor that is given twice is read once; of a table only the rows that are wanted."""
    name = operation.name.removesuffix("_")
    if name in UNWRITTEN:
        return 0
    written = sum((operand.bytes for operand in operation.writes), 0)
    if name in LOOKUPS:
        table = LOOKUPS[name]
        others = [operand for key, operand in operation.reads.items() if key != table]
        return 2 * written + sum((operand.bytes for operand in others), 0)
    overwritten = operation.name in OVERWRITERS
    read = [one for key, one in operation.reads.items() if not one.again and not (overwritten and key == "self")]
    return written + sum((operand.bytes for operand in read), 0)


# What is allocated and not written; tables of which few rows are read; what does not read what it replaces.
UNWRITTEN = {f"aten.{name}" for name in ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")}
UNWRITTEN |= {"aten.resize", "regard.normalise", "regard.separable_attention"}
LOOKUPS = {"aten.embedding": "weight", "aten.index": "self", "aten.gather": "self", "aten.index_select": "self"}
OVERWRITERS = {"aten.copy_", "aten.fill_", "aten.zero_", "aten.bernoulli_", "aten.normal_", "aten.uniform_"}
