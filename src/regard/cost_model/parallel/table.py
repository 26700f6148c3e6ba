"""A cost on several devices as a table, in a terminal or as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.cost_model.parallel.parallel_cost import ParallelCost
from regard.cost_model.quantity import Quantity
from regard.cost_model.roofline import duration
from regard.cost_model.table import find_value, symbol_table
from regard.cost_model.units import exact, short
from regard.render.table import Cell, Column, Table
from regard.render.terminal import WIDTH, one_line, output_width, plain_text, remarks, stack

if TYPE_CHECKING:
    from rich.console import RenderableType


def text(cost: ParallelCost, width: int | None = None) -> str:
    """The table without colors. Without a width it is as wide as the terminal, and 100 if there is none."""
    return plain_text(render(cost, width or output_width()))


def render(cost: ParallelCost, width: int = WIDTH) -> RenderableType:
    """Title, what a device sends and holds, times, letters, remarks."""
    kinds = {each.name: f"{each.kind}, {each.during}" for each in cost.collectives}
    sent = {**cost.sent_by_collective, "all": cost.sent}
    columns = [Column("value", "right"), Column("", "right"), Column("formula", "left", "cut")]
    sends = Table(
        [Column("sent"), Column("as"), *columns],
        [(name, kinds.get(name, ""), *_format_bytes(each)) for name, each in sent.items()],
    )
    held = {**cost.memory, "all": cost.memory_total}
    holds = Table(
        [Column("memory"), *columns],
        [(name.replace("_", " "), *_format_bytes(each)) for name, each in held.items() if each.formula != 0],
    )
    times = [(name, *_format_seconds(each)) for name, each in cost.seconds.items()]
    rate = find_value(cost.efficiency)
    times.append(("efficiency", Cell("-" if rate is None else f"{rate:.1%}"), Cell("T_1 / (K T_K)", "faint")))
    takes = Table([Column("time"), Column("value", "right"), Column("formula", "left", "cut")], times)
    letters = cost.legend()
    return stack(
        one_line((cost.name, "bold"), (f"  {_describe_strategy(cost)}", "none")),
        sends.to_rich(width),
        holds.to_rich(width),
        takes.to_rich(width),
        symbol_table(letters).to_rich(width) if letters else [],
        remarks([*cost.notes, "A formula that ends in ... is longer; to_json() has the whole."], width),
    )


def _describe_strategy(cost: ParallelCost) -> str:
    strategy = cost.strategy
    words = [f"training, {strategy.strategy} on {strategy.devices} devices"]
    if strategy.shared_by > 1:
        words.append(f"{strategy.shared_by} share a sequence ({strategy.layout})")
    if strategy.recompute:
        words.append("recomputed blocks")
    words.append(str(cost.cost.mode.dtype).removeprefix("torch."))
    return ", ".join(words)


def _format_bytes(quantity: Quantity) -> tuple[Cell, str, Cell]:
    value = find_value(quantity)
    formula = str(quantity.formula) if quantity.formula.free_symbols else ""
    numbers = ("-", "") if value is None else (exact(value), short(value, "B"))
    return Cell(numbers[0], "strong"), numbers[1], Cell(formula, "faint")


def _format_seconds(quantity: Quantity) -> tuple[Cell, Cell]:
    value = find_value(quantity)
    return Cell("-" if value is None else duration(value), "strong"), Cell(str(quantity.formula), "faint")
