"""Which pairs of a query and a key may interact: every pattern, and what one can ask it."""

from __future__ import annotations

from regard.patterns.base import And, Not, Or, Pattern
from regard.patterns.box import Lengths
from regard.patterns.draw import Drawing, gallery
from regard.patterns.grid import Axial, GridStride, GridWindow, Neighborhood
from regard.patterns.random import Random
from regard.patterns.reach import layers_to_connect
from regard.patterns.reading import read
from regard.patterns.rows import Padding, Segments
from regard.patterns.sequence import Blocks, Causal, First, Full, Selected, Strided, Window
from regard.patterns.where import Where

# isort: split
# After `patterns.reach` (the module), so that the name `reach` is the function.
from regard.patterns.past import has_past, reach, shiftable

EVERY: tuple[type[Pattern], ...] = (
    Full,
    Causal,
    Window,
    Strided,
    First,
    Selected,
    Random,
    Blocks,
    Segments,
    Padding,
    Neighborhood,
    GridWindow,
    GridStride,
    Axial,
    Where,
)


def read_pattern(expression: str) -> Pattern:
    """The pattern that prints as `expression`; the text is parsed, never run.

    >>> read_pattern("Causal() & ~Window(3, 0, step=2)")
    Causal() & ~Window(3, 0, step=2)
    """
    return read(expression, {kind.__name__: kind for kind in EVERY if kind is not Where})


__all__ = [
    "EVERY",
    "And",
    "Axial",
    "Blocks",
    "Causal",
    "Drawing",
    "First",
    "Full",
    "GridStride",
    "GridWindow",
    "Lengths",
    "Neighborhood",
    "Not",
    "Or",
    "Padding",
    "Pattern",
    "Random",
    "Segments",
    "Selected",
    "Strided",
    "Where",
    "Window",
    "gallery",
    "has_past",
    "layers_to_connect",
    "reach",
    "read_pattern",
    "shiftable",
]
