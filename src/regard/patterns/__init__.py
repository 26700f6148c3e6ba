"""Patterns: which pairs of a query and a key may interact."""

from __future__ import annotations

from regard.patterns.base import Pattern
from regard.patterns.box import Grid, Lengths
from regard.patterns.compose import And, Not, Or
from regard.patterns.drawing import Drawing, gallery
from regard.patterns.grid import Axial, GridStride, GridWindow, Neighborhood
from regard.patterns.mask import Mask
from regard.patterns.parse import parse_pattern
from regard.patterns.random import Random
from regard.patterns.receptive_field import layers_to_connect
from regard.patterns.rows import Padding, Segments
from regard.patterns.sequence import Blocks, Causal, First, Full, Selected, Strided, Window
from regard.patterns.where import Where

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
    Mask,
    Where,
)


def read_pattern(expression: str) -> Pattern:
    """The pattern that prints as `expression`; the text is parsed, never run.

    >>> read_pattern("Causal() & ~Window(3, 0, step=2)")
    Causal() & ~Window(3, 0, step=2)
    """
    return parse_pattern(expression, {kind.__name__: kind for kind in EVERY if kind not in (Mask, Where)})


__all__ = [
    "EVERY",
    "And",
    "Axial",
    "Blocks",
    "Causal",
    "Drawing",
    "First",
    "Full",
    "Grid",
    "GridStride",
    "GridWindow",
    "Lengths",
    "Mask",
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
    "layers_to_connect",
    "read_pattern",
]
