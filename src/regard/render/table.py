"""One table value: columns, rows, alignment, and what gives way where there is no room.

A `Table` is shown in color by a terminal (`to_rich`), as plain text, as Markdown and as HTML.
"""

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
LEAST = {"cut": 16, "cut-start": 16, "wrap": 24}  # the narrowest that a column becomes; a narrower terminal wraps
LONGEST_HEADER = 12  # letters; where there is no room, longer names of columns take several lines
# The kinds of cells, and how a terminal shows them; in HTML they are classes.
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
    """A column's name, its side, and what becomes of texts that have no room.

    Attributes:
        overflow: `""` keeps them whole, `"wrap"` breaks them into lines, `"cut"` leaves out their end and
            `"cut-start"` their beginning.
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
                instead="an empty text where there is nothing",
            )

    @property
    def width(self) -> int:
        """Columns of a terminal that the table takes if nothing gives way."""
        return sum(self._natural_widths()) + GAP * (len(self.columns) - 1)

    def fit(self, width: int) -> Table:
        """The same table with its texts wrapped and cut where they have no room.

        What room there is beside the columns that do not give way is shared evenly among those that do; one that
        needs less than its share leaves the rest to the others.
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
            text = shorten(_text(cell), widths[index], table.columns[index].overflow)
            return text if isinstance(cell, str) else cell._replace(text=text)

        rows = [tuple(fitted(index, cell) for index, cell in enumerate(row)) for row in table.rows]
        return replace(table, rows=rows)

    def to_rich(self, width: int = WIDTH) -> RichTable:
        """For a terminal of this width: bold names, a rule below them, cells in their styles."""
        from rich.box import Box as Border
        from rich.table import Table as RichTable
        from rich.text import Text

        # A rule below the names and nothing else, in letters that every terminal and log file has.
        border = Border("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
        shown = RichTable(box=border, pad_edge=False, padding=(0, 0, 0, 1), show_edge=False, header_style="bold")
        table = self.fit(width)
        for column in table.columns:
            shown.add_column(Text(column.name), justify=column.align, no_wrap=True, overflow="crop")
        for index, row in enumerate(table.rows):
            if index and index in self.sections:
                shown.add_row()
            shown.add_row(*(Text(_text(cell), style=STYLES[_kind(cell)]) for cell in row))
        return shown

    def to_text(self, width: int = WIDTH) -> str:
        """Plain text of at most so many columns, as far as nothing but overflowing columns must give way."""
        return plain_text(self.to_rich(width))

    def __str__(self) -> str:
        return self.to_text()

    def to_markdown(self) -> str:
        """A table of GitHub's Markdown."""

        def line(texts: Sequence[str]) -> str:
            escaped = (escape(text).replace("|", "\\|").replace("\n", " ") for text in texts)
            return f"| {' | '.join(escaped)} |"

        rule = "|".join("---:" if column.align == "right" else "---" for column in self.columns)
        rows = [line([_text(cell) for cell in row]) for row in self.rows]
        return "\n".join([line([column.name for column in self.columns]), f"|{rule}|", *rows])

    def to_html(self) -> Markup:
        """A table of a page, whose first column names its rows; on a narrow screen each row is a list of its own."""
        sides = ["number" if column.align == "right" else None for column in self.columns]
        head = join(
            element("th", column.name, scope="col", class_=side)
            for column, side in zip(self.columns, sides, strict=True)
        )
        lines = []
        for first, *rest in self.rows:
            cells = [element("th", _link(first, escape(_text(first))), scope="row")]
            for cell, column, side in zip(rest, self.columns[1:], sides[1:], strict=True):
                kind = " ".join(filter(None, (_kind(cell), side))) or None
                cells.append(element("td", _content(cell), class_=kind, data_label=column.name))
            lines.append(element("tr", *cells))
        body = f"\n<thead>{element('tr', head)}</thead>\n<tbody>\n{join(lines, chr(10))}\n</tbody>\n"
        return element("div", element("table", Markup(body), class_="stacked"), class_="scroll")

    def _natural_widths(self) -> list[int]:
        columns = zip_longest(*([_text(cell) for cell in row] for row in self.rows))
        texts = list(columns) if self.rows else [()] * len(self.columns)
        return [
            max(len(line) for text in (column.name, *below) for line in text.split("\n"))
            for column, below in zip(self.columns, texts, strict=True)
        ]

    def _break_headers(self) -> Table:
        """Names of columns take several lines before anything is cut."""
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
        return _wrap(text, width)
    return f"{text[: max(width - 4, 1)].rstrip(' *+-(')} ..."


def _wrap(text: str, width: int) -> str:
    """The text in lines. Nothing is left out, and no number or index is split: `output[0, 3]` stays whole."""
    lines: list[str] = []
    for piece in re.findall(r"(?:[^\s\[]*\[[^\]]*\]|\S)+", text):
        if lines and len(lines[-1]) + 1 + len(piece) <= width:
            lines[-1] += f" {piece}"
        else:
            lines.append(piece)
    return "\n".join(lines)


def _text(cell: Any) -> str:
    return cell.text if isinstance(cell, Cell | Bar) else cell


def _kind(cell: Any) -> str:
    return cell.kind if isinstance(cell, Cell | Bar) else ""


def _content(cell: Any) -> Markup:
    if isinstance(cell, Bar):
        wide = f"width:{100 * min(max(cell.share, 0.0), 1.0):.2f}%"
        return element("span", "", class_="bar", role="img", aria_label=cell.text, style=wide)
    return _link(cell, element("span", _text(cell)))


def _link(cell: Any, content: Markup) -> Markup:
    return element("a", content, href=cell.link) if isinstance(cell, Cell | Bar) and cell.link else content
