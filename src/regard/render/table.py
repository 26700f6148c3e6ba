"""A table that renders to a terminal (rich), plain text, Markdown and HTML, with overflow rules for its columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from regard.errors import InputError
from regard.render.markup import Markup, element, escape, join
from regard.render.terminal import WIDTH, plain_text

if TYPE_CHECKING:
    from rich.table import Table as RichTable

GAP = 2  # columns of a terminal between two columns of a table
LEAST = {"cut": 16, "cut-start": 16, "wrap": 24}  # minimum widths of columns; a narrower terminal wraps
LONGEST_HEADER = 12  # characters; longer names of columns are broken into lines if the table is too wide
# The kinds of cells and their styles in a terminal; in HTML they are classes.
STYLES = {
    "": "",
    "strong": "bold",
    "faint": "dim",
    "holds": "green",
    "broken": "bold red",
    "flaky": "bold yellow",
    "silent": "dim",
}


class Cell(NamedTuple):
    """A text, its kind (see `STYLES`), and in HTML the address that it links to."""

    text: str
    kind: str = ""
    link: str = ""


class Bar(NamedTuple):
    """A cell that is a bar in HTML, `share` of the widest; `text` is read out, and stands in the other formats."""

    share: float
    text: str
    kind: str = ""
    link: str = ""


class Column(NamedTuple):
    """The name of a column, its alignment, and its overflow rule.

    Attributes:
        overflow: for texts that do not fit: `""` keeps them, `"wrap"` breaks them into lines, `"cut"` removes their end
            and `"cut-start"` their beginning.
    """

    name: str = ""
    align: Literal["left", "right"] = "left"
    overflow: Literal["", "wrap", "cut", "cut-start"] = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under named columns; a cell is a text, a `Cell` or a `Bar`.

    >>> from regard.render.table import Column, Table
    >>> table = Table([Column("part"), Column("MACs", "right")], [("scores", "7,925,760"), ("values", "12")])
    >>> print(table)
    part         MACs
    -----------------
    scores  7,925,760
    values         12
    >>> print(table.to_markdown())
    | part | MACs |
    |---|---:|
    | scores | 7,925,760 |
    | values | 12 |

    Attributes:
        sections: indices of rows that begin a section, with an empty line before it in a terminal.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Cell | Bar]]
    sections: Sequence[int] = ()

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise InputError(
                "The rows of a table are unequal.",
                asked=f"{len(self.columns)} columns: {', '.join(column.name for column in self.columns)}",
                found=f"rows of {sorted({len(row) for row in self.rows})} cells",
                because="every row has a cell for each column",
                instead="an empty text for an empty cell",
            )

    @property
    def width(self) -> int:
        """The width in characters without overflow rules."""
        return sum(self._natural_widths()) + GAP * (len(self.columns) - 1)

    def fit(self, width: int) -> Table:
        """The table with texts wrapped and cut to this width.

        Columns without an overflow rule keep their width. The others share the rest evenly; one that needs less leaves
        the remainder to the others.
        """
        table = self._break_headers() if self.width > width else self
        natural = table._natural_widths()
        flexible = sorted((i for i, column in enumerate(table.columns) if column.overflow), key=natural.__getitem__)
        room = width - GAP * (len(natural) - 1) - sum(natural) + sum(natural[index] for index in flexible)
        widths: dict[int, int] = {}
        for rank, index in enumerate(flexible):
            share = max(room // (len(flexible) - rank), LEAST[table.columns[index].overflow])
            widths[index] = min(natural[index], share)
            room -= widths[index]

        def fitted(index: int, cell: str | Cell | Bar) -> str | Cell | Bar:
            if index not in widths:
                return cell
            text = shorten(_get_text(cell), widths[index], table.columns[index].overflow)
            return text if isinstance(cell, str) else cell._replace(text=text)

        rows = [tuple(fitted(index, cell) for index, cell in enumerate(row)) for row in table.rows]
        return replace(table, rows=rows)

    def to_rich(self, width: int = WIDTH) -> RichTable:
        """A rich table for a terminal of this width."""
        from rich.box import Box as Border
        from rich.table import Table as RichTable
        from rich.text import Text

        # A rule below the header and nothing else, in ASCII.
        border = Border("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
        shown = RichTable(box=border, pad_edge=False, padding=(0, 0, 0, 1), show_edge=False, header_style="bold")
        table = self.fit(width)
        for column in table.columns:
            shown.add_column(Text(column.name), justify=column.align, no_wrap=True, overflow="crop")
        for index, row in enumerate(table.rows):
            if index and index in self.sections:
                shown.add_row()
            shown.add_row(*(Text(_get_text(cell), style=STYLES[_get_kind(cell)]) for cell in row))
        return shown

    def to_text(self, width: int = WIDTH) -> str:
        """Plain text of this width, as far as the overflow rules allow."""
        return plain_text(self.to_rich(width))

    def __str__(self) -> str:
        return self.to_text()

    def to_markdown(self) -> str:
        """A table in GitHub's Markdown."""

        def line(texts: Sequence[str]) -> str:
            escaped = (escape(text).replace("|", "\\|").replace("\n", " ") for text in texts)
            return f"| {' | '.join(escaped)} |"

        rule = "|".join("---:" if column.align == "right" else "---" for column in self.columns)
        rows = [line([_get_text(cell) for cell in row]) for row in self.rows]
        return "\n".join([line([column.name for column in self.columns]), f"|{rule}|", *rows])

    def to_html(self) -> Markup:
        """An HTML table whose first column names the rows; on a narrow screen each row becomes a list."""
        sides = ["number" if column.align == "right" else None for column in self.columns]
        head = join(
            element("th", column.name, scope="col", class_=side)
            for column, side in zip(self.columns, sides, strict=True)
        )
        lines = []
        for first, *rest in self.rows:
            cells = [element("th", _add_link(first, escape(_get_text(first))), scope="row")]
            for cell, column, side in zip(rest, self.columns[1:], sides[1:], strict=True):
                kind = " ".join(filter(None, (_get_kind(cell), side))) or None
                cells.append(element("td", _render_cell(cell), class_=kind, data_label=column.name))
            lines.append(element("tr", *cells))
        body = f"\n<thead>{element('tr', head)}</thead>\n<tbody>\n{join(lines, chr(10))}\n</tbody>\n"
        return element("div", element("table", Markup(body), class_="stacked"), class_="scroll")

    def _natural_widths(self) -> list[int]:
        columns = zip_longest(*([_get_text(cell) for cell in row] for row in self.rows))
        texts = list(columns) if self.rows else [()] * len(self.columns)
        return [
            max(len(line) for text in (column.name, *below) for line in text.split("\n"))
            for column, below in zip(self.columns, texts, strict=True)
        ]

    def _break_headers(self) -> Table:
        """The table with long names of columns broken into lines."""
        columns = [
            column._replace(name=column.name.replace(" ", "\n") if len(column.name) > LONGEST_HEADER else column.name)
            for column in self.columns
        ]
        return replace(self, columns=columns)


