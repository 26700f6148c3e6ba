"""A picture: a figure of matplotlib with its caption and the numbers that are drawn."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import InputError
from regard.show.colours import FAINT, INK, LINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".svg", ".png", ".pdf", ".html")
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

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>:root{{color-scheme:light}}body{{margin:0 auto;max-width:72rem;padding:1.5rem;background:#fff;color:#1d1f23;
font:16px/1.5 system-ui,sans-serif}}figure{{margin:0}}svg{{width:100%;height:auto}}figcaption{{color:#6a6f78}}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


class Picture:
    """A drawing that a notebook shows and a file keeps.

        >>> from regard.show import show
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.caption})"

    def save(self, path: str | Path) -> Path:
        """Write it: `.svg` and `.pdf` for papers, `.png` for slides, `.html` with its caption, needing nothing else."""
        path = check_ending(path, ENDINGS)
        data = self._page().encode() if path.suffix.lower() == ".html" else self._rendered(path.suffix.lower()[1:])
        return write(path, data)

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
        return PAGE.format(title=escape(self.caption.split(". ")[0]), body=self._repr_html_())

    def _repr_html_(self) -> str:
        return f"<figure>{self.svg}<figcaption>{escape(self.caption)}</figcaption></figure>"

    def _repr_png_(self) -> bytes:
        return self._rendered("png")


@contextmanager
def style() -> Iterator[None]:
    """The look of every figure, while it is drawn and while it is written."""
    matplotlib = _matplotlib()
    with matplotlib.rc_context(STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches that belongs to nobody: no window, no list of open figures."""
    _matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def panels(
    rows: int, columns: int, width: float, height: float, share: bool = False
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `rows` by `columns` panels, each of so many inches; to be called within `style()`."""
    figure = new_figure(columns * width + 0.2, rows * height + 0.2)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share)
    return figure, axes.tolist()


def bare(axes: Axes) -> None:
    """Neither ticks nor frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)


def check_ending(path: str | Path, endings: tuple[str, ...]) -> Path:
    """A path whose ending says how to write the file."""
    path = Path(path)
    if path.suffix.lower() not in endings:
        raise InputError(
            f"A picture cannot be written as {path.suffix or 'a file without an ending'}.",
            asked=str(path),
            because=f"it is written as {', '.join(endings)}",
            instead=str(path.with_suffix(endings[0])),
        )
    return path


def write(path: Path, data: bytes) -> Path:
    """Write a file, its folder too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as failure:
        raise InputError(
            f"{path} cannot be written.",
            found=f"{type(failure).__name__}: {failure}",
            because="the system refuses",
            instead="a file in a folder that may be written to",
        ) from failure
    return path


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
