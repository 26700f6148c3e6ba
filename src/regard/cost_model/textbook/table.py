"""Tables of quantities: what a textbook question is answered with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import sympy

from regard.cost_model.quantity import Quantity
from regard.cost_model.symbols import find_common_values, legend, size_symbol
from regard.errors import CostError
from regard.render.table import Cell, Column
from regard.render.table import Table as RenderedTable
from regard.render.terminal import WIDTH, one_line, output_width, plain_text, remarks, stack

if TYPE_CHECKING:
    from rich.console import RenderableType


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
        meanings: of symbols that stand for something more particular here than everywhere.
    """

    title: str
    rows: tuple[Row, ...]
    note: str = ""
    columns: tuple[str, ...] = ("count",)
    nothing: str = "never"
    meanings: Mapping[str, str] = field(default_factory=dict)

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
        """Symbol, meaning and number of every symbol."""
        quantities = [cell for row in self.rows for cell in row.cells if cell is not None]
        values = find_common_values(
            *(each.values for each in quantities)
        )  # a symbol that differs between rows has no one number
        found = legend([each.formula for each in quantities], values)
        if all(symbol in self.meanings for symbol, _, _ in found):
            found.sort(key=lambda each: list(self.meanings).index(each[0]))
        return [(symbol, self.meanings.get(symbol, words), number) for symbol, words, number in found]

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

    def render(self, width: int = WIDTH) -> RenderableType:
        """For a terminal: numbers to the unit; beside a single column its formulas, and below the symbols."""
        from regard.cost_model.table import symbol_table

        single = len(self.columns) == 1
        columns = [Column(), *(Column(name, "right") for name in self.columns)]
        rows = []
        for row in self.rows:
            numbers = [Cell(self.nothing if cell is None else format_value(cell), "strong") for cell in row.cells]
            formula = "" if row.cells[0] is None else str(row.cells[0].formula)
            rows.append((row.label, *numbers, *([Cell(formula, "faint")] if single else [])))
        columns += [Column("formula", "left", "cut")] if single else []
        symbols = self.legend() if single else []
        return stack(
            one_line((self.title, "bold")),
            RenderedTable(columns, rows).to_rich(width),
            symbol_table(symbols).to_rich(width) if symbols else [],
            remarks([self.note], width),
        )

    def __str__(self) -> str:
        return plain_text(self.render(output_width()))


def format_value(cell: Quantity) -> str:
    """A number with thousands apart, or five digits of a fraction."""
    value = cell.value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"


def rows(values: Mapping[sympy.Symbol, Any], counts: Iterable[tuple[str, Any]]) -> tuple[Row, ...]:
    """Rows of one column."""
    return tuple(Row(label, (Quantity(formula, values),)) for label, formula in counts)


def sizes(**numbers: Any) -> dict[sympy.Symbol, int]:
    """Numbers of symbols, each validated: `sizes(N=256, D=512)`."""
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise CostError(
                "That is not a size.",
                asked=f"{name} = {number!r}",
                because="sizes are whole numbers of at least 1",
                instead=f"{name} = 16",
            )
    return {size_symbol(name): number for name, number in numbers.items()}