def shorten(text: str, width: int, overflow: str = "cut") -> str:
    """The text in a column of this width: whole, wrapped, or cut with `...` where something is left out.

    >>> from regard.render.table import shorten
    >>> shorten("a*b + c*d", 8), shorten("blocks.0.attention", 13, "cut-start")
    ('a*b ...', '... attention')
    """
    if len(text) <= width:
        return text
    if overflow == "cut-start":
        return f"... {text[-max(width - 4, 1) :]}"
    if overflow == "wrap":
        return _wrap_words(text, width)
    return f"{text[: max(width - 4, 1)].rstrip(' *+-(')} ..."


def _wrap_words(text: str, width: int) -> str:
    """The text in lines of at most this width; an index such as `output[0, 3]` is not split."""
    lines: list[str] = []
    for piece in re.findall(r"(?:[^\s\[]*\[[^\]]*\]|\S)+", text):
        if lines and len(lines[-1]) + 1 + len(piece) <= width:
            lines[-1] += f" {piece}"
        else:
            lines.append(piece)
    return "\n".join(lines)


def _get_text(cell: Any) -> str:
    return cell.text if isinstance(cell, Cell | Bar) else cell


def _get_kind(cell: Any) -> str:
    return cell.kind if isinstance(cell, Cell | Bar) else ""


def _render_cell(cell: Any) -> Markup:
    if isinstance(cell, Bar):
        wide = f"width:{100 * min(max(cell.share, 0.0), 1.0):.2f}%"
        return element("span", "", class_="bar", role="img", aria_label=cell.text, style=wide)
    return _add_link(cell, element("span", _get_text(cell)))


def _add_link(cell: Any, content: Markup) -> Markup:
    return element("a", content, href=cell.link) if isinstance(cell, Cell | Bar) and cell.link else content
