"""Self-contained HTML pages without network access, for light and dark mode and any width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from regard.render.colors import css_variables
from regard.render.files import check_suffix, write_file
from regard.render.markup import Markup, element, escape, join


class Widget(Markup):
    """An element with a style sheet or a script of its own; a page includes each of them once."""

    style: str
    script: str

    def __new__(cls, markup: str, *, style: str = "", script: str = "") -> Widget:
        widget = super().__new__(cls, markup)
        widget.style, widget.script = style, script
        return widget

    @property
    def standalone(self) -> Markup:
        """The element with its styles and script, for a notebook."""
        script = f"<script>{self.script}</script>" if self.script else ""
        return Markup(f"<style>{stylesheet()}{self.style}</style>{self}{script}")


def stylesheet() -> str:
    """The style of every page: its colors, headings, tables, figures and code."""
    return css_variables() + read_asset("regard.render", "page.css")


def read_asset(package: str, name: str) -> str:
    """A style sheet or a script of a package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def render_page(title: str, body: str, *, styles: Iterable[str] = (), scripts: Iterable[str] = ()) -> str:
    """A whole page around its body, which is markup."""
    style = "".join([stylesheet(), *styles])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"{element('title', title)}\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{escape(body)}\n</main>\n"
        + "".join(f"<script>\n{script}</script>\n" for script in scripts)
        + "</body>\n</html>\n"
    )


class Page:
    """A page with a headline and sections; text is escaped, elements are used as they are.

    >>> from regard.render.page import Page, paragraph
    >>> page = Page("Two heads are better than one", lead="Both were trained on digits.")
    >>> page.add("Results", paragraph("A 3 < 8."))
    >>> "<h2>Results</h2>" in page.html, "3 &lt; 8" in page.html
    (True, True)
    """

    def __init__(self, headline: str, *, kicker: str = "", lead: str = "", title: str = "") -> None:
        self.title = title or headline
        self.header = [element("p", kicker, class_="kicker")] if kicker else []
        self.header.append(element("h1", headline))
        if lead:
            self.header.append(element("p", lead, class_="lead"))
        self.sections: list[Markup] = []
        self.footer = Markup()
        # Each once, in the order of use.
        self.styles: dict[str, None] = {}
        self.scripts: dict[str, None] = {}

    def use_style(self, style: str) -> None:
        """Add a style sheet to that of every page."""
        self.styles[style] = None

    def open_with(self, *parts: str) -> None:
        """Add parts below the headline."""
        self.header += self._collect_parts(parts)

    def add(self, heading: str, *parts: str, anchor: str = "", kind: str = "") -> None:
        """A section; `anchor` is its id, made from the heading by default."""
        anchor = anchor or re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")
        body = join([element("h2", heading), *self._collect_parts(parts)], "\n")
        self.sections.append(element("section", Markup(f"\n{body}\n"), id=anchor or None, class_=kind or None))

    def close_with(self, *parts: str) -> None:
        """Set the parts of the footer."""
        self.footer = join(self._collect_parts(parts), "\n")

    @property
    def html(self) -> str:
        """The whole page."""
        body = [element("header", Markup(f"\n{join(self.header, chr(10))}\n")), *self.sections]
        body += [element("footer", Markup(f"\n{self.footer}\n"))] if self.footer else []
        return render_page(self.title, join(body, "\n"), styles=self.styles, scripts=self.scripts)

    def save(self, path: str | Path) -> Path:
        """Write the page, and create its folder."""
        return write_file(check_suffix(path, (".html",)), self.html)

    def _collect_parts(self, parts: Sequence[str]) -> list[Markup]:
        for part in parts:
            if isinstance(part, Widget):
                self.styles |= {part.style: None} if part.style else {}
                self.scripts |= {part.script: None} if part.script else {}
        return [escape(part) for part in parts]


# Elements of a page


def paragraph(*texts: Any, kind: str = "") -> Markup:
    return element("p", *texts, class_=kind or None)


def code(text: str) -> Markup:
    """Inline code."""
    return element("code", text)


def code_block(text: str) -> Markup:
    """Lines of code."""
    return element("pre", text)


def figure(body: str, caption: str, kind: str = "") -> Markup:
    content = Markup(f"\n{escape(body)}\n{element('figcaption', caption)}\n")
    return element("figure", content, class_=kind or None)


def tiles(facts: Sequence[tuple[str, str]]) -> Markup:
    """Large numbers, each with its meaning."""
    items = [element("li", element("b", number), element("span", meaning)) for number, meaning in facts]
    return element("ul", *items, class_="tiles")
