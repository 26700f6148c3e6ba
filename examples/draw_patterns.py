"""Draw every pattern, and the patterns of well-known models, on one sheet.

    python examples/draw_patterns.py docs/pictures/patterns.svg

redraws the picture in the README. Without a path the sheet is written to out/patterns.svg.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from regard import (
    Axial,
    Blocks,
    Causal,
    First,
    Full,
    GridStride,
    GridWindow,
    Mask,
    Neighborhood,
    Padding,
    Pattern,
    Random,
    Segments,
    Selected,
    Strided,
    Where,
    Window,
    gallery,
)
from regard.patterns import EVERY, Drawing

TOKENS = 24  # of every sequence on the sheet
GRID = (4, 6)  # the same tokens as an image
WIDE = (9, 13)  # the image on which one token's view is drawn
DOCUMENTS = [0] * 7 + [1] * 11 + [2] * 6


def butterfly(i: Tensor, j: Tensor) -> Tensor:
    """Positions that differ in at most one bit."""
    bits = i ^ j
    return (bits & (bits - 1)) == 0


# A pattern, and what it says in a few words.
SEQUENCES: list[tuple[Pattern, str]] = [
    (Full(), "everything"),
    (Causal(), "itself and the past"),
    (Window(2, 2), "two on each side"),
    (Window(3, 0, step=3), "dilated, into the past"),
    (Strided(4), "every fourth token"),
    (First(2), "two global tokens"),
    (Selected([5, 14]), "chosen global tokens"),
    (Blocks(6), "its own block"),
    (Random(3, 0), "three drawn per query"),
    (Mask(torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) < 0.3), "any boolean tensor"),
    (Where(butterfly), "any predicate"),
    (Segments(DOCUMENTS), "three packed documents"),
    (Padding([17, 24]), "batch row 0: 17 real keys"),
]
GRIDS: list[tuple[Pattern, str]] = [
    (Neighborhood(GRID, 1), "clipped at the border"),
    (Neighborhood(GRID, 1, edges="shift"), "whole at the border"),
    (GridWindow(GRID, (2, 3)), "its own window"),
    (GridWindow(GRID, (2, 3), shift=1), "shifted windows (Swin)"),
    (GridStride(GRID, (2, 3)), "equal residues"),
    (Axial(GRID), "its own row and column"),
]
COMPOSED: list[tuple[Pattern, str]] = [
    (First(1) | Neighborhood(GRID, 1, start=1), "class token, then image"),
    (Window(2, 2) | First(1) | Random(2, 0), "BigBird"),
    (Window(2, 2, step=2) | Selected([0]), "Longformer, dilated"),
    (Causal() & (Window(3, 0) | Strided(4)), "Sparse Transformer"),
    (Causal() & (First(2) | Window(5, 0)), "attention sinks"),
    (Causal() & Segments(DOCUMENTS), "a packed decoder"),
]
VIEWS: list[tuple[Pattern, tuple[int, int]]] = [
    (Neighborhood(WIDE, 2), (4, 6)),
    (Neighborhood(WIDE, 2, edges="shift"), (0, 12)),
    (GridWindow(WIDE, 3, shift=1), (4, 6)),
    (GridStride(WIDE, 3), (4, 6)),
    (Axial(WIDE), (4, 6)),
]


def masks() -> list[Drawing]:
    """Rows are queries, columns are keys."""
    drawn = []
    for pattern, caption in SEQUENCES + GRIDS + COMPOSED:
        mask = pattern.matrix(TOKENS)
        title = repr(pattern).replace(repr(Segments(DOCUMENTS)), "Segments(ids)")
        drawn.append(Drawing(mask if mask.ndim == 2 else mask[0], title, caption))
    return drawn


def views() -> list[Drawing]:
    """What one token of an image sees, drawn on the image."""
    drawn = []
    for pattern, (row, column) in VIEWS:
        visible = pattern.matrix(WIDE[0] * WIDE[1])[row * WIDE[1] + column].reshape(WIDE)
        drawn.append(Drawing(visible, repr(pattern), f"seen by row {row}, column {column}", mark=(row, column)))
    return drawn


def cache() -> Drawing:
    return Drawing(Causal().matrix(7, TOKENS), "Causal()", "a cache: 7 queries, 24 keys")


def sheet() -> str:
    """The whole gallery as one SVG document."""
    note = "Rows are queries, columns are keys, filled may attend. Last line: the image as one token (orange) sees it."
    return gallery([*masks(), cache(), *views()], columns=5, size=170, note=note)


def main() -> None:
    missing = set(EVERY) - {type(pattern) for pattern, _ in SEQUENCES + GRIDS}
    assert not missing, f"the sheet lacks {missing}"
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "out/patterns.svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(sheet(), encoding="utf-8")
    print(f"{len(masks()) + 1 + len(views())} pictures in {path}")


if __name__ == "__main__":
    main()
