"""A report as one page that needs nothing else: no server, no font, no address, light and dark, wide and narrow."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from regard.errors import InputError
from regard.show.colours import data_uri, diverging
from regard.show.picture import check_ending, write


class Html(str):
    """Text that is HTML already; any other text is escaped where it is used."""


class Bar(NamedTuple):
    """A cell of a table that is a bar, `share` of the widest; `words` are what a reader hears."""

    share: float
    words: str


class Mark(NamedTuple):
    """A cell of a table with a verdict: `kind` is holds, broken, flaky or silent."""

    kind: str
    words: str


class Page:
    """A page with a headline and sections.

    >>> from regard.show.page import Page, paragraph
    >>> page = Page("Two heads are better than one", lead="They were asked to look.")
    >>> page.add("What they saw", paragraph("A 3 < 8."))
    >>> "<h2>What they saw</h2>" in page.html, "3 &lt; 8" in page.html
    (True, True)
    """

    def __init__(self, headline: str, *, kicker: str = "", lead: str = "", title: str = "") -> None:
        self.title = title or headline
        self.header = [f"<h1>{html(headline)}</h1>"]
        if kicker:
            self.header.insert(0, f'<p class="kicker">{html(kicker)}</p>')
        if lead:
            self.header.append(f'<p class="lead">{html(lead)}</p>')
        self.sections: list[str] = []
        self.footer = ""

    def open_with(self, *parts: str) -> None:
        """Parts below the headline."""
        self.header += [html(part) for part in parts]

    def add(self, heading: str, *parts: str) -> None:
        """A section."""
        name = re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")
        words = "\n".join(html(part) for part in parts)
        self.sections.append(f'<section id="{name}">\n<h2>{html(heading)}</h2>\n{words}\n</section>')

    def close_with(self, *parts: str) -> None:
        """Parts at the foot."""
        self.footer = "\n".join(html(part) for part in parts)

    @property
    def html(self) -> str:
        """The whole page."""
        body = "\n".join([f"<header>\n{chr(10).join(self.header)}\n</header>", *self.sections])
        body += f"\n<footer>\n{self.footer}\n</footer>" if self.footer else ""
        scripts = [
            name for name, mark in (("heads.js", 'class="player"'), ("pixels.js", 'class="explorer"')) if mark in body
        ]
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<link rel="icon" href="data:,">\n'
            f"<title>{escape(self.title)}</title>\n<style>\n{web('style.css')}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
            + "".join(f"<script>\n{web(name)}</script>\n" for name in scripts)
            + "</body>\n</html>\n"
        )

    def save(self, path: str | Path) -> Path:
        """Write the page; the folder is made."""
        return write(check_ending(path, (".html",)), self.html.encode())


def web(name: str) -> str:
    """A file of the folder `web` beside this one."""
    return (resources.files("regard.show") / "web" / name).read_text(encoding="utf-8")


def html(text: str) -> str:
    return text if isinstance(text, Html) else escape(text, quote=False)


def paragraph(*texts: str) -> Html:
    return Html(f"<p>{''.join(html(text) for text in texts)}</p>")


def strong(text: str) -> Html:
    return Html(f"<b>{html(text)}</b>")


def code(text: str) -> Html:
    """A few words of code within a sentence."""
    return Html(f"<code>{html(text)}</code>")


def block(text: str) -> Html:
    """Lines of code."""
    return Html(f"<pre>{html(text)}</pre>")


def figure(body: str, caption: str) -> Html:
    return Html(f"<figure>\n{html(body)}\n<figcaption>{html(caption)}</figcaption>\n</figure>")


def tiles(facts: Sequence[tuple[str, str]]) -> Html:
    """Large numbers, each with what it means."""
    items = "".join(f"<li><b>{html(number)}</b><span>{html(meaning)}</span></li>" for number, meaning in facts)
    return Html(f'<ul class="tiles">{items}</ul>')


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], numbers: Sequence[int] = ()) -> Html:
    """A table whose first column names its rows; columns whose index is in `numbers` are set to the right.

    On a narrow screen each row is a small list of its own.
    """
    if any(len(row) != len(columns) for row in rows):
        raise InputError(
            "The rows of a table are unequal.",
            asked=f"{len(columns)} columns: {', '.join(columns)}",
            found=f"rows of {sorted({len(row) for row in rows})} cells",
            because="every row has a cell for each column",
            instead="an empty text where there is nothing",
        )
    sides = ["number" if index in numbers else "" for index in range(len(columns))]
    head = "".join(
        f'<th scope="col"{_class(side)}>{html(name)}</th>' for name, side in zip(columns, sides, strict=True)
    )
    lines = []
    for name, *cells in rows:
        drawn = "".join(_cell(cell, *about) for cell, *about in zip(cells, columns[1:], sides[1:], strict=True))
        lines.append(f'<tr><th scope="row">{html(name)}</th>{drawn}</tr>')
    body = "\n".join(lines)
    return Html(
        f'<div class="scroll"><table class="stacked">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _cell(cell: Any, label: str, side: str) -> str:
    label = f' data-label="{escape(label)}"'
    if isinstance(cell, Bar):
        wide = f"width:{100 * min(max(cell.share, 0.0), 1.0):.2f}%"
        return f'<td{label}><span class="bar" role="img" aria-label="{escape(cell.words)}" style="{wide}"></span></td>'
    if isinstance(cell, Mark):
        return f"<td{_class(f'{cell.kind} {side}'.strip())}{label}><span>{html(cell.words)}</span></td>"
    return f"<td{_class(side)}{label}><span>{html(cell)}</span></td>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def chart(series: Mapping[str, Sequence[float]], caption: str, ends: tuple[str, str], low: float, high: float) -> Html:
    """Lines from the left to the right, each over its own steps; `low` and `high` are the shares at bottom and top.

    Letters lie beside the drawing, not in it, so that they keep their size on any screen.
    """
    marks = [low + (high - low) * step / 4 for step in range(5)]
    grid = "".join(f"M0 {100 * (high - mark) / (high - low):.2f}H100" for mark in marks)
    lines, names = [], []
    for index, (name, values) in enumerate(series.items()):
        last = max(len(values) - 1, 1)
        points = " ".join(
            f"{100 * step / last:.2f},{100 * (high - min(max(value, low), high)) / (high - low):.2f}"
            for step, value in enumerate(values)
        )
        colour = f"var(--h{(1, 6, 3, 8, 5)[index % 5]})"
        lines.append(f'<polyline points="{points}" style="stroke:{colour}"/>')
        names.append(f'<li style="color:{colour}"><i></i><span>{html(name)}</span></li>')
    scale = "".join(
        f'<span class="scale" style="{side}">{mark:.0%}</span>'
        for side, mark in (("top:0", high), ("bottom:1.6em", low))
    )
    words = "; ".join(f"{name} ends at {values[-1]:.1%}" for name, values in series.items())
    body = (
        f'<ul class="legend">{"".join(names)}</ul>\n<div class="chart">\n'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{escape(words)}">'
        f'<path d="{grid}"/>{"".join(lines)}</svg>\n{scale}\n'
        f'<div class="ends"><span>{html(ends[0])}</span><span>{html(ends[1])}</span></div>\n</div>'
    )
    return figure(Html(body), caption)


def kernel_rows(rows: Mapping[str, Tensor], caption: str, shared: bool = True) -> Html:
    """Kernels `(kernel, row, column)`, red adds and blue takes away; one scale for all rows, or one for each."""
    top = {name: float(values.abs().max()) for name, values in rows.items()}
    parts = []
    for name, values in rows.items():
        largest = max(top.values()) if shared else top[name]
        images = "".join(
            f'<img class="pixels" alt="kernel {index + 1} of {escape(name)}" '
            f'src="{data_uri(diverging(kernel, largest))}">'
            for index, kernel in enumerate(values)
        )
        parts.append(f"<h3>{html(name)}</h3><div>{images}</div>")
    return figure(Html(f'<div class="kernels">{"".join(parts)}</div>'), caption)


def script_data(value: Any) -> Html:
    """Plain values for a script of the page, so written that no text among them can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Html(f'<script type="application/json">{text}</script>')
