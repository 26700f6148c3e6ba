"""Example inputs of a target: given by the caller, or inferred from the module by `regard.adapters`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.adapters.example_inputs import ExampleInputs, InputSpec, infer_inputs
from regard.adapters.fake_copies import TracedTarget
from regard.cost_model.sizes import Sizes
from regard.cost_model.symbols import MEANINGS
from regard.errors import CostError
from regard.layers import Rotary

TOKENS, CONTEXT, PIXELS = 128, 96, 64  # where the caller gives none; they stay symbols


def make_example_inputs(subject: TracedTarget, given_sizes: Sizes) -> ExampleInputs:
    """The inputs that the caller gave, or those that the module takes."""
    if given_sizes.inputs is not None:
        return read_given_inputs(given_sizes)
    module = subject.module
    sizes, known = find_sizes(given_sizes), {"B", *list_given_sizes(given_sizes)}
    if isinstance(subject.target, Rotary):
        return _describe_rotary_inputs(subject.target, given_sizes, sizes, known)
    inputs = infer_inputs(module, sizes, known) if module is not None and subject.target is module else None
    if inputs is None:
        raise CostError(
            f"The inputs of {subject.name} cannot be inferred.",
            asked=f"cost({subject.name})",
            because="it is no model or layer that says what its input is, and no inputs were given",
            instead='cost(..., inputs=(1, 128, 512)), or with letters: inputs=("B", "N", 512), tokens=128; '
            "from a shell --input 1,128,512, once for each input",
        )
    _check_read(subject, given_sizes, inputs)
    return inputs


def _describe_rotary_inputs(
    rotary: Rotary, given_sizes: Sizes, sizes: dict[str, int], known: set[str]
) -> ExampleInputs:
    """Queries or keys of some heads, and the cosines and sines of their positions."""
    sizes, known = {**sizes, "H": given_sizes.heads or 1}, {*known, "H"}
    x = InputSpec(("B", "H", "N", given_sizes.dim or rotary.dim), requires_grad=True)
    tables = tuple(InputSpec(("N", rotary.dim // 2), torch.float32) for _ in range(2))
    return ExampleInputs((x, tables), {}, sizes, known)


def _check_read(subject: TracedTarget, given_sizes: Sizes, inputs: ExampleInputs) -> None:
    """Refuses a size that nothing it reads has."""
    for size, letters in {"image": "RW", "tokens": "N", "keys": "M", "context_tokens": "T"}.items():
        if getattr(given_sizes, size) is None or set(letters) & {*inputs.symbols, *inputs.numbers}:
            continue
        read = " and ".join(f"({', '.join(map(str, shape.axes))})" for shape in inputs.specs())
        others = [
            name for name, symbol in (("tokens", "N"), ("image", "R")) if name != size and symbol in inputs.symbols
        ]
        raise CostError(
            f"{subject.name} reads nothing that has {'an image' if size == 'image' else size}.",
            asked=f"cost({subject.name}, {size}={getattr(given_sizes, size)})",
            found=f"inputs {read}",
            because=f"it would cost the same with any other {size}",
            instead=f"{others[0]}=..., or inputs=..." if others else f"the question without {size}, or inputs=...",
        )


# Given by the caller


def read_given_inputs(given_sizes: Sizes) -> ExampleInputs:
    """Tensors, shapes, and tuples or dictionaries of them. Sizes in a shape may be letters: `("B", "N", 512)`."""
    sizes = find_sizes(given_sizes)
    known: set[str] = {"B"} | {name for name in list_given_sizes(given_sizes)}
    provided = given_sizes.inputs

    def read(value: Any) -> Any:
        if isinstance(value, Tensor):
            return InputSpec(tuple(value.shape), value.dtype, value.requires_grad)
        if _is_shape(value):
            axes = tuple(_read_axis(size) for size in value)
            return InputSpec(axes, None, requires_grad=len(axes) != 4)
        if isinstance(value, Mapping):
            return {key: read(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(read(each) for each in value)
        return value

    if isinstance(provided, Mapping):
        inputs = ExampleInputs((), {key: read(value) for key, value in provided.items()}, sizes, known)
    else:
        alone = isinstance(provided, Tensor) or _is_shape(provided)
        args = (read(provided),) if alone else tuple(read(value) for value in provided)
        inputs = ExampleInputs(args, {}, sizes, known)
    if not any(isinstance(axis, str) for shape in inputs.specs() for axis in shape.axes):
        return _name_axes(inputs, given_sizes)
    return inputs


def _is_shape(value: Any) -> bool:
    whole = isinstance(value, list | tuple) and len(value) > 0
    return whole and all(isinstance(size, int | str) and not isinstance(size, bool) for size in value)


def _read_axis(size: int | str) -> int | str:
    if isinstance(size, int):
        return size
    for letter, (keyword, _) in MEANINGS.items():
        if size in (letter, keyword) and letter in KEYWORDS:
            return letter
    raise CostError(
        f"No input has {size!r} on an axis.",
        asked=f"{size!r} in a shape",
        because=f"sizes that vary are {', '.join(f'{letter} ({keyword})' for letter, keyword in KEYWORDS.items())}",
        instead='inputs=("B", "N", 512)',
    )


def _name_axes(inputs: ExampleInputs, given_sizes: Sizes) -> ExampleInputs:
    """Letters for shapes of plain numbers: N where a size is the `tokens` asked for, B for a first size they share.

    A weight may have as many channels as there are tokens, so that N is first put where the first input has it, and on
    the same axis of those that have as many axes; on every axis of that size only if this does not go together.
    """
    shapes = inputs.specs()
    first = {shape.axes[0] for shape in shapes if len(shape.axes) > 1}
    shared = len(first) == 1 and all(len(shape.axes) > 1 for shape in shapes)
    batch = next(iter(first)) if shared else None
    numbers = {given_sizes.tokens: "N", given_sizes.context_tokens: "T", given_sizes.keys: "M"}
    numbers.pop(None, None)
    homes: dict[str, tuple[int, int]] = {}
    for shape in shapes:
        for place, axis in enumerate(shape.axes):
            if axis in numbers and not (place == 0 and axis == batch and len(shape.axes) > 2):
                homes.setdefault(numbers[axis], (len(shape.axes), place))

    def named(shape: InputSpec, everywhere: bool) -> InputSpec:
        axes: list[int | str] = []
        for place, axis in enumerate(shape.axes):
            name = numbers.get(axis)  # type: ignore[call-overload]
            at_home = name is not None and homes.get(name) == (len(shape.axes), place)
            if name is not None and (everywhere or at_home):
                axes.append(name)
            else:
                axes.append("B" if place == 0 and batch is not None and axis == batch else axis)
        return InputSpec(tuple(axes), shape.dtype, shape.requires_grad)

    def read(value: Any, everywhere: bool) -> Any:
        if isinstance(value, InputSpec):
            return named(value, everywhere)
        if isinstance(value, Mapping):
            return {key: read(each, everywhere) for key, each in value.items()}
        return type(value)(read(each, everywhere) for each in value) if isinstance(value, list | tuple) else value

    sizes = {**inputs.sizes, **({"B": int(batch)} if isinstance(batch, int) else {})}
    all_of_them = ExampleInputs(read(inputs.args, True), read(inputs.kwargs, True), sizes, inputs.known)
    made = ExampleInputs(read(inputs.args, False), read(inputs.kwargs, False), sizes, inputs.known)
    if [shape.axes for shape in made.specs()] != [shape.axes for shape in all_of_them.specs()]:
        made.alternative = all_of_them
    return made


KEYWORDS = {"B": "batch", "N": "tokens", "M": "keys", "T": "context_tokens", "R": "rows", "W": "columns"}


def list_given_sizes(given_sizes: Sizes) -> dict[str, int]:
    """Letters that the caller gave a number."""
    rows, columns = given_sizes.image or (None, None)
    every = {"N": given_sizes.tokens, "M": given_sizes.keys, "T": given_sizes.context_tokens, "R": rows, "W": columns}
    return {name: size for name, size in every.items() if size is not None}


def find_sizes(given_sizes: Sizes) -> dict[str, int]:
    base = {"N": TOKENS, "M": CONTEXT, "T": CONTEXT, "R": PIXELS, "W": PIXELS}
    return {"B": given_sizes.batch, **base, **list_given_sizes(given_sizes)}
