"""The rule for attention inside the windows of a grid."""

from __future__ import annotations

from dataclasses import dataclass, replace

import sympy

from regard.cost_model import depth
from regard.cost_model.asked import Asked, Counted
from regard.cost_model.letters import letter, letters
from regard.cost_model.part import ZERO, Part, Work
from regard.cost_model.rules.grids import Number, grid_values, only_images, singles_of
from regard.cost_model.rules.pairs import Pairs
from regard.cost_model.rules.pieces import linear
from regard.cost_model.rules.shape import Shape
from regard.cost_model.rules.visits import visits_of
from regard.cost_model.setting import Setting
from regard.layers.windows import WindowAttention
from regard.patterns import Full, GridWindow


@dataclass(frozen=True)
class Windows:
    """A `WindowAttention` on a grid: its sizes in letters, and the numbers that decide what is kept.

    Attributes:
        layer: the attention.
        batch, rows, columns, width, heads, window: letters; the window has rows and columns.
        size: the grid in numbers, if it is known.
        singles: how many images are worked on alone, not in a batch.
        visited: the letter of the pairs that a backend visits, if these are not counted by a formula.
    """

    layer: WindowAttention
    batch: Number
    rows: Number
    columns: Number
    width: Number
    heads: Number
    window: tuple[Number, Number]
    size: tuple[int, int] | None
    singles: int
    visited: sympy.Symbol

    @property
    def padded(self) -> tuple[Number, Number]:
        """Rows and columns of what is read, in letters."""
        if not self.layer.sees_padding:
            return self.rows, self.columns
        down, across = self.window
        return down * sympy.ceiling(self.rows / down), across * sympy.ceiling(self.columns / across)

    @property
    def is_padded(self) -> bool:
        """Whether the grid is known to end within a window, and is filled up."""
        ragged = self.size is not None and any(s % w for s, w in zip(self.size, self.layer.window, strict=True))
        return ragged and self.layer.sees_padding

    @property
    def pairs(self) -> sympy.Expr:
        """Pairs that meet in each head and row."""
        down, across = self.window
        if self.layer.sees_padding:
            tall, wide = self.padded
            return tall * down * wide * across
        return _squares(self.rows, down) * _squares(self.columns, across)

    def area(self, setting: Setting) -> tuple[sympy.Expr, dict[sympy.Symbol, int]]:
        """Pairs in each head and row that a backend computes, and the number of their letter, if they have one.

        The reference computes all pairs of the padded grid. The others follow a plan, which exists once the grid is
        known.
        """
        tall, wide = self.padded
        if setting.backend is None:
            return self.pairs, {}
        if setting.backend == "reference":
            return (tall * wide) ** 2, {}
        if self.size is None:
            return self.visited, {}
        return self.visited, {self.visited: self._visited(setting)}

    def _visited(self, setting: Setting) -> int:
        assert self.size is not None
        down, across = self.layer.window
        tall, wide = self.size
        if self.layer.sees_padding:
            tall, wide = -(-tall // down) * down, -(-wide // across) * across
        one = tall <= down and wide <= across
        pattern = Full() if one else GridWindow((tall, wide), (down, across))
        shape = replace(self._shape(sympy.Integer(tall * wide)), batch=sympy.Integer(1))
        visits = visits_of(pattern, shape, setting, Pairs(ZERO, {}))
        return replace(shape, values=visits.values).number(visits.area) or 0

    def _shape(self, tokens: Number) -> Shape:
        dim = self.width / self.heads
        return Shape(self.batch, tokens, tokens, self.heads, self.heads, dim, dim)

    def parts(self, setting: Setting, *, keeps: bool) -> list[Part]:
        """Projection, scores, softmax, values and projection.

            padded rows = window ceil(rows / window), and so for columns
            pairs = windows (window^2)^2                        if padding is seen
            pairs = sum over windows of (rows columns)^2        if not: windows at the edge are smaller

        keeps: whether the grid that comes in is this layer's to keep.
        """
        layer, (down, across), (tall, wide) = self.layer, self.window, self.padded
        read = self.batch * tall * wide
        bias = layer.qkv.bias is not None
        # What is kept is what qkv reads: the grid, or its padded copy, which belongs to nobody else.
        qkv = linear("qkv", setting, read, self.width, 3 * self.width, bias=bias, keeps=keeps or self.is_padded)
        # Heads come out one after the other and are copied side by side for the last product, which keeps the copy.
        # A single head or token lies right already; and heads of one channel are a transposed matrix, for one image.
        copied = ZERO if layer.heads == 1 or self._is_one_token else self.batch
        if copied != 0 and layer.dim == layer.heads:
            copied -= self.singles
        proj = linear("proj", setting, read, self.width, self.width, keeps=False)
        proj = replace(proj, kept=setting.item * copied * tall * wide * self.width)
        shape = self._shape(tall * wide)
        pairs, area = (shape.batch * shape.heads * each for each in (self.pairs, self.area(setting)[0]))
        longest = down * across
        if not layer.sees_padding:
            longest = sympy.Min(self.rows, down) * sympy.Min(self.columns, across)
        return [qkv, *meeting(shape, setting, longest=longest, met=pairs, area=area), proj]

    @property
    def _is_one_token(self) -> bool:
        return self.size == (1, 1) and (not self.layer.sees_padding or self.layer.window == (1, 1))


def meeting(shape: Shape, setting: Setting, *, longest: Number, met: Number, area: Number) -> list[Part]:
    """Scores, softmax and weighted sums of `met` pairs, `longest` to a query, where a backend computes `area` pairs.

    Counted as an attention that is only described is: queries come in scaled; tiles write no square and compute scores
    once more on the way back. Kernels keep queries, keys and values, the output, and a number for each softmax.
    """
    item, fused = setting.item, setting.backend in ("native", "blocked")
    square = ZERO if fused else area
    dim, sums = depth.inner(shape.dim, setting.serial), depth.inner(longest, setting.serial)
    read = shape.query + shape.key
    scores = Part(
        "scores",
        forward=Work(macs=area * shape.dim, bytes=item * (read + square), depth=dim),
        backward=Work(macs=(3 if fused else 2) * area * shape.dim, bytes=item * (2 * read + square), depth=sums),
        kept=item * read,
        pairs=met,
    )
    softmax = Part(
        "softmax",
        forward=Work(
            exponentials=area,
            bytes=item * (shape.rows if fused else 2 * area),
            depth=depth.softmax(longest, stable=setting.stable, serial=setting.serial),
        ),
        backward=Work(
            exponentials=area if fused else ZERO, bytes=item * (shape.rows if fused else 3 * area), depth=sums + 2
        ),
        kept=item * shape.rows,
    )
    values = Part(
        "values",
        forward=Work(macs=area * shape.value_dim, bytes=item * (square + shape.value + shape.output), depth=sums),
        backward=Work(
            macs=2 * area * shape.value_dim,
            bytes=item * (2 * square + 2 * shape.value + (2 if fused else 1) * shape.output),
            depth=depth.inner(shape.value_dim, setting.serial),
        ),
        kept=item * (shape.value + shape.output),
    )
    return [scores, softmax, values]


def _squares(length: Number, window: Number) -> sympy.Expr:
    """The sum of the squares of the lengths of windows that cut a line."""
    whole = sympy.floor(length / window)
    return whole * window**2 + (length - whole * window) ** 2


def _windows(layer: WindowAttention, asked: Asked, setting: Setting) -> Counted:
    only_images(layer, asked, setting)
    batch, rows, columns, width, heads, visited = letters("B R W D H Z")
    window, sides = window_letters(layer.window)
    values = {**grid_values(asked), width: layer.dim, heads: layer.heads, **sides}
    windows = Windows(layer, batch, rows, columns, width, heads, window, asked.image, singles_of(asked.batch), visited)
    return Counted("WindowAttention", windows.parts(setting, keeps=False), {**values, **windows.area(setting)[1]})


def window_letters(window: tuple[int, int]) -> tuple[tuple[sympy.Symbol, sympy.Symbol], dict[sympy.Symbol, int]]:
    """One letter for the side of a square window, two for another."""
    if window[0] == window[1]:
        side = letter("w")
        return (side, side), {side: window[0]}
    down, across = letter("w"), letter("u")
    return (down, across), {down: window[0], across: window[1]}


RULES = {WindowAttention: _windows}
