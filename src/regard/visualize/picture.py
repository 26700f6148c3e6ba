"""A picture: a figure of matplotlib with its caption and the numbers that are drawn."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import InputError
from regard.render.colors import ACCENT, FAINT, INK, LINE
from regard.render.files import check_suffix, write_file
from regard.render.markup import Markup
from regard.render.page import figure, render_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf", ".html")
DOTS = 200  # dots per inch of a PNG

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
    """A drawing that a notebook shows and a file keeps.

        >>> from regard.visualize import show
        >>> picture = show(Quadratic(2, grid=(5, 7), centre=[[0, 1], [-1, 0]]))
        >>> picture
        Picture(Where the heads look, seen from the query ...)
        >>> picture.data["layers"][""]["mean"].shape  # (epoch, head, 2)
        torch.Size([1, 2, 2])

    Attributes:
        figure: matplotlib's, for those who want to change something.
        caption: what one sees, in a sentence or two, with all that was left out.
        data: the numbers that are drawn.
    """

    def __init__(self, figure: Figure, caption: str, data: Mapping[str, Any] | None = None) -> None:
        self.figure = figure
        self.caption = caption
        self.data = dict(data or {})
        self.page: Callable[[], str] | None = None  # an interactive page, where there is one

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.caption})"

    def save(self, path: str | Path) -> Path:
        """Write it: `.svg` and `.pdf` for papers, `.png` for slides, `.html` with its caption, needing nothing else."""
        path = check_suffix(path, SUFFIXES)
        kind = path.suffix.lower()[1:]
        return write_file(path, (self.page or self._page)() if kind == "html" else self._rendered(kind))

    def add_note(self, note: str) -> None:
        """Write a note below the drawing, and at the end of the caption: what a reader must not miss."""
        with style():
            self.figure.supxlabel(note, fontsize=8, color=ACCENT)
        self.caption = f"{self.caption} {note[:1].upper()}{note[1:]}."

    @property
    def svg(self) -> str:
        """The drawing as an element for the middle of a page: no prologue, no address of any kind."""
        text = self._rendered("svg").decode()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
        text = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", text)
        return text.replace("xlink:href", "href").replace(
            "<svg", f'<svg role="img" aria-label="{escape(self.caption)}"', 1
        )

    def _rendered(self, kind: str) -> bytes:
        with style():
            sheet = io.BytesIO()
            # Nothing in the file may depend on the day it is made.
            notes = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
            self.figure.savefig(sheet, format=kind, dpi=DOTS, metadata=notes)
        return sheet.getvalue()

    def _page(self) -> str:
        return render_page(self.caption.split(". ")[0], figure(Markup(self.svg), self.caption, kind="picture"))

    def _repr_html_(self) -> str:
        return figure(Markup(self.svg), self.caption)

    def _repr_png_(self) -> bytes:
        return self._rendered("png")


@contextmanager
def style() -> Iterator[None]:
    """The look of every figure, while it is drawn and while it is written."""
    matplotlib = _matplotlib()
    with matplotlib.rc_context(STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches outside pyplot: no window, no list of open figures."""
    _matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def make_panels(
    rows: int, columns: int, width: float, height: float, share: bool = False
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `rows` by `columns` panels, each of so many inches; to be called within `style()`."""
    figure = new_figure(columns * width + 0.2, rows * height + 0.2)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share)
    return figure, axes.tolist()


def hide_axes(axes: Axes) -> None:
    """Neither ticks nor frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)


def label_layer(axes: Axes, title: str) -> None:
    """The title of a layer beside its row; a module's name in the second line is smaller."""
    first, _, name = title.partition("\n")
    axes.set_ylabel(f"{first}\n{name}" if name else first, fontsize=7 if name else 9, parse_math=False)


def escape_missing(text: str) -> str:
    """The text with all characters that the font has no letter for written as `\\u4e2d`."""
    if text.isascii():
        return text
    known = _known_letters()
    return "".join(sign if ord(sign) in known else sign.encode("unicode_escape").decode() for sign in text)


@functools.cache
def _known_letters() -> frozenset[int]:
    _matplotlib()
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties(family="DejaVu Sans"))).get_charmap())


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as failure:
        raise InputError(
            "Pictures need matplotlib.",
            found=f"{type(failure).__name__}: {failure}",
            because="it is not installed with Regard unless it is asked for",
            instead='pip install "regard[show]"',
        ) from failure
    return matplotlib
