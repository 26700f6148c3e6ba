"""The longest path through what ran, and what becomes of a softmax.

Every tensor is ready when the operation that wrote into its memory is: views share memory, and what is changed in place
is ready anew. The way back begins when the forward way is done, so the depth of a training step is the sum of both.
"""

from __future__ import annotations

from collections.abc import Callable

from regard.cost_model.trace.operation import Operation

# Products that sum values with weights; what softmaxes and exponentials become on their way there.
SUMS = {"aten.bmm", "aten.mm", "aten.baddbmm", "aten.addmm", "aten.addbmm", "aten.mv"}
SOFTMAXES = {"aten._softmax", "aten._safe_softmax", "aten.exp", "aten.exp_"}
PASSING = {f"aten.{name}" for name in ("clone", "_to_copy", "mul", "div", "add", "where", "masked_fill", "cat",
                                       "native_dropout", "mul_", "div_", "add_", "masked_fill_")}  # fmt: skip


def longest(operations: list[Operation], steps: Callable[[int], int], backward: bool) -> list[int]:
    """The operations of one way on its longest path, by their places; `steps` says how deep each one is."""
    ready: dict[int, int] = {}  # memory: when it is ready
    maker: dict[int, int] = {}  # memory: which operation wrote it last
    before: dict[int, int | None] = {}
    deepest, last = 0, None
    for place, operation in enumerate(operations):
        if operation.backward != backward:
            continue
        latest, source = 0, None
        for operand in operation.reads.values():
            when = ready.get(operand.storage, 0)
            if when > latest:
                latest, source = when, maker[operand.storage]
        own = steps(place)
        before[place] = source
        for operand in operation.writes:
            ready[operand.storage], maker[operand.storage] = latest + own, place
        if latest + own > deepest:
            deepest, last = latest + own, place
    path: list[int] = []
    while last is not None:
        path.append(last)
        last = before[last]
    return path[::-1]


def mark_pairs(operations: list[Operation], learned: set[int]) -> None:
    """Mark the softmaxes with which a product sums values: those are attention, others are probabilities of classes.

    learned: the memory of parameters. A product with one of these mixes channels, and sums no values.
    """
    weights: dict[int, set[int]] = {}  # memory: the softmaxes whose weights it holds
    for place, operation in enumerate(operations):
        if operation.backward:
            continue
        held: set[int] = set()
        for operand in operation.reads.values():
            held |= weights.get(operand.storage, set())
        if operation.name in SUMS:
            mixes = any(operand.storage in learned for operand in operation.reads.values())
            for softmax in () if mixes else held:
                operations[softmax].pairs = True
            held = set()
        elif operation.name in SOFTMAXES:
            held = {place}
        elif operation.name not in PASSING:
            held = set()
        for operand in operation.writes:
            weights[operand.storage] = held if not operation.changes else weights.get(operand.storage, set()) | held
