"""Tables of quantities: what a textbook question is answered with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy

from regard.cost.letters import agreed, legend, letter
from regard.cost.quantity import Quantity
from regard.errors import CostError


class Row(NamedTuple):
    """A label, and a quantity for each column; `None` where there is none, as in "never"."""

    label: str
    cells: tuple[Quantity | None, ...]

    @property
    def quantity(self) -> Quantity:
        """The first quantity of the row."""
        (first, *_) = self.cells
        assert first is not None
        return first


@dataclass(frozen=True)
class Table:
    """A title, rows, and what a reader should know.

    Attributes:
        columns: what each cell of a row is.
        nothing: the word for a cell that is empty.
    """

    title: str
    rows: tuple[Row, ...]
    note: str = ""
    columns: tuple[str, ...] = ("count",)
    nothing: str = "never"

    def __getitem__(self, label: str) -> Quantity:
        """The first quantity of a row."""
        return self.row(label).quantity

    def row(self, label: str) -> Row:
        for row in self.rows:
            if row.label == label:
                return row
        raise CostError(
            "The table has no such row.",
            asked=repr(label),
            because=f"{self.title} has other rows",
            instead=", ".join(row.label for row in self.rows),
        )

    def cell(self, label: str, column: str) -> Quantity | None:
        return self.row(label).cells[self.columns.index(column)]

    def legend(self) -> list[tuple[str, str, Any]]:
        """Letter, meaning and number of every letter."""
        quantities = [cell for row in self.rows for cell in row.cells if cell is not None]
        values = agreed(*(each.values for each in quantities))  # a letter that differs between rows has no one number
        return legend([each.formula for each in quantities], values)

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain Python: formulas as text."""

        def plain(cell: Quantity | None) -> dict[str, Any] | None:
            return None if cell is None else {"formula": str(cell.formula), "value": cell.value}

        return {
            "title": self.title,
            "columns": list(self.columns),
            "rows": {
                row.label: {name: plain(cell) for name, cell in zip(self.columns, row.cells, strict=True)}
                for row in self.rows
            },
            "letters": {symbol: {"meaning": words, "value": number} for symbol, words, number in self.legend()},
            "note": self.note,
        }

    def __str__(self) -> str:
        return text(self)


def text(table: Table) -> str:
    """The table as plain text: numbers, and with one column their formulas."""
    head = ["", *table.columns]
    lines = [[row.label, *(table.nothing if cell is None else shown(cell) for cell in row.cells)] for row in table.rows]
    if len(table.columns) == 1:
        head.append("formula")
        for line, row in zip(lines, table.rows, strict=True):
            line.append("" if row.cells[0] is None else str(row.cells[0].formula))
    widths = [max(len(line[column]) for line in [head, *lines]) for column in range(len(head))]

    def laid(line: list[str]) -> str:
        numbers = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        if len(table.columns) == 1:
            numbers[-1] = line[-1]
        return "  ".join([line[0].ljust(widths[0]), *numbers]).rstrip()

    told = [
        f"{symbol}: {words}" + (f", {number}" if number is not None else "") for symbol, words, number in table.legend()
    ]
    parts = [table.title, *map(laid, [head, *lines]), *told, *([table.note] if table.note else [])]
    return "\n".join(parts)


def shown(cell: Quantity) -> str:
    """A number as people read it."""
    value = cell.value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"


def rows(values: Mapping[sympy.Symbol, Any], counts: Iterable[tuple[str, Any]]) -> tuple[Row, ...]:
    """Rows of one column."""
    return tuple(Row(label, (Quantity(formula, values),)) for label, formula in counts)


def sizes(**numbers: Any) -> dict[sympy.Symbol, int]:
    """Numbers of letters, each looked at: `sizes(N=256, D=512)`."""
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise CostError(
                "That is not a size.",
                asked=f"{name} = {number!r}",
                because="sizes are whole numbers of at least 1",
                instead=f"{name} = 16",
            )
    return {letter(name): number for name, number in numbers.items()}
