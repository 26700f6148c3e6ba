"""The critical path through the operations of a run, and which softmaxes are attention.

A tensor is ready when the operation that wrote into its memory is done: views share memory, and what is changed in
place is ready anew. The backward pass begins when the forward pass is done, so the depth of a training step is the sum
of both.
"""

from __future__ import annotations

from collections.abc import Callable

from regard.cost_model.trace.operation import Operation

# Products that sum values with weights; what softmaxes and exponentials pass through on their way there.
SUMS = {"aten.bmm", "aten.mm", "aten.baddbmm", "aten.addmm", "aten.addbmm", "aten.mv"}
SOFTMAXES = {"aten._softmax", "aten._safe_softmax", "aten.exp", "aten.exp_"}
PASSING = {f"aten.{name}" for name in ("clone", "_to_copy", "mul", "div", "add", "where", "masked_fill", "cat",
                                       "native_dropout", "mul_", "div_", "add_", "masked_fill_")}  # fmt: skip


def find_critical_path(operations: list[Operation], depth_of: Callable[[int], int], backward: bool) -> list[int]:
    """The operations of one pass on its longest path, by their indices; `depth_of` gives the depth of each."""
    ready: dict[int, int] = {}  # storage: when it is ready
    maker: dict[int, int] = {}  # storage: which operation wrote it last
    before: dict[int, int | None] = {}
    deepest, last = 0, None
    for index, operation in enumerate(operations):
        if operation.backward != backward:
            continue
        latest, source = 0, None
        for storage in operation.storages_read():
            when = ready.get(storage, 0)
            if when > latest:
                latest, source = when, maker[storage]
        done = latest + depth_of(index)
        before[index] = source
        for storage in operation.storages_written():
            ready[storage], maker[storage] = done, index
        if done > deepest:
            deepest, last = done, index
    path: list[int] = []
    while last is not None:
        path.append(last)
        last = before[last]
    return path[::-1]


def mark_attention(operations: list[Operation], learned: set[int]) -> None:
    """Mark the softmaxes with which a product sums values: those are attention, others are class probabilities.

    learned: the storages of parameters. A product with one of these mixes channels, and sums no values.
    """
    separable = {operation.path for operation in operations if operation.name == "regard.separable_attention"}
    weights: dict[int, set[int]] = {}  # storage: the softmaxes whose weights it holds
    for index, operation in enumerate(operations):
        if operation.backward:
            continue
        held: set[int] = set()
        for operand in operation.reads.values():
            held |= weights.get(operand.storage, set())
        if operation.name in SUMS:
            mixes = any(operand.storage in learned for operand in operation.reads.values())
            for softmax in () if mixes else held:
                operations[softmax].is_attention = True
                operations[softmax].is_factor = operations[softmax].path in separable
            held = set()
        elif operation.name in SOFTMAXES:
            held = {index}
        elif operation.name not in PASSING:
            held = set()
        for operand in operation.writes:
            weights[operand.storage] = held if not operation.mutates else weights.get(operand.storage, set()) | held
