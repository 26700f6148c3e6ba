"""What rules are made of: products, norms, softmaxes, additions.

Each piece says what it costs forward and backward, what it keeps for the way back, and how deep it is. Sizes are sympy
expressions. A tensor that several pieces keep is one tensor in memory: `keeps` is False where another piece keeps the
same already, or where it is the model's own input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy

from regard.cost_model import depth
from regard.cost_model.letters import Values, agreed
from regard.cost_model.part import ZERO, Part, Work, inside
from regard.cost_model.setting import Setting

ONE = sympy.Integer(1)
# torch's indices are int64.
INDEX = 8


def linear(
    name: str,
    setting: Setting,
    rows: Any,
    inside: Any,
    out: Any,
    *,
    bias: Any = True,
    keeps: bool = True,
    learns_input: bool = True,
    parameters: bool = True,
) -> Part:
    """`y = x W^T + b` for `rows` rows: `rows inside out` multiply-adds, and as many for each of the two gradients.

    It keeps x, nothing else: the gradients are `dW = dy^T x`, `db` the sum of dy, `dx = dy W`.

    bias: True, False, or how many numbers it has where only some of the channels have one.
    learns_input: False where nothing before it learns, so that the gradient of x is not needed.
    parameters: False where the matrix belongs to another part too, which counts it; the bias is its own.
    """
    biases = out if bias is True else sympy.sympify(0 if bias is False else bias)
    matrix = inside * out
    weights = matrix + biases
    products = rows * inside * out
    forward = Work(
        macs=products,
        bytes=setting.item * (rows * inside + weights + rows * out),
        depth=depth.inner(inside, setting.serial) + (ZERO if biases == 0 else ONE),
    )
    # The weights' gradients read dy and x; that of x reads dy and W.
    back = rows * out + rows * inside + weights
    if learns_input:
        back += rows * out + matrix + rows * inside
    backward = Work(
        macs=products * (2 if learns_input else 1),
        bytes=setting.item * back,
        depth=depth.inner(out, setting.serial) if learns_input else depth.inner(rows, setting.serial),
    )
    return Part(
        name,
        parameters=sympy.sympify(weights if parameters else biases),
        forward=forward,
        backward=backward,
        kept=setting.item * rows * inside if keeps else ZERO,
    )


def elementwise(
    name: str, setting: Setting, numbers: Any, *, reads: int = 1, steps: int = 1, keeps: Any = ZERO
) -> Part:
    """A function of each number of `reads` tensors: no products; `keeps` numbers are kept for its derivative."""
    moved = setting.item * numbers * (reads + 1)
    return Part(
        name,
        forward=Work(bytes=moved, depth=sympy.Integer(steps)),
        backward=Work(bytes=moved, depth=sympy.Integer(steps)),
        kept=setting.item * keeps,
    )


def norm(
    name: str,
    setting: Setting,
    rows: Any,
    channels: Any,
    *,
    kind: str = "layer",
    keeps: bool = True,
    weight: bool = True,
    bias: bool | None = None,
) -> Part:
    """A norm over channels: `"layer"` has a mean and a bias, `"rms"` neither.

    Both keep their input and the statistics of every row: mean and 1/deviation, or 1/root alone. torch has one
    operator for the first; the second it takes apart, so that a product with the weight keeps `x / root` as well.

    keeps: whether its input is kept by it.
    weight, bias: whether it has them; as its kind does if not given.
    """
    centred = kind == "layer"
    bias = (centred and weight) if bias is None else bias
    weights = channels * (int(weight) + int(bias))
    kept = rows * (2 if centred else 1)
    if keeps:
        kept += rows * channels
    if not centred and weight:
        kept += rows * channels
    steps = depth.norm(channels, centred=centred, affine=int(weight) + int(bias), serial=setting.serial)
    return Part(
        name,
        parameters=sympy.sympify(weights),
        forward=Work(bytes=setting.item * (2 * rows * channels + weights), depth=steps),
        backward=Work(bytes=setting.item * (3 * rows * channels + 2 * weights), depth=steps),
        kept=setting.item * kept,
        normalised=rows * channels,
    )


def embedding(
    name: str,
    setting: Setting,
    rows: Any,
    count: Any,
    channels: Any,
    *,
    index: int = INDEX,
    parameters: bool = True,
    keeps: bool = False,
) -> Part:
    """Rows of a table, found by indices of `index` bytes: no products, no depth.

    It keeps the indices, to know where gradients go. Tokens are the model's own input; positions, which the model
    counts anew in every run, are not: `keeps`.
    """
    moved = setting.item * rows * channels
    return Part(
        name,
        parameters=sympy.sympify(count * channels if parameters else ZERO),
        forward=Work(bytes=2 * moved + index * rows),
        backward=Work(bytes=2 * moved + setting.item * count * channels),
        kept=index * rows if keeps else ZERO,
    )


def addition(name: str, setting: Setting, numbers: Any) -> Part:
    """A residual, or a position that is added: one step, nothing kept."""
    return elementwise(name, setting, numbers, reads=2)


def bent(name: str, setting: Setting, numbers: Any, activation: str, *, result_kept: bool = True) -> Part:
    """An activation. relu looks at its result again on the way back, all others at what they read.

    result_kept: whether what follows keeps the result too, as products and norms do; then relu keeps nothing more.
    """
    keeps = numbers if activation not in ("relu", "reglu", "tanh") or not result_kept else ZERO
    return elementwise(name, setting, numbers, keeps=keeps)


def copying(name: str, setting: Setting, numbers: Any) -> Part:
    """Numbers that are put in another order: traffic without work."""
    return elementwise(name, setting, numbers, steps=0)


# Several parts


def beside(name: str, *parts: Part) -> Part:
    """Parts that run at once, as one: they cost what all of them cost, and take as long as the longest."""
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    forward = dataclasses.replace(whole.forward, depth=sympy.Max(*(part.forward.depth for part in parts)))
    backward = dataclasses.replace(whole.backward, depth=sympy.Max(*(part.backward.depth for part in parts)))
    return dataclasses.replace(whole, name=name, forward=forward, backward=backward)


def aside(part: Part) -> Part:
    """A part that runs while another, which takes longer, runs too: it is not on the longest path."""
    return dataclasses.replace(
        part,
        forward=dataclasses.replace(part.forward, depth=ZERO),
        backward=dataclasses.replace(part.backward, depth=ZERO),
    )


def resting(part: Part) -> Part:
    """A part that is there, but is not run in this step: its parameters alone."""
    return Part(part.name, parameters=part.parameters)


def repeated(parts: Sequence[Part], count: Any) -> list[Part]:
    """Parts that come `count` times, one after the other."""
    return [part * count for part in parts]


class Found(NamedTuple):
    """Parts of something, the numbers of their letters, and remarks."""

    parts: list[Part]
    values: Values
    notes: tuple[str, ...] = ()

    def inside(self, prefix: str) -> Found:
        """The same as parts of something larger."""
        return self._replace(parts=inside(prefix, *self.parts))


def merged(*several: Found) -> Found:
    """Parts from different places. A letter that means one number here and another there becomes those numbers."""
    common = agreed(*(found.values for found in several))
    parts = []
    for some, values, _ in several:
        apart = {symbol for symbol in values if symbol not in common}
        parts += [part.settled(values, common) if apart else part for part in some]
    return Found(parts, common, tuple(dict.fromkeys(note for found in several for note in found.notes)))
