"""What to feed a target: given by the caller, or guessed from what the module says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from regard.cost.asked import Asked
from regard.cost.letters import MEANINGS
from regard.cost.trace.subject import Subject
from regard.errors import CostError

TOKENS, CONTEXT, PIXELS = 128, 96, 64  # where nobody says how many; they stay letters
STRIDE = 32  # pixels by which images are varied: what most networks for images are built for


@dataclass(frozen=True, eq=False)
class Shape:
    """A tensor to be made: sizes, some of them letters; in which numbers, `None` for the module's; whether it learns.

    What learns is what something before it would have made: tokens inside a network do, images and ids do not.
    """

    axes: tuple[int | str, ...]
    dtype: torch.dtype | None = None
    learns: bool = False

    def at(self, sizes: Mapping[str, int], dtype: torch.dtype) -> Tensor:
        shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.axes)
        made = torch.zeros(shape, dtype=self.dtype or dtype)
        return made.requires_grad_() if self.learns and made.is_floating_point() else made


@dataclass
class Fed:
    """Arguments with `Shape` in place of tensors, and the letters in them.

    Attributes:
        sizes: a number for every letter.
        known: letters whose number the caller gave, or the module has.
        steps: by how much a letter is varied, where not by one.
        limits: the largest number of a letter that the module is for.
        otherwise: the same with letters on more axes, if those here do not go together.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    steps: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    otherwise: Fed | None = None

    def made(self, sizes: Mapping[str, int], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments; one `Shape` in two places is one tensor."""
        tensors: dict[int, Tensor] = {}

        def make(value: Any) -> Any:
            if isinstance(value, Shape):
                if id(value) not in tensors:
                    tensors[id(value)] = value.at(sizes, dtype)
                return tensors[id(value)]
            if isinstance(value, Mapping):
                return {key: make(each) for key, each in value.items()}
            if isinstance(value, list | tuple):
                return type(value)(make(each) for each in value)
            return value

        return tuple(make(value) for value in self.args), {key: make(value) for key, value in self.kwargs.items()}

    @property
    def letters(self) -> list[str]:
        """The letters that occur."""
        return [name for name in self.sizes if any(name in shape.axes for shape in self.shapes())]

    def shapes(self) -> list[Shape]:
        found: list[Shape] = []

        def look(value: Any) -> None:
            if isinstance(value, Shape):
                found.append(value)
            elif isinstance(value, Mapping | list | tuple):
                for each in value.values() if isinstance(value, Mapping) else value:
                    look(each)

        look(self.args)
        look(self.kwargs)
        return found


def feed(subject: Subject, asked: Asked) -> Fed:
    """What to feed a subject."""
    if asked.inputs is not None:
        return given(asked)
    from regard.cost.trace.guessing import guessed

    fed = guessed(subject, asked)
    if fed is None:
        raise CostError(
            f"Nobody knows what {subject.name} reads.",
            asked=f"cost({subject.name})",
            because="it is no model or layer that says what its input is, and no inputs were given",
            instead='cost(..., inputs=(1, 128, 512)), or with letters: inputs=("B", "N", 512), tokens=128; '
            "from a shell --input 1,128,512, once for each input",
        )
    _check_read(subject, asked, fed)
    return fed


def _check_read(subject: Subject, asked: Asked, fed: Fed) -> None:
    """Refuses a size that nothing it reads has."""
    for size, letters in {"image": "RW", "tokens": "N", "keys": "M", "context_tokens": "T"}.items():
        if getattr(asked, size) is None or set(letters) & set(fed.letters):
            continue
        read = " and ".join(f"({', '.join(map(str, shape.axes))})" for shape in fed.shapes())
        others = [
            name for name in ("tokens", "image") if name != size and {"tokens": "N", "image": "R"}[name] in fed.letters
        ]
        raise CostError(
            f"{subject.name} reads nothing that has {'an image' if size == 'image' else size}.",
            asked=f"cost({subject.name}, {size}={getattr(asked, size)})",
            found=f"inputs {read}",
            because=f"it would cost the same with any other {size}",
            instead=f"{others[0]}=..., or inputs=..." if others else f"the question without {size}, or inputs=...",
        )


# Given by the caller


def given(asked: Asked) -> Fed:
    """Tensors, shapes, and tuples or dictionaries of them. Sizes in a shape may be letters: `("B", "N", 512)`."""
    sizes = sizes_of(asked)
    known: set[str] = {"B"} | {name for name in asked_sizes(asked)}
    inputs = asked.inputs

    def read(value: Any) -> Any:
        if isinstance(value, Tensor):
            return Shape(tuple(value.shape), value.dtype, value.requires_grad)
        if _is_shape(value):
            axes = tuple(_axis(size) for size in value)
            return Shape(axes, None, learns=len(axes) != 4)
        if isinstance(value, Mapping):
            return {key: read(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(read(each) for each in value)
        return value

    if isinstance(inputs, Mapping):
        fed = Fed((), {key: read(value) for key, value in inputs.items()}, sizes, known)
    else:
        alone = isinstance(inputs, Tensor) or _is_shape(inputs)
        fed = Fed((read(inputs),) if alone else tuple(read(value) for value in inputs), {}, sizes, known)
    if not any(isinstance(axis, str) for shape in fed.shapes() for axis in shape.axes):
        return _lettered(fed, asked)
    return fed


def _is_shape(value: Any) -> bool:
    whole = isinstance(value, list | tuple) and len(value) > 0
    return whole and all(isinstance(size, int | str) and not isinstance(size, bool) for size in value)


def _axis(size: int | str) -> int | str:
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


def _lettered(fed: Fed, asked: Asked) -> Fed:
    """Letters for shapes of plain numbers: N where a size is the `tokens` asked for, B for a first size they share.

    A weight may have as many channels as there are tokens, so that N is first put where the first input has it, and on
    the same axis of those that have as many axes; on every axis of that size only if this does not go together.
    """
    shapes = fed.shapes()
    first = {shape.axes[0] for shape in shapes if len(shape.axes) > 1}
    shared = len(first) == 1 and all(len(shape.axes) > 1 for shape in shapes)
    batch = next(iter(first)) if shared else None
    numbers = {asked.tokens: "N", asked.context_tokens: "T", asked.keys: "M"}
    numbers.pop(None, None)
    homes: dict[str, tuple[int, int]] = {}
    for shape in shapes:
        for place, axis in enumerate(shape.axes):
            if axis in numbers and not (place == 0 and axis == batch and len(shape.axes) > 2):
                homes.setdefault(numbers[axis], (len(shape.axes), place))

    def named(shape: Shape, everywhere: bool) -> Shape:
        axes: list[int | str] = []
        for place, axis in enumerate(shape.axes):
            name = numbers.get(axis)  # type: ignore[call-overload]
            at_home = name is not None and homes.get(name) == (len(shape.axes), place)
            if name is not None and (everywhere or at_home):
                axes.append(name)
            else:
                axes.append("B" if place == 0 and batch is not None and axis == batch else axis)
        return Shape(tuple(axes), shape.dtype, shape.learns)

    def read(value: Any, everywhere: bool) -> Any:
        if isinstance(value, Shape):
            return named(value, everywhere)
        if isinstance(value, Mapping):
            return {key: read(each, everywhere) for key, each in value.items()}
        return type(value)(read(each, everywhere) for each in value) if isinstance(value, list | tuple) else value

    sizes = {**fed.sizes, **({"B": int(batch)} if isinstance(batch, int) else {})}
    all_of_them = Fed(read(fed.args, True), read(fed.kwargs, True), sizes, fed.known)
    made = Fed(read(fed.args, False), read(fed.kwargs, False), sizes, fed.known)
    if [shape.axes for shape in made.shapes()] != [shape.axes for shape in all_of_them.shapes()]:
        made.otherwise = all_of_them
    return made


KEYWORDS = {"B": "batch", "N": "tokens", "M": "keys", "T": "context_tokens", "R": "rows", "W": "columns"}


def asked_sizes(asked: Asked) -> dict[str, int]:
    """Letters that the caller gave a number."""
    rows, columns = asked.image or (None, None)
    every = {"N": asked.tokens, "M": asked.keys, "T": asked.context_tokens, "R": rows, "W": columns}
    return {name: size for name, size in every.items() if size is not None}


def sizes_of(asked: Asked) -> dict[str, int]:
    base = {"N": TOKENS, "M": CONTEXT, "T": CONTEXT, "R": PIXELS, "W": PIXELS}
    return {"B": asked.batch, **base, **asked_sizes(asked)}
