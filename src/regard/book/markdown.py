"""An executed page as Markdown: code, then what it printed, its last value and its figure."""

from __future__ import annotations

import re
from collections.abc import Callable

from regard.book.execution import ExecutedPage, Output
from regard.book.formulas import replace_formulas
from regard.book.page import Prose

Render = Callable[[str, bool], str]  # (latex, is_block) -> text
Place = Callable[[int, Output], str]  # (number of the figure, its output) -> Markdown


LINK_TO_PAGE = re.compile(r"\[(?P<id>[\w.-]+)\]\((?P=id)\.md\)")


def to_markdown(
    executed: ExecutedPage,
    render_formula: Render | None,
    place_figure: Place,
    *,
    title: bool = True,
    links: bool = True,
) -> str:
    """The page as Markdown.

    render_formula: makes text of a formula; without it formulas stay LaTeX.
    place_figure: makes Markdown of a figure.
    title: begin with the title and the source.
    links: keep links to other pages; without them a page stands alone, and their ids are code.
    """
    page = executed.page
    blocks = [f"# {page.title}", f"*{page.source}*"] if title else []
    figures = 0
    for part in executed.parts:
        if isinstance(part, Prose):
            text = part.text if links else LINK_TO_PAGE.sub(r"`\g<id>`", part.text)
            blocks.append(text if render_formula is None else replace_formulas(text, render_formula).strip("\n"))
            continue
        if not part.code.hidden:
            blocks.append(_fence(part.code.source, "python"))
        printed = "\n".join(filter(None, (part.printed, part.result)))
        if printed and not part.code.hidden:
            blocks.append(_fence(printed, "text"))
        if part.svg:
            figures += 1
            blocks.append(place_figure(figures, part))
    return "\n\n".join(block for block in blocks if block) + "\n"


def inline_figure(number: int, output: Output) -> str:
    """A figure as a block of HTML, which Markdown leaves as it is."""
    caption = f"<figcaption>{_escape(output.caption)}</figcaption>" if output.caption else ""
    return f'<figure class="picture">\n{output.svg}\n{caption}</figure>'


def _fence(text: str, language: str) -> str:
    ticks = "```"
    while ticks in text:
        ticks += "`"
    return f"{ticks}{language}\n{text}\n{ticks}"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")
