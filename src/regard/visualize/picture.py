"""A picture: a matplotlib figure with its caption and the numbers that are drawn."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import InputError
from regard.render.colors import ACCENT, FAINT, INK, LINE
from regard.render.files import check_suffix, write_file
from regard.render.markup import Markup
from regard.render.page import figure, render_page
from regard.visualize.labels import head_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from regard.visualize.attention_map import AttentionMap

SUFFIXES = (".svg", ".png", ".pdf", ".html")
DPI = 200  # of a PNG
MOST_PANELS = 400

STYLE = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": LINE,
    "axes.titlesize": 9.0,
    "axes.titlecolor": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "regard",
    "pdf.fonttype": 42,
}


class Picture:
    """A figure that a notebook displays and that can be saved.

        >>> from regard.visualize import show
        >>> picture = show(Quadratic(2, grid=(5, 7), centre=[[0, 1], [-1, 0]]))
        >>> picture
        Picture(Attention positions relative to the query ...)
        >>> picture.data["layers"][""]["mean"].shape  # (epoch, head, 2)
        torch.Size([1, 2, 2])

    Attributes:
        figure: the matplotlib figure, for further changes.
        caption: a description in a few sentences, including what was left out.
        data: the numbers that are drawn.
    """

    def __init__(self, figure: Figure, caption: str, data: Mapping[str, Any] | None = None) -> None:
        self.figure = figure
        self.caption = caption
        self.data = dict(data or {})
        self.page: Callable[[str], str] | None = None  # from the caption, an interactive page, where there is one

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.caption})"

    def save(self, path: str | Path) -> Path:
        """Write a file: `.svg`, `.pdf`, `.png`, or `.html`, one self-contained page with the caption."""
        path = check_suffix(path, SUFFIXES)
        kind = path.suffix.lower()[1:]
        return write_file(path, self._render_page() if kind == "html" else self._render(kind))

    def add_note(self, note: str) -> None:
        """Write a note below the figure and at the end of the caption."""
        with style():
            self.figure.supxlabel(note, fontsize=8, color=ACCENT)
        self.caption = f"{self.caption} {note[:1].upper()}{note[1:]}."

    @property
    def svg(self) -> str:
        """The figure as an `<svg>` element for a page, without prologue and namespaces."""
        text = self._render("svg").decode()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
        text = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", text)
        return text.replace("xlink:href", "href").replace(
            "<svg", f'<svg role="img" aria-label="{escape(self.caption)}"', 1
        )

    def _render(self, kind: str) -> bytes:
        with style():
            sheet = io.BytesIO()
            # Nothing in the file may depend on the day it is made.
            notes = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
            self.figure.savefig(sheet, format=kind, dpi=DPI, metadata=notes)
        return sheet.getvalue()

    def _render_page(self) -> str:
        if self.page is not None:
            return self.page(self.caption)
        return render_page(self.caption.split(". ")[0], figure(Markup(self.svg), self.caption, kind="picture"))

    def _repr_html_(self) -> str:
        return figure(Markup(self.svg), self.caption)

    def _repr_png_(self) -> bytes:
        return self._render("png")


@contextmanager
def style() -> Iterator[None]:
    """The matplotlib style of every figure, for drawing and for writing."""
    matplotlib = _import_matplotlib()
    with matplotlib.rc_context(STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """A figure, in inches, that is not registered with pyplot: no window, no list of open figures."""
    _import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def make_panels(
    rows: int, columns: int, width: float, height: float, share: bool = False
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `rows` by `columns` panels, each `width` by `height` inches; to be called within `style()`."""
    figure = new_figure(columns * width + 0.2, rows * height + 0.2)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share)
    return figure, axes.tolist()


def draw_per_head(
    maps: Sequence[AttentionMap],
    selected: Sequence[Sequence[int]],
    width: float,
    height: float,
    draw: Callable[[Axes, int, int], None],
) -> Figure:
    """A row of panels for each layer and in it one for each selected head, drawn by `draw(panel, layer, column)`."""
    columns = max(map(len, selected))
    if len(maps) * columns > MOST_PANELS:
        raise InputError(
            "There are too many panels.",
            asked=f"{len(maps) * columns} panels",
            because=f"more than {MOST_PANELS} would be too small to read",
            instead="layer=0, or head=0, or a list of them",
        )
    figure, axes = make_panels(len(maps), columns, width, height)
    for layer, (attention, heads) in enumerate(zip(maps, selected, strict=True)):
        for column, panel in enumerate(axes[layer]):
            if column >= len(heads):
                panel.set_visible(False)
                continue
            draw(panel, layer, column)
            if layer == 0:
                panel.set_title(head_title(heads[column]))
        label_layer(axes[layer][0], attention.title)
    return figure


def hide_axes(axes: Axes, frame: bool = False) -> None:
    """Remove the ticks, and the frame or all but a thin line of it."""
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set(visible=True, linewidth=0.5) if frame else side.set_visible(False)


def label_layer(axes: Axes, title: str) -> None:
    """Write the title of a layer beside its row; with the name of a module, in a smaller font."""
    first, _, name = title.partition("\n")
    axes.set_ylabel(f"{first}\n{name}" if name else first, fontsize=7 if name else 9, parse_math=False)


def escape_missing(text: str) -> str:
    """The text with characters that the font does not have as escapes, `\\u4e2d`."""
    if text.isascii():
        return text
    glyphs = _find_glyphs()
    return "".join(sign if ord(sign) in glyphs else sign.encode("unicode_escape").decode() for sign in text)


@functools.cache
def _find_glyphs() -> frozenset[int]:
    _import_matplotlib()
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties(family="DejaVu Sans"))).get_charmap())


def _import_matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as failure:
        raise InputError(
            "Pictures need matplotlib.",
            found=f"{type(failure).__name__}: {failure}",
            because="matplotlib is an optional dependency, and it is not installed",
            instead='pip install "regard[show]"',
        ) from failure
    return matplotlib
