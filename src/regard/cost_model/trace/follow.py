"""`follow`: the cost of any module or function, from what it does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import sympy

from regard.adapters.example_inputs import ExampleInputs
from regard.adapters.fake_copies import TracedTarget
from regard.cost_model.asked import Asked, Counted
from regard.cost_model.letters import MEANINGS, letter
from regard.cost_model.part import ZERO, Part, Work
from regard.cost_model.setting import Setting
from regard.cost_model.trace.fitting import Fit, fitted
from regard.cost_model.trace.inputs import make_example_inputs
from regard.cost_model.trace.naming import Names, parameters_by_part
from regard.cost_model.trace.operations import Costs
from regard.cost_model.trace.running import Runner
from regard.cost_model.trace.walking import longest


def follow(target: Any, asked: Asked, setting: Setting) -> Counted:
    """What a module or a function does, in letters for the sizes of its input.

    It runs a few times with tensors that have shapes and no numbers: forward in evaluation mode; forth and back in the
    mode it is in, with a dropout that drops nothing; or one token more. Multiply-adds, bytes and pairs are sums over
    its operations, depth is the longest path at the sizes asked for. Attention of torch that is causal counts as the
    pairs that it shows; with a `backend`, as the whole square, which is what torch's own counter has.
    """
    subject = TracedTarget(target, setting.dtype)
    inputs = make_example_inputs(subject, asked)
    costs = Costs(setting)
    runner = Runner(subject, inputs, setting)
    fit = fitted(runner, inputs, costs.totals)
    if inputs.alternative is not None and len(fit.letters) < len(inputs.symbols):
        other = Runner(subject, inputs.alternative, setting)
        more = fitted(other, inputs.alternative, costs.totals)
        if len(more.letters) > len(fit.letters):
            inputs, runner, fit = inputs.alternative, other, more
    names = Names(subject.module)
    parts = _parts(fit, costs, names, parameters_by_part(subject.module, names))
    values = {letter(name): inputs.sizes[name] for name in fit.letters if name in inputs.known}
    notes = [*fit.notes, *runner.notes, *_remarks(fit, values, setting), *_beyond(inputs)]
    return Counted(subject.name, parts, values, tuple(notes))


def _beyond(inputs: ExampleInputs) -> list[str]:
    """Fake tensors never index past the end of a position table, so a length beyond it is noted here."""
    over = [name for name, limit in inputs.limits.items() if name in inputs.symbols and inputs.sizes[name] > limit]
    return [
        f"{MEANINGS[name][0]} = {inputs.sizes[name]} is more than the {inputs.limits[name]} it is made for"
        for name in over
    ]


def _remarks(fit: Fit, values: dict[sympy.Symbol, int], setting: Setting) -> list[str]:
    notes = []
    for name in fit.letters:
        if letter(name) not in values:
            notes.append(f"formulas were read off near {MEANINGS[name][0]} = {fit.origin[name]}; {name} has no number")
    if fit.trace.unknown:
        notes.append(f"counted as no products: {', '.join(sorted(fit.trace.unknown))}, which nobody here knows")
    shown = ("_scaled_dot_product" in each.name and each.words[:1] == (True,) for each in fit.trace.operations)
    if setting.backend is not None and any(shown):
        notes.append("causal attention of torch is counted as the whole square")
    return notes


def _parts(fit: Fit, costs: Costs, names: Names, learned: dict[str, int]) -> list[Part]:
    """Parts in the order in which they run; those of the same operation with the same sizes are counted together."""
    origin = {letter(name): fit.origin[name] for name in fit.letters}
    keys = [costs.key(operation) for operation in fit.operations]
    where = [names.part(each.path, _alone(each.name)) for each in fit.trace.operations]
    groups: dict[str, tuple[Counter[Any], Counter[Any], Counter[Any]]] = {}
    for key, part, operation in zip(keys, where, fit.trace.operations, strict=True):
        groups.setdefault(part, (Counter(), Counter(), Counter()))[operation.backward][key] += 1
    steps: dict[tuple[str, bool], Counter[Any]] = {}
    for backward in (False, True):
        for place in longest(fit.trace.operations, lambda place: costs.steps(keys[place], origin), backward):
            steps.setdefault((where[place], backward), Counter())[keys[place]] += 1
    for path, maker, operand in fit.kept:
        part = names.part(path, _alone(maker))
        groups.setdefault(part, (Counter(), Counter(), Counter()))[2][operand.bytes] += 1
    for part in learned:
        groups.setdefault(part, (Counter(), Counter(), Counter()))

    def work(part: str, backward: bool) -> Work:
        many = groups[part][backward]
        deep = steps.get((part, backward), Counter())
        fields = {name: _total(many, costs, name) for name in ("macs", "exponentials", "bytes")}
        return Work(**fields, depth=_total(deep, costs, "depth"))

    return [
        Part(
            part,
            parameters=sympy.Integer(learned.get(part, 0)),
            forward=work(part, False),
            backward=work(part, True),
            kept=sympy.Add(*(count * size for size, count in kept.items())),
            pairs=_total(forward, costs, "pairs"),
            normalised=_total(forward, costs, "normalised"),
        )
        for part, (forward, _, kept) in groups.items()
    ]


def _alone(name: str) -> str:
    """What an operation outside of every module inside is called."""
    return name.split(".")[1].strip("_").removesuffix("_backward")


def _total(many: Counter[Any], costs: Costs, name: str) -> sympy.Expr:
    return sympy.Add(*(count * getattr(costs.known[key], name) for key, count in many.items())) if many else ZERO
