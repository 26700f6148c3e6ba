"""One recorded operation: its name, the module it ran in, and the shapes of its operands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.attention import Attention


class Operand(NamedTuple):
    """A tensor that an operation reads or writes.

    Attributes:
        shape: integers in a recorded operation, expressions in a symbolic one.
        item: bytes of an element.
        storage: identifies the memory; views of one tensor have one storage.
        repeated: axes of stride 0, as `expand` makes them.
        floating: whether it has a floating-point dtype.
        again: whether the same tensor is an earlier argument already, as in `x * x`.
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
        """Of the memory behind it, each element once."""
        repeated = self.repeated or (False,) * len(self.shape)
        return self.item * product(size for size, again in zip(self.shape, repeated, strict=True) if not again)


@dataclass(slots=True)
class Operation:
    """An operation that ran.

    Attributes:
        name: as torch calls it, such as `aten.mm`; `regard.attend` and `regard.attend_backward` are whole attentions.
        path: the module in which it ran, or whose forward operation it is the gradient of.
        backward: whether it ran in the backward pass.
        reads: the tensors among its arguments, by the names of its schema; a list has several: `tensors.0`.
        writes: the tensors it returned.
        constants: other arguments that its cost depends on, and that no size changes.
        mutates: whether it writes into one of its arguments.
        is_attention: whether it computes weights with which another product sums values; see `critical_path`.
        is_factor: whether these weights are one factor of those of an attention, whose pairs are counted elsewhere.
        attention: the description of an attention that is one operation.
        grid: rows and columns of the grid that the pattern or the bias of that attention is about.
        storages: the storages that such an operation reads and writes beside its operands.
    """

    name: str
    path: str
    backward: bool
    reads: dict[str, Operand]
    writes: tuple[Operand, ...]
    constants: tuple[Any, ...] = ()
    mutates: bool = False
    is_attention: bool = False
    is_factor: bool = False
    attention: Attention | None = None
    grid: tuple[Any, ...] = ()
    storages: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def sizes(self) -> Iterable[Any]:
        """Every size of every operand, in a fixed order, and of the grid."""
        for operand in (*self.reads.values(), *self.writes):
            yield from operand.shape
        yield from self.grid

    def structure(self) -> tuple[Any, ...]:
        """All but the sizes: equal for the same operation of two runs."""
        shapes = tuple((name, len(one.shape), one.item) for name, one in self.reads.items())
        return (self.name, self.path, self.backward, shapes, tuple((len(one.shape), one.item) for one in self.writes),
                self.constants)  # fmt: skip

    def with_sizes(self, sizes: list[Any], repeated: list[tuple[bool, ...]]) -> Operation:
        """The same operation with other sizes, in the order of `sizes()`."""
        left, flags = iter(sizes), iter(repeated)

        def resize(operand: Operand) -> Operand:
            return operand._replace(shape=tuple(next(left) for _ in operand.shape), repeated=next(flags), storage=0)

        reads = {name: resize(operand) for name, operand in self.reads.items()}
        writes = tuple(resize(operand) for operand in self.writes)
        return Operation(self.name, self.path, self.backward, reads, writes, self.constants, self.mutates,
                         self.is_attention, self.is_factor, self.attention, tuple(left))  # fmt: skip

    def storages_read(self) -> Iterable[int]:
        yield from (operand.storage for operand in self.reads.values())
        yield from self.storages[0]

    def storages_written(self) -> Iterable[int]:
        yield from (operand.storage for operand in self.writes)
        yield from self.storages[1]


def product(sizes: Iterable[Any]) -> Any:
    result: Any = 1
    for size in sizes:
        result = result * size
    return result


def describe_tensor(tensor: Tensor, storage: int) -> Operand:
    if tensor.is_nested:  # rows of different lengths
        return Operand((), tensor.element_size(), storage)
    shape = tuple(tensor.shape)
    if tensor.layout is not torch.strided:
        return Operand(shape, tensor.element_size(), storage, (False,) * len(shape), tensor.is_floating_point())
    repeated = tuple(step == 0 and size > 1 for size, step in zip(shape, tensor.stride(), strict=True))
    return Operand(shape, tensor.element_size(), storage, repeated, tensor.is_floating_point())


def named_tensors(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among named arguments; those in a list have their index behind the name."""
    found: dict[str, Tensor] = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, list | tuple):
            found.update({f"{name}.{i}": each for i, each in enumerate(value) if isinstance(each, Tensor)})
    return found


def bind_arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the operator's schema."""
    names = [argument.name for argument in operator._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
