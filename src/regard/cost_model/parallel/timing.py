"""The time of a training step on several devices: what is computed, what is sent meanwhile, and what is waited for.

    compute        FLOPs of the busiest device / f
    communication  bytes that it sends / b
    exposed        the part of the communication during which the device waits
    step           compute + exposed
    efficiency     T_1 / (K T_K), T_1 the time of one device for the work of all

Assumed, none of it measured here: a device computes at one rate f, whatever the sizes; a link has one rate b, no
latency, sends and receives at once and is nobody else's; sending takes nothing from computing. In each pass the keys
and values of ring attention overlap with attention, and parameters and gradients with what is computed in that pass as
far as the link is free; what comes first or last (the first unit that is gathered, the last bucket or unit of gradients
that is reduced) overlaps with nothing, nor do the activations of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from regard.cost_model.cost import Cost
from regard.cost_model.parallel.collectives import Collective
from regard.cost_model.parallel.strategy import Strategy
from regard.cost_model.symbols import size_symbols

b, f, c, K, L = size_symbols("b f c K L")
ZERO = sympy.Integer(0)


@dataclass(frozen=True)
class Work:
    """FLOPs of a device in a pass: of all, and of attention among them."""

    flops: Any
    attention: Any


@dataclass(frozen=True)
class Timing:
    """Formulas of seconds."""

    compute: Any
    communication: Any
    exposed: Any
    efficiency: Any

    @property
    def overlapped(self) -> Any:
        return self.communication - self.exposed

    @property
    def step(self) -> Any:
        return self.compute + self.exposed


def find_work(cost: Cost, strategy: Strategy, imbalance: float) -> dict[str, Work]:
    """What the busiest device does in each pass."""
    passes: dict[str, list[Any]] = {"forward": [ZERO, ZERO], "backward": [ZERO, ZERO]}
    for part in cost.parts:
        for name, each in (("forward", part.forward), ("backward", part.backward)):
            passes[name][0] += 2 * each.macs
            if part.pairs != 0:
                passes[name][1] += 2 * each.macs
    if strategy.recompute:
        again = [_take_blocks(each) for each in passes["forward"]]
        passes["backward"] = [one + other for one, other in zip(passes["backward"], again, strict=True)]
    devices = K if strategy.strategy == "tensor" else c if strategy.shared_by > 1 else sympy.Integer(1)
    more = sympy.Integer(0) if abs(imbalance - 1) < 1e-12 else sympy.Float(imbalance - 1, 6)
    return {
        name: Work(sympy.expand(flops + more * attention) / devices, sympy.expand(attention) * (1 + more) / devices)
        for name, (flops, attention) in passes.items()
    }


def _take_blocks(flops: Any) -> Any:
    """The part that grows with the number of layers; all of it where none of it does."""
    formula = sympy.expand(flops)
    return formula.coeff(L, 1) * L or formula


def find_timing(
    work: dict[str, Work], total: sympy.Expr, collectives: Sequence[Collective], strategy: Strategy
) -> Timing:
    """Seconds of a step; `total` are the FLOPs of one sequence group, on however many devices."""
    compute = exposed = communication = ZERO
    for name, each in work.items():
        here = [collective for collective in collectives if collective.during == name]
        ring, ring_waits = _find_exposed([one for one in here if one.is_attention], each.attention / f)
        free = each.flops / f + ring_waits - ring
        other, waits = _find_exposed([one for one in here if not one.is_attention], free)
        compute += each.flops / f
        communication += ring + other
        exposed += ring_waits + waits
    groups = sympy.Integer(1) if strategy.strategy == "tensor" else K / c if strategy.shared_by > 1 else K
    return Timing(compute, communication, exposed, groups * total / f / (K * (compute + exposed)))


def _find_exposed(collectives: list[Collective], meanwhile: Any) -> tuple[Any, Any]:
    """Seconds on the link, and those of them in which nothing is computed."""
    sent = sum((each.sent for each in collectives), ZERO)
    alone = sum((each.alone for each in collectives), ZERO)
    if sent == 0:
        return ZERO, ZERO
    if sent == alone:
        return sent / b, alone / b
    waits = sympy.Max(0, (sent - alone) / b - meanwhile, evaluate=False)
    return sent / b, alone / b + waits
