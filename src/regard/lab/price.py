"""What a model or a pattern costs at any size: its parts, formulas and curves, and a step on several devices."""

from __future__ import annotations

from typing import Any

import sympy

from regard.attention import Attention
from regard.cost_model import Cost, cost
from regard.cost_model.parallel.strategy import STRATEGIES
from regard.cost_model.symbols import read_symbol
from regard.errors import RegardError
from regard.lab.fields import Fields
from regard.lab.jobs import Job
from regard.lab.play import HEAD_DIM, MOST_TOKENS, read_expression
from regard.lab.state import Lab

QUANTITIES = {"parameters": "parameters", "macs": "macs", "bytes": "bytes", "activations": "activation_bytes"}
CURVES = ("macs", "bytes", "activations")
SIZES = {"tokens": (1, 1 << 17), "batch": (1, 512), "dim": (1, 1 << 14), "heads": (1, 128), "layers": (1, 128)}
DEFAULTS = {"tokens": 512, "batch": 1, "dim": HEAD_DIM, "heads": 8}
CURVE_LENGTHS = tuple(2**power for power in range(4, 18))
PARTS_LEVEL = 2
MOST_DEVICES = 4096


def price(lab: Lab, fields: Fields, job: Job) -> dict[str, Any]:
    """The cost of a model that is open, or of an attention by its pattern."""
    asked = fields.object("sizes")
    sizes = {name: asked.integer(name, *SIZES[name]) for name in SIZES if asked.has(name)}
    if fields.has("expression"):
        target: Any = Attention(pattern=read_expression(fields))
        lines = ["from regard import *", f"target = {target!r}"]
        whole = cost(target)
        # Where no formula counts the pairs, they are counted one tile after the other.
        limit = MOST_TOKENS if read_symbol("pairs") in sympy.sympify(whole.macs.formula).free_symbols else None
    else:
        opened = lab.open(fields.text("model"), job)
        target, lines = opened.module, [*opened.loaded.python, "from regard import cost", "target = model"]
        known = lab.costs.get(opened.id)
        whole = known if known is not None else cost(target)
        lab.costs[opened.id] = whole
        limit = None if opened.kind == "image" else opened.most_tokens
    job.check()
    values, sliders = _find_values(whole, sizes, limit)
    # The pairs of a pattern may have no formula; at given sizes they are counted.
    fixed = (
        cost(target, **{name: sliders[name]["value"] for name in sliders}) if isinstance(target, Attention) else whole
    )
    shown = {name: sliders[name]["value"] for name in sliders}
    return {
        "parts": _list_parts(fixed, None if fixed is not whole else values),
        "formulas": {name: str(whole.quantity(quantity).formula) for name, quantity in QUANTITIES.items()},
        "sizes": sliders,
        "curves": _make_curves(whole, target, values, limit, job) if "tokens" in sliders else {},
        "parallel": _spread(target, fields, shown, job),
        "python": "\n".join([*lines, _write_call(shown, isinstance(target, Attention))]),
    }


def _find_values(whole: Cost, given: dict[str, int], limit: int | None) -> tuple[dict[Any, int], dict[str, Any]]:
    """The number of every symbol, and the sliders: the sizes whose symbols stand in the formulas."""
    values = {read_symbol(letter): number for letter, _, number in whole.legend()}
    sliders: dict[str, Any] = {}
    for name, (least, most) in SIZES.items():
        symbol = read_symbol(name)
        if name == "dim" and symbol not in values:
            symbol = read_symbol("width")
        if symbol not in values:
            continue
        most = min(most, limit) if name == "tokens" and limit is not None else most
        number = given.get(name) or values[symbol] or DEFAULTS.get(name, 1)
        values[symbol] = min(int(number), most)
        sliders[name] = {"value": values[symbol], "least": least, "most": max(most, values[symbol])}
    for name in ("keys", "context_tokens"):  # the other side of an attention is as long
        if values.get(read_symbol(name), 0) is None and "tokens" in sliders:
            values[read_symbol(name)] = sliders["tokens"]["value"]
    return {symbol: number for symbol, number in values.items() if number is not None}, sliders


def _evaluate(whole: Cost, quantity: str, values: dict[Any, int] | None) -> int | float | None:
    """A quantity with these numbers, or with its own; None where its formula holds a count that nothing gives."""
    try:
        if values is None:
            return whole.quantity(quantity).value
        found = sympy.sympify(whole.quantity(quantity).formula).subs(values)
    except RegardError:
        return None
    if found.free_symbols:
        return None
    return int(found) if found.is_integer else float(found)


def _list_parts(whole: Cost, values: dict[Any, int] | None) -> list[dict[str, Any]]:
    """Every part that has parameters or multiplies something, and all parts together."""
    found = []
    for name, part in {**whole.by_part(PARTS_LEVEL), "all": whole}.items():
        row = {key: _evaluate(part, quantity, values) for key, quantity in QUANTITIES.items()}
        if row["parameters"] != 0 or row["macs"] != 0:
            found.append({"name": name, **row})
    return found


def _make_curves(
    whole: Cost, target: Any, values: dict[Any, int], limit: int | None, job: Job
) -> dict[str, list[list[float]]]:
    symbol, own = read_symbol("tokens"), isinstance(target, Attention)
    curves: dict[str, list[list[float]]] = {name: [] for name in CURVES}
    for length in CURVE_LENGTHS:
        job.check()
        if limit is not None and length > limit:
            break
        at = {**values, symbol: length}
        for name in CURVES:
            number = _evaluate(whole, QUANTITIES[name], at)
            if number is None and own and length <= 4096:  # a pattern without a formula is counted
                number = _count(target, QUANTITIES[name], length, at)
            if number is not None:
                curves[name].append([length, number])
    return curves


def _count(target: Attention, quantity: str, length: int, values: dict[Any, int]) -> int | float | None:
    try:
        sizes: dict[str, Any] = {name: values[read_symbol(name)] for name in ("batch", "heads", "dim")}
        return _evaluate(cost(target, tokens=length, **sizes), quantity, None)
    except RegardError:  # a grid has one length
        return None


def _spread(target: Any, fields: Fields, sizes: dict[str, int], job: Job) -> dict[str, Any] | None:
    """A training step on several devices: memory of each, computing, waiting for the network, and what is sent."""
    devices = fields.integer("devices", 1, MOST_DEVICES, 1)
    if devices == 1:
        return None
    strategy = fields.choice("strategy", STRATEGIES, "fsdp")
    rate = fields.number("link_gbps", 1e-3, 1e6, 400)
    own = isinstance(target, Attention)
    names = ("tokens", "batch", "heads", "dim") if own else ("tokens", "batch")
    given = {name: sizes[name] for name in names if name in sizes}
    spread = cost(target, devices=devices, strategy=strategy, link_gbps=rate, **given)
    job.check()
    seconds = spread.seconds
    return {
        "memory": spread.memory_total.value,
        "compute_ms": 1000 * float(seconds["compute"].value),
        "exposed_ms": 1000 * float(seconds["exposed"].value),
        "collectives": [{"name": name, "bytes": sent.value} for name, sent in spread.sent_by_collective.items()],
    }


def _write_call(sizes: dict[str, int], own: bool) -> str:
    names = ("tokens", "batch", "heads", "dim") if own else ("tokens", "batch")
    given = "".join(f", {name}={sizes[name]}" for name in names if name in sizes)
    return f"print(cost(target{given}))"
