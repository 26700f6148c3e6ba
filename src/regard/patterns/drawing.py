"""Drawings of attention masks: text for a terminal, SVG for a page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from regard.render.colors import MASK_HIDDEN, MASK_VISIBLE
from regard.render.files import write_file
from regard.render.markup import Markup, element
from regard.render.svg import document

LINE, MARK = "#ffffff", "#e07a1f"
TITLE, CAPTION = "#222222", "#6b6459"
MONOSPACE = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SANS = "system-ui, 'Helvetica Neue', 'DejaVu Sans', sans-serif"
MARGIN, GAP, LEADING = 20.0, 22.0, 14.0
TITLE_SIZE, CAPTION_SIZE = 10.5, 10.5
# How wide a character is, as a share of the font's size: exact for monospace, cautious for the other.
TITLE_WIDTH, CAPTION_WIDTH = 0.61, 0.56
FINEST = 3.0  # pixels; smaller cells are drawn without lines between them


class Drawing:
    """A drawn mask: rows are queries, columns are keys, filled means *may attend*.

    `title` and `caption` are printed above the picture; `mark` is a `(row, column)` to highlight. Any boolean
    matrix can be drawn, here the keys of one query on an image:

        >>> from regard.patterns import Drawing
        >>> Drawing(Neighborhood((4, 6), 1).matrix(24)[13].reshape(4, 6), mark=(2, 1))
        ······
        ███···
        ███···
        ███···
    """

    def __init__(self, mask: Tensor, title: str = "", caption: str = "", mark: tuple[int, int] | None = None) -> None:
        self.mask = mask.cpu()
        self.title = title
        self.caption = caption
        self.mark = mark

    def __str__(self) -> str:
        lines = ["".join("█" if allowed else "·" for allowed in row) for row in self.mask.tolist()]
        return "\n".join(lines)

    __repr__ = __str__

    def svg(self, size: float = 180.0) -> str:
        """The picture as an SVG document, `size` pixels wide."""
        return gallery([self], columns=1, size=size)

    _repr_svg_ = svg

    def save(self, path: str | Path) -> Path:
        """Write the SVG picture to a file and return its path."""
        return write_file(path, self.svg())


def gallery(drawings: Iterable[Drawing], columns: int = 4, size: float = 180.0, note: str = "") -> str:
    """Many pictures on one SVG sheet, titles above, and a note at the foot."""
    drawings = list(drawings)
    columns = max(1, min(columns, len(drawings)))
    width = columns * (size + GAP) - GAP + 2 * MARGIN
    parts: list[Markup] = []
    top = MARGIN
    for start in range(0, len(drawings), columns):
        row = drawings[start : start + columns]
        titles = [_wrap_text(drawing.title, int(size / (TITLE_SIZE * TITLE_WIDTH))) for drawing in row]
        captions = [_wrap_text(drawing.caption, int(size / (CAPTION_SIZE * CAPTION_WIDTH))) for drawing in row]
        header = LEADING * max(len(title) + len(caption) for title, caption in zip(titles, captions, strict=True))
        for place, (drawing, title, caption) in enumerate(zip(row, titles, captions, strict=True)):
            left = MARGIN + place * (size + GAP)
            # Text is aligned to the picture below it: where a neighbour has more lines, the free space is above.
            free = header - LEADING * (len(title) + len(caption))
            parts += _draw_header(title, caption, left, top + free + LEADING - 4)
            parts += _draw_panel(drawing, left, top + header + 2, size)
        top += header + max(_panel_height(drawing, size) for drawing in row) + GAP
    if note:
        parts.append(_make_text(note, MARGIN, top + 4, CAPTION_SIZE, CAPTION, SANS))
        top += LEADING
    height = top - GAP + MARGIN + (8 if note else 0)
    background = element("rect", width=f"{width:g}", height=f"{height:g}", fill="white")
    return f"{document([background, *parts], width, height)}\n"


def _make_text(text: str, x: float, y: float, size: float, color: str, font: str) -> Markup:
    place = {"x": f"{x:g}", "y": f"{y:g}"}
    return element("text", text, **place, font_family=font, font_size=f"{size:g}", fill=color)


def _draw_header(title: list[str], caption: list[str], x: float, y: float) -> list[Markup]:
    written = [_make_text(text, x, y + LEADING * n, TITLE_SIZE, TITLE, MONOSPACE) for n, text in enumerate(title)]
    y += LEADING * len(title)
    return written + [
        _make_text(text, x, y + LEADING * n, CAPTION_SIZE, CAPTION, SANS) for n, text in enumerate(caption)
    ]


def _cell_size(drawing: Drawing, size: float) -> float:
    return size / max(*drawing.mask.shape, 1)


def _panel_height(drawing: Drawing, size: float) -> float:
    return drawing.mask.shape[0] * _cell_size(drawing, size)


def _draw_panel(drawing: Drawing, x: float, y: float, size: float) -> list[Markup]:
    queries, keys = drawing.mask.shape
    cell = _cell_size(drawing, size)
    width, height = keys * cell, queries * cell
    runs = [
        _rectangle_path(x + start * cell, y + row * cell, (stop - start) * cell, cell)
        for row, allowed in enumerate(drawing.mask.tolist())
        for start, stop in _find_runs(allowed)
    ]
    parts = [_fill_path(_rectangle_path(x, y, width, height), MASK_HIDDEN), _fill_path("".join(runs), MASK_VISIBLE)]
    if drawing.mark is not None:
        row, column = drawing.mark
        parts.append(_fill_path(_rectangle_path(x + column * cell, y + row * cell, cell, cell), MARK))
    if cell >= FINEST:
        across = "".join(f"M{x:g} {y + row * cell:.2f}h{width:g}" for row in range(1, queries))
        down = "".join(f"M{x + column * cell:.2f} {y:g}v{height:g}" for column in range(1, keys))
        thickness = f"{min(1.0, cell / 8):.2f}"
        parts.append(element("path", d=across + down, stroke=LINE, stroke_width=thickness))
    return parts


def _rectangle_path(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}h{-width:.2f}z"


def _fill_path(outline: str, color: str) -> Markup:
    return element("path", d=outline, fill=color)


def _find_runs(allowed: list[bool]) -> Iterable[tuple[int, int]]:
    """Start and stop of every run of `True`."""
    start = None
    for place, value in enumerate([*allowed, False]):
        if value and start is None:
            start = place
        elif not value and start is not None:
            yield start, place
            start = None


def _wrap_text(text: str, width: int, most: int = 3) -> list[str]:
    """A text on at most `most` lines, broken before an operator or after a comma where there is one."""
    lines: list[str] = []
    while len(text) > width and len(lines) < most - 1:
        cut = max(text.rfind(sign, 1, width + 1) for sign in (" | ", " & "))
        if cut < 0:
            cut = text.rfind(" ", 1, width + 1)
        cut = cut if cut > 0 else width
        lines.append(text[:cut].rstrip())
        text = text[cut:].lstrip()
    if text:
        lines.append(text if len(text) <= width else text[: width - 1] + "…")
    return lines
