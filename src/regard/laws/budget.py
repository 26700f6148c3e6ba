"""How much of a law is tried. Work is counted, never timed, so that a verdict does not depend on the machine.

A unit of work is one tensor operation of the subject, or `ELEMENTS` products of a number with a parameter. A case costs
what one run of the subject costs at the case's size. A law tries its cases until its budget is spent, the first ones in
their order and the others at even distances, and never fewer kinds of cases than its minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from regard.adapters.base import Adapter
from regard.adapters.dispatch_mode import HigherOrderDispatchMode
from regard.adapters.rng import Rng
from regard.laws.law import Case

# Units of work that one law may spend in a fast and in a full search: about one second and ten seconds of a processor,
# whatever the machine; a small subject has tried every case of a fast search before that.
BUDGET = {True: 7_000.0, False: 70_000.0}
# Multiplications that take about as long as calling one operation.
ELEMENTS = 250_000
# The size of the run that is measured.
ROWS, TOKENS = 2, 5
# Operations of a subject that cannot be measured.
UNMEASURED = 50


@dataclass(frozen=True)
class RunWork:
    """What one run of a subject costs.

    Attributes:
        operations: tensor operations, whatever their size.
        elements: numbers that they read, which each token multiplies.
    """

    operations: int
    elements: int

    def of(self, case: Case) -> float:
        """The units of work of one run at the size of a case."""
        return self.operations + self.elements * _count_tokens(case) / ELEMENTS


class _Count(HigherOrderDispatchMode):
    """Counts operations and the numbers that they read."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.elements += sum(leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        return self.call(func, args, kwargs)


def measure_work(subject: Adapter) -> RunWork:
    """The work of one short run, counted with gradients enabled: then no fused path hides its operations."""
    try:
        x = subject.draw(ROWS, subject.lengths(TOKENS)[0], Rng(0, "work"))
        with torch.enable_grad(), _Count() as count:
            subject.run(x)
    except Exception:  # what cannot run under a dispatch mode is judged by its parameters
        target = subject.target
        numbers = sum(each.numel() for each in target.parameters()) if isinstance(target, nn.Module) else 0
        return RunWork(UNMEASURED, numbers)
    return RunWork(max(count.operations, 1), count.elements)


def select_cases(
    cases: Sequence[Case],
    work: RunWork,
    budget: float,
    minimum: int,
    kind_of: Callable[[Case], Hashable] = lambda case: None,
) -> list[Case]:
    """The cases that a budget pays for, in their order: half of them the first ones, half spread over the others.

    At least `minimum`; where the budget pays for fewer, the spread ones are taken from the cheaper half. The first
    case of each of the first `minimum` kinds is always among them.
    """
    prices = [work.of(case) for case in cases]
    if sum(prices) <= budget:
        return list(cases)
    average = sum(prices) / len(prices)
    number = min(max(int(budget / average), minimum), len(cases))
    first = number - number // 2
    others = list(range(first, len(cases)))
    if number <= minimum:
        median = sorted(prices)[len(prices) // 2]
        cheap = [place for place in others if prices[place] <= median]
        others = cheap if len(cheap) >= number - first else others
    spread = number - first
    chosen = [*range(first), *(others[(place + 1) * len(others) // spread - 1] for place in range(spread))]
    first_of_kind: dict[Hashable, int] = {}
    for place, case in enumerate(cases):
        first_of_kind.setdefault(kind_of(case), place)
    chosen += list(first_of_kind.values())[:minimum]
    return [cases[place] for place in sorted(set(chosen))]


def _count_tokens(case: Case) -> int:
    sizes = [int(case[name]) for name in ("tokens", "queries", "keys") if isinstance(case.get(name), int)]
    return max([*sizes, 1]) * int(case.get("batch", ROWS))
