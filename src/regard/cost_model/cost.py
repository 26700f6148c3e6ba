"""What something costs: formulas, the numbers they give, and the parts they are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import sympy

from regard.cost_model.cost_part import CostPart, PassCost, group_parts
from regard.cost_model.quantity import Quantity
from regard.cost_model.run_mode import RunMode
from regard.cost_model.symbols import Values, find_common_values, legend, replace_terms

if TYPE_CHECKING:
    from regard.cost_model.machine import Machine
    from regard.cost_model.memory import Memory
    from regard.cost_model.roofline import Prediction

# Every quantity, its unit, and what it is of a part when it is run so or so: see `_find_formula`.
QUANTITIES = {
    "parameters": "",
    "macs": "",
    "flops": "",
    "bytes": "B",
    "activation_bytes": "B",
    "depth": "",
    "pairs": "",
    "exponentials": "",
}


class Cost:
    """What something costs. Every quantity is a number and a formula.

    Attributes:
        parts: the steps it is made of, with their formulas.
        values: the number of every symbol.
        mode: how it is run: forward, backward, ...; by which backend; in which numbers.
        notes: what a reader should know, such as a size that stayed a number in the formulas.
    """

    def __init__(
        self,
        name: str,
        parts: list[CostPart],
        values: Values,
        mode: RunMode | None = None,
        *,
        notes: tuple[str, ...] = (),
        recompute: Callable[..., Cost] | None = None,
        memory: Callable[[Cost], Memory] | None = None,
    ) -> None:
        self.name = name
        self.parts = parts
        self.values = dict(values)
        self.mode = RunMode() if mode is None else mode
        self.notes = notes
        self._recompute = recompute
        self._memory = memory

    # Quantities

    def quantity(self, name: str) -> Quantity:
        """A quantity by its name."""
        formula = sum((_find_formula(part, name, self.mode) for part in self.parts), sympy.Integer(0))
        return Quantity(_simplify_formula(formula), self.values, QUANTITIES[name])

    @property
    def parameters(self) -> Quantity:
        """Learned numbers; tied ones count once."""
        return self.quantity("parameters")

    @property
    def macs(self) -> Quantity:
        """Multiply-adds of matrix products and convolutions."""
        return self.quantity("macs")

    @property
    def flops(self) -> Quantity:
        """Two for each multiply-add, as torch's FlopCounterMode counts; norms and activations are not products."""
        return self.quantity("flops")

    @property
    def bytes(self) -> Quantity:
        """Bytes read and written if every step reads its operands and writes its result once."""
        return self.quantity("bytes")

    @property
    def activation_bytes(self) -> Quantity:
        """Bytes that the forward pass saves for the backward pass."""
        return self.quantity("activation_bytes")

    @property
    def depth(self) -> Quantity:
        """Steps on the longest path: sums as trees, a processor for everything that can run at once."""
        return self.quantity("depth")

    @property
    def pairs(self) -> Quantity:
        """Allowed pairs of a query and a key, over all heads, rows and layers."""
        return self.quantity("pairs")

    @property
    def exponentials(self) -> Quantity:
        """Calls of exp that softmaxes make."""
        return self.quantity("exponentials")

    @property
    def normalised(self) -> Quantity:
        """Numbers that norms read; some counters add 5 operations for each."""
        return Quantity(_simplify_formula(sum((part.normalised for part in self.parts), sympy.Integer(0))), self.values)

    @property
    def memory(self) -> Memory:
        """Weights, gradients, optimizer, activations, cache, and the peaks of a run."""
        from regard.cost_model.memory import memory_of

        return memory_of(self) if self._memory is None else self._memory(self)

    def roofline(self, machine: Machine | None = None) -> Prediction:
        """The least time this takes on a machine, this one if none is named, and what it waits for: a lower bound."""
        from regard.cost_model.roofline import predict

        return predict(self, machine)

    def by_part(self, levels: int | None = None) -> dict[str, Cost]:
        """The cost of every part; with `levels=1` of the coarsest ones."""
        return {
            name: Cost(name, [part], self.values, self.mode, notes=self.notes)
            for name, part in group_parts(self.parts, levels).items()
        }

    def at(self, **sizes: Any) -> Cost:
        """The same cost at other sizes: `cost.at(tokens=8192)`."""
        if self._recompute is None:
            from regard.cost_model.symbols import read_symbol

            return self._with({read_symbol(name): value for name, value in sizes.items()})
        return self._recompute(**sizes)

    def _with(self, values: Values) -> Cost:
        return Cost(self.name, self.parts, {**self.values, **values}, self.mode, notes=self.notes)

    # Two costs

    def __sub__(self, other: Cost) -> Cost:
        """What this one costs more, part by part; parts of the same name are subtracted."""
        return self._combine(other, -1, f"{self.name} - {other.name}")

    def __add__(self, other: Cost) -> Cost:
        return self._combine(other, 1, f"{self.name} + {other.name}")

    def _combine(self, other: Cost, sign: int, name: str) -> Cost:
        common = find_common_values(self.values, other.values)
        mine = group_parts([part.fix_differing(self.values, common) for part in self.parts])
        theirs = group_parts([part.fix_differing(other.values, common) for part in other.parts])
        parts = []
        for key in dict.fromkeys([*mine, *theirs]):
            part = mine.get(key, CostPart(key))
            parts.append(part + theirs[key] * sign if key in theirs else part)
        return Cost(name, parts, common, self.mode, notes=(*self.notes, *other.notes))

    def ratio(self, other: Cost) -> dict[str, Quantity]:
        """How many times as much this one costs, for every quantity that the other has."""
        found = {}
        for name in QUANTITIES:
            mine, theirs = self.quantity(name), other.quantity(name)
            if theirs.formula != 0:
                found[name] = mine / theirs
        return found

    def solve(self, symbol: str | sympy.Symbol, equals: Cost | Quantity | float, of: str = "macs") -> list[Quantity]:
        """Where this costs as much as another, or as a number says: every positive value of a symbol, smallest first.

        >>> from regard import Attention, cost
        >>> softmax = cost(Attention(), tokens=256, dim=64)
        >>> softmax.solve("tokens", cost(Attention(feature_map="elu1"), tokens=256, dim=64))
        [65 = d + 1]
        """
        from regard.cost_model.solving import find_crossings

        return find_crossings(self, symbol, equals, of)

    # Showing

    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain Python: formulas as text."""
        return {
            "name": self.name,
            "setting": self.mode.to_dict(),
            "letters": {symbol: {"meaning": words, "value": number} for symbol, words, number in self.legend()},
            "quantities": _list_quantities(self),
            "parts": {name: _list_quantities(part) for name, part in self.by_part().items()},
            "notes": list(self.notes),
        }

    def to_json(self, path: str | None = None, indent: int | None = 2) -> str:
        """The same as JSON, and into a file if one is named."""
        text = json.dumps(self.to_dict(), indent=indent)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        return text

    def legend(self) -> list[tuple[str, str, Any]]:
        """Symbol, meaning and number of every symbol that is used."""
        return legend([self.quantity(name).formula for name in QUANTITIES], self.values, self.mode.step)

    def table(self, levels: int | None = None, width: int | None = None) -> str:
        """The table that `print` shows: formulas above, parts below, the meaning of the symbols last."""
        from regard.cost_model.table import text

        return text(self, levels, width)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        shown = {name: self.quantity(name) for name in ("parameters", "macs")}
        return f"Cost({self.name}: " + ", ".join(f"{name} {value!r}" for name, value in shown.items()) + ")"


def _find_formula(part: CostPart, name: str, mode: RunMode) -> sympy.Expr:
    """A quantity of a part: forward, backward or both."""
    if name == "parameters":
        return part.parameters
    if name == "pairs":
        return part.pairs
    if name == "activation_bytes":
        return part.saved
    passes = {"forward": [part.forward], "decode": [part.forward], "backward": [part.backward]}
    work = sum(passes.get(mode.step, [part.forward, part.backward]), PassCost())
    return 2 * work.macs if name == "flops" else getattr(work, name)


def _simplify_formula(formula: Any) -> sympy.Expr:
    """One shape for one formula: products multiplied out, or their common factors in front where that is shorter."""
    spread = sympy.expand(formula)
    if not spread.is_Add or len(spread.args) > 12 or not spread.free_symbols:
        return spread
    # A number of windows, ceiling(R/w), is a symbol like others.
    symbols = {each: sympy.Dummy(positive=True, integer=True) for each in spread.atoms(sympy.ceiling, sympy.floor)}
    plain = spread.xreplace(symbols) if symbols else spread
    if not plain.is_polynomial():
        return spread
    common = replace_terms(sympy.factor_terms(plain), {dummy: each for each, dummy in symbols.items()})
    return common if sympy.count_ops(common) < sympy.count_ops(spread) else spread


def _list_quantities(cost: Cost) -> dict[str, Any]:
    found: Mapping[str, Quantity] = {name: cost.quantity(name) for name in QUANTITIES}
    values = {name: each.value if each.known else None for name, each in found.items()}
    return {name: {"formula": str(each.formula), "value": values[name]} for name, each in found.items()}
