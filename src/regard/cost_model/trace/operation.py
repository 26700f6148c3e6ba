"""What is written down of an operation: its name, where it ran, and the shapes of what it read and wrote."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Operand(NamedTuple):
    """A tensor that an operation reads or writes.

    Attributes:
        shape: whole numbers while it is recorded, formulas afterwards.
        item: bytes of a number.
        storage: which memory it lies in; views of one tensor have one storage.
        repeated: axes along which the same memory is read again and again, as `expand` makes them.
        floating: whether its numbers have a point.
        again: whether the operation has it among its arguments already, as in `x * x`.
    """

    shape: tuple[Any, ...]
    item: int
    storage: int = 0
    repeated: tuple[bool, ...] = ()
    floating: bool = True
    again: bool = False

    @property
    def numel(self) -> Any:
        return product(self.shape)

    @property
    def bytes(self) -> Any:
        """Of the memory behind it, each number once."""
        repeated = self.repeated or (False,) * len(self.shape)
        return self.item * product(size for size, again in zip(self.shape, repeated, strict=True) if not again)


@dataclass(slots=True)
class Operation:
    """An operation that ran.

    Attributes:
        name: as torch calls it, such as `aten.mm`.
        path: the module in which it ran, or whose forward operation it is the gradient of.
        backward: whether it ran on the way back.
        reads: the tensors among its arguments, by the names of its schema; a list has several: `tensors.0`.
        writes: the tensors it returned.
        words: other arguments that its cost depends on, and that no size changes.
        numbers: whole numbers that its cost depends on, and that sizes may change: the pairs of a pattern.
        changes: whether it writes into one of its arguments.
        pairs: whether it makes weights with which another product sums values; `walking` finds out.
    """

    name: str
    path: str
    backward: bool
    reads: dict[str, Operand]
    writes: tuple[Operand, ...]
    words: tuple[Any, ...] = ()
    numbers: tuple[Any, ...] = ()
    changes: bool = False
    pairs: bool = field(default=False)

    def sizes(self) -> Iterable[Any]:
        """Every size there is, in a fixed order."""
        for operand in (*self.reads.values(), *self.writes):
            yield from operand.shape
        yield from self.numbers

    def skeleton(self) -> tuple[Any, ...]:
        """All but the sizes: equal for the same step of two runs."""
        shapes = tuple((name, len(one.shape), one.item) for name, one in self.reads.items())
        return (self.name, self.path, self.backward, shapes, tuple((len(one.shape), one.item) for one in self.writes),
                self.words, len(self.numbers))  # fmt: skip

    def with_sizes(self, sizes: list[Any], repeated: list[tuple[bool, ...]]) -> Operation:
        """The same operation with other sizes, in the order of `sizes()`."""
        left, again = iter(sizes), iter(repeated)

        def renewed(operand: Operand) -> Operand:
            return operand._replace(shape=tuple(next(left) for _ in operand.shape), repeated=next(again), storage=0)

        reads = {name: renewed(operand) for name, operand in self.reads.items()}
        writes = tuple(renewed(operand) for operand in self.writes)
        numbers = tuple(next(left) for _ in self.numbers)
        return Operation(
            self.name, "", self.backward, reads, writes, self.words, numbers, self.changes, pairs=self.pairs
        )


def product(sizes: Iterable[Any]) -> Any:
    made: Any = 1
    for size in sizes:
        made = made * size
    return made


def noted(tensor: Tensor) -> Operand:
    """What is kept of a tensor."""
    shape = tuple(tensor.shape)
    if tensor.layout is not torch.strided:
        return Operand(shape, tensor.element_size(), 0, (False,) * len(shape), tensor.is_floating_point())
    strides = tensor.stride()
    repeated = tuple(step == 0 and size > 1 for size, step in zip(shape, strides, strict=True))
    storage = tensor.untyped_storage()._cdata
    return Operand(shape, tensor.element_size(), storage, repeated, tensor.is_floating_point())


def tensors_of(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among named arguments; those in a list have numbers behind the name."""
    found: dict[str, Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, list | tuple):
            found.update({f"{name}.{i}": each for i, each in enumerate(value) if isinstance(each, Tensor)})
    return found


def arguments_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the operator's schema."""
    names = [argument.name for argument in operator._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
