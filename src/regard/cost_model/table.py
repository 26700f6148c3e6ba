"""A cost as a table, in a terminal or as plain text: quantities with their formulas, parts, symbols, remarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy

from regard.cost_model.cost import QUANTITIES, Cost
from regard.cost_model.quantity import Quantity
from regard.cost_model.symbols import legend
from regard.cost_model.units import exact, short
from regard.errors import CostError
from regard.render.table import Cell, Column, Table
from regard.render.terminal import WIDTH, one_line, output_width, plain_text, print_fitted, remarks, stack

if TYPE_CHECKING:
    from rich.console import RenderableType

# More parts than this are shown in groups, unless levels= is given.
MOST_PARTS = 30
UNITS = {"macs": "MAC", "flops": "FLOP", "bytes": "B", "activation_bytes": "B"}
NAMES = {"macs": "MACs", "flops": "FLOPs", "activation_bytes": "activation bytes"}
# Shown even if they are 0.
ALWAYS = ("parameters", "macs")
# The quantities of parts, with the names of their columns.
COLUMNS = {"parameters": "parameters", "macs": "MACs", "bytes": "bytes", "activation_bytes": "activations"}
CUT = "A formula that ends in ... is longer; .formula and to_json() have the whole."


def text(cost: Cost, levels: int | None = None, width: int | None = None) -> str:
    """The table without colors. Without a width it is as wide as the terminal, and 100 if there is none."""
    return plain_text(render(cost, levels, width or output_width()))


def show(cost: Cost, levels: int | None = None) -> None:
    """Print the table, in color to a terminal."""
    print_fitted(lambda width: render(cost, levels, width))


def render(cost: Cost, levels: int | None = None, width: int = WIDTH) -> RenderableType:
    """The whole table: title, quantities, parts, symbols, remarks."""
    quantities = {name: cost.quantity(name) for name in QUANTITIES}
    counts = _quantity_table(quantities)
    parts, remark = _part_table(cost, levels, width)
    symbols = legend([quantity.formula for quantity in quantities.values()], cost.values, cost.mode.step)
    notes, formulas = [*cost.notes], [counts]
    if parts is not None and any(column.overflow == "cut" for column in parts.columns):
        formulas.append(parts)
    if any(table.fit(width).rows != table.rows for table in formulas):
        notes.append(CUT)
    return stack(
        one_line((cost.name, "bold"), (f"  {_describe_setting(cost)}", "none")),
        counts.to_rich(width),
        [] if parts is None else [parts.to_rich(width), *([one_line((remark, "dim"))] if remark else [])],
        symbol_table(symbols).to_rich(width) if symbols else [],
        remarks(notes, width),
    )


def depth_table(cost: Cost, levels: int | None = None) -> Table:
    """The parallel depth of every part, one after the other: what no number of processors makes shorter."""
    found = {name: part.depth for name, part in cost.by_part(levels or _finest_levels(cost)).items()}
    rows = [
        (name, _format_count(find_value(depth)), Cell(str(depth.formula), "faint"))
        for name, depth in found.items()
        if depth.formula != 0
    ]
    return Table(
        [Column("part", "left", "cut-start"), Column("depth", "right"), Column("formula", "left", "cut")], rows
    )


def symbol_table(symbols: list[tuple[str, str, Any]]) -> Table:
    """Symbol, number and meaning; a symbol of several stages takes one line."""
    staged: dict[str, list[tuple[str, str, str]]] = {}
    for symbol, meaning, value in symbols:
        staged.setdefault(symbol.partition("_")[0], []).append((symbol, meaning, _format_symbol_value(value)))
    rows = []
    for several in staged.values():
        (first, meaning, value), last = several[0], several[-1][0]
        if len(several) == 1:
            rows.append((first, value, meaning))
        elif all(symbol.partition("_")[2] for symbol, _, _ in several):
            numbers = " ".join(number for _, _, number in several)
            rows.append((f"{first} .. {last}", numbers, f"{meaning.rpartition(', stage')[0]}, by stage"))
        else:
            rows += [(symbol, number, words) for symbol, words, number in several]
    columns = [Column("symbol"), Column("number", "right"), Column("meaning", "left", "cut")]
    return Table(columns, [(symbol, value, Cell(meaning, "faint")) for symbol, value, meaning in rows])


def find_value(quantity: Quantity) -> int | float | None:
    """The number, or None while a symbol has none."""
    try:
        return quantity.value
    except CostError:
        return None


# Quantities


def _quantity_table(quantities: dict[str, Quantity]) -> Table:
    rows = []
    for name, quantity in quantities.items():
        if quantity.formula == 0 and name not in ALWAYS:
            continue
        value = find_value(quantity)
        approximately = "" if value is None or abs(value) < 1000 else short(value, UNITS.get(name, ""))
        formula = str(quantity.formula) if quantity.formula.free_symbols else ""
        cells = (Cell(_format_count(value), "strong"), approximately, Cell(formula, "faint"))
        rows.append((NAMES.get(name, name), *cells))
    columns = [Column("quantity"), Column("value", "right"), Column("", "right"), Column("formula", "left", "cut")]
    return Table(columns, rows)


def _describe_setting(cost: Cost) -> str:
    """How it is run, in words."""
    mode = cost.mode
    words = ["forward and backward" if mode.step == "training" else mode.step]
    words.append(str(mode.dtype).removeprefix("torch."))
    if mode.backend is not None:
        words.append(f"backend {mode.backend}")
    if not mode.stable:
        words.append("plain softmax")
    if mode.serial:
        words.append("serial sums")
    return ", ".join(words)


def _format_count(value: int | float | None) -> str:
    return "-" if value is None else exact(value)


def _format_symbol_value(value: Any) -> str:
    if isinstance(value, sympy.Expr) and not value.is_number:
        return str(value)
    if isinstance(value, sympy.Expr):
        value = int(value) if value.is_integer else float(value)
    return _format_count(value)


# Parts


def _part_table(cost: Cost, levels: int | None, width: int) -> tuple[Table | None, str]:
    """The parts, and what was left out; None if there is one part only."""
    deepest = _deepest_level(cost)
    shown = levels if levels is not None else _finest_levels(cost)
    found = cost.by_part(shown)
    if len(found) < 2:
        return None, ""
    remark = f"{shown} of {deepest} levels of parts; levels={deepest} shows all" if shown < deepest else ""
    parts = {name: {column: part.quantity(column) for column in COLUMNS} for name, part in found.items()}
    parts = {name: each for name, each in parts.items() if any(quantity.formula != 0 for quantity in each.values())}
    columns = [column for column in COLUMNS if any(each[column].formula != 0 for each in parts.values())]
    values = {name: {column: find_value(each[column]) for column in columns} for name, each in parts.items()}
    if any(value is None for row in values.values() for value in row.values()):
        return _formula_table(parts, columns), remark
    total = find_value(cost.macs) if "macs" in columns else None
    table = _number_table(values, columns, total, whole=True)
    # Counts are shortened before names are.
    return (table if table.width <= width else _number_table(values, columns, total, whole=False)), remark


def _deepest_level(cost: Cost) -> int:
    return max((part.name.count(".") + 1 for part in cost.parts), default=0)


def _finest_levels(cost: Cost) -> int:
    """As many levels as there is room for, and one at least."""
    deepest = _deepest_level(cost)
    for levels in range(deepest, 1, -1):
        if len({".".join(part.name.split(".")[:levels]) for part in cost.parts}) <= MOST_PARTS:
            return levels
    return min(deepest, 1)


def _number_table(values: dict[str, dict[str, Any]], columns: list[str], total: float | None, whole: bool) -> Table:
    names = [Column("part", "left", "cut-start")]
    for column in columns:
        names += [Column(name, "right") for name in (COLUMNS[column], *(["share"] if column == "macs" else []))]
    rows = []
    for name, row in values.items():
        cells = [name]
        for column in columns:
            count = row[column]
            # Bytes are estimates of what is moved; parameters and products are counts, exact to the unit.
            words = exact(count) if whole and "bytes" not in column else short(count, UNITS.get(column, ""))
            cells.append("-" if count == 0 else words)
            if column == "macs":
                cells.append(f"{100 * count / total:.1f}%" if total and count else "-")
        rows.append(cells)
    return Table(names, rows)


def _formula_table(parts: dict[str, dict[str, Quantity]], columns: list[str]) -> Table:
    """Formulas instead of numbers, where a symbol has no value."""
    columns = [column for column in columns if column in ALWAYS] or columns[:1]
    rows = []
    for name, each in parts.items():
        formulas = ("-" if each[column].formula == 0 else str(each[column].formula) for column in columns)
        rows.append((name, *(Cell(formula, "faint") for formula in formulas)))
    names = (Column(NAMES.get(column, column), "left", "cut") for column in columns)
    return Table([Column("part", "left", "cut-start"), *names], rows)
