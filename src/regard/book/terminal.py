"""Pages and lists of problems in a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from regard.book.execution import ExecutedPage, Output
from regard.book.formulas import as_unicode
from regard.book.library import SOURCES
from regard.book.markdown import to_markdown
from regard.book.page import Page
from regard.render.table import Column, Table
from regard.render.terminal import stack

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDEST = 100  # columns; longer lines of prose are hard to read
BOOKS = {
    "bis": "Bishop and Bishop, Deep Learning: Foundations and Concepts, chapter 12",
    "udl": "Prince, Understanding Deep Learning, chapter 12",
    "nyu": "NYU, Deep Learning, homework 4",
    "ttic": "TTIC 31230, transformer problems",
    "eth": "ETH, self-attention and convolution (Cordonnier, Loukas and Jaggi 2020)",
}


def print_page(executed: ExecutedPage) -> None:
    """Print a page: formulas as Unicode text, code in color, figures named; as Markdown if it is no terminal."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(highlight=False)
    name = executed.page.id
    text = to_markdown(executed, as_unicode, lambda number, output: _name_figure(name, number, output), links=False)
    if console.is_terminal:
        console.print(Markdown(text, code_theme="ansi_dark"), width=min(console.width, WIDEST))
    else:
        print(text)


def _name_figure(problem: str, number: int, output: Output) -> str:
    caption = f": {output.caption}" if output.caption else ""
    return f"> Figure {number}{caption} (shown by `regard problem {problem} --open`)"


def make_list(pages: Iterable[Page], graded: set[str], width: int = WIDEST) -> RenderableType:
    """All problems, by source and then by topic."""
    from rich.text import Text

    pages = list(pages)
    blocks: list[RenderableType | list[RenderableType]] = []
    for source in sorted({_source_of(page) for page in pages}, key=_order):
        found = [page for page in pages if _source_of(page) == source]
        rows = [(page.id, page.title, page.topic, "yes" if page.id in graded else "") for page in found]
        blocks.append(Text(BOOKS.get(source, source), style="bold"))
        columns = [Column("problem"), Column("title", overflow="wrap"), Column("topic"), Column("graded")]
        blocks.append(Table(columns, rows).to_rich(min(width, WIDEST)))
    topics: dict[str, list[str]] = {}
    for page in pages:
        topics.setdefault(page.topic, []).append(page.id)
    rows = [(topic, ", ".join(ids)) for topic, ids in sorted(topics.items())]
    blocks.append(Text("By topic", style="bold"))
    blocks.append(Table([Column("topic"), Column("problems", overflow="wrap")], rows).to_rich(min(width, WIDEST)))
    return stack(*blocks)


def _source_of(page: Page) -> str:
    return page.id.partition("-")[0]


def _order(source: str) -> int:
    return SOURCES.index(source) if source in SOURCES else len(SOURCES)
