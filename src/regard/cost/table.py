"""A cost in a terminal, or as the same table in plain text: formulas above, parts below, letters last."""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import sympy
from rich.box import Box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from regard.cost.cost import QUANTITIES, Cost
from regard.cost.letters import legend
from regard.cost.quantity import Quantity
from regard.cost.units import exact, short
from regard.errors import CostError

WIDTH = 100
# Finer parts than so many are shown together, unless somebody asks for levels.
MOST_PARTS = 30
# Tables fit their width by themselves. Where that cannot be, a terminal may wrap a line, but no digit is left out.
UNCUT = 10_000
# The least room of a formula; a narrower terminal wraps.
LEAST = 16
UNITS = {"macs": "MAC", "flops": "FLOP", "bytes": "B", "activation_bytes": "B"}
WORDS = {"macs": "MACs", "flops": "FLOPs", "activation_bytes": "activation bytes"}
# What is told even if it is nothing.
ALWAYS = ("parameters", "macs")
# A rule under the header and nothing else; letters that every terminal and every log file has.
RULED = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def text(cost: Cost, levels: int | None = None, width: int | None = None) -> str:
    """The table without colours. Without a width it is as wide as the terminal, and 100 if there is none."""
    return plain(render(cost, levels, width or _room()), width or _room())


def show(cost: Cost, levels: int | None = None) -> None:
    """Print the table: in colours where there is somebody to see them."""
    printed(lambda width: render(cost, levels, width))


def printed(made: Any) -> None:
    """Print what `made` makes for a width: in colours to a terminal, as plain text anywhere else."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(made(console.width), crop=False, width=UNCUT)
    else:
        print(plain(made(WIDTH), WIDTH))


def plain(shown: RenderableType, width: int = WIDTH) -> str:
    """What rich would show, as text, however the terminal is made, and if there is none."""
    out = io.StringIO()
    console = Console(file=out, width=max(width, UNCUT), color_system=None, force_terminal=False, legacy_windows=False)
    console.print(shown, crop=False)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().split("\n"))


def render(cost: Cost, levels: int | None = None, width: int = WIDTH) -> RenderableType:
    """The whole table: title, quantities, parts, letters, remarks."""
    # Text, never markup: what strangers call their modules may have brackets.
    pieces: list[RenderableType] = [line((cost.name, "bold"), (f"  {_setting(cost)}", "none")), Text()]
    quantities = {name: cost.quantity(name) for name in QUANTITIES}
    table, cut = _quantities(quantities, width)
    pieces.append(table)
    parts = _parts(cost, levels, width)
    if parts is not None:
        table, remark, cut_too = parts
        cut = cut or cut_too
        pieces += [Text(), table]
        if remark:
            pieces.append(line((remark, "dim")))
    letters = legend([quantity.formula for quantity in quantities.values()], cost.values)
    if letters:
        pieces += [Text(), _letters(letters, width)]
    notes = [*cost.notes]
    if cut:
        notes.append("A formula that ends in ... is longer; .formula and to_json() have the whole.")
    if notes:
        pieces.append(Text())
        pieces += [line((row, "dim")) for note in notes for row in textwrap.wrap(note, max(width, 40))]
    return Group(*pieces)


# Pieces that other tables are made of, too


def ruled(columns: Sequence[tuple[str, Any]]) -> Table:
    """An empty table with a rule under its header; a column is a name and "left" or "right"."""
    table = Table(box=RULED, pad_edge=False, padding=(0, 0, 0, 1), show_edge=False, header_style="bold")
    for name, justify in columns:
        table.add_column(Text(name), justify=justify, no_wrap=True, overflow="crop")
    return table


def line(*pieces: tuple[str, str]) -> Text:
    """One line that stays one: a terminal may wrap it, but what is copied from it is whole."""
    return Text.assemble(*pieces, no_wrap=True, overflow="ignore")


def cut_short(words: str, room: int) -> str:
    """As much of it as there is room for, and a sign that there is more."""
    return words if len(words) <= room else f"{words[: max(room - 4, 1)].rstrip(' *+-(')} ..."


def number(quantity: Quantity) -> int | float | None:
    """The number, or None while a letter has none."""
    try:
        return quantity.value
    except CostError:
        return None


# Quantities


def _quantities(quantities: dict[str, Quantity], width: int) -> tuple[Table, bool]:
    rows = []
    for name, quantity in quantities.items():
        if quantity.formula == 0 and name not in ALWAYS:
            continue
        value = number(quantity)
        close = "" if value is None or abs(value) < 1000 else short(value, UNITS.get(name, ""))
        formula = str(quantity.formula) if quantity.formula.free_symbols else ""
        rows.append((WORDS.get(name, name), "-" if value is None else exact(value), close, formula))
    heads = ("quantity", "value", "", "formula")
    room = max(width - sum(2 + max(len(row[column]) for row in [*rows, heads]) for column in range(3)) - 1, LEAST)
    table = ruled([(heads[0], "left"), (heads[1], "right"), (heads[2], "right"), (heads[3], "left")])
    cut = False
    for name, value, close, formula in rows:
        fits = cut_short(formula, room)
        cut = cut or fits != formula
        table.add_row(name, Text(value, style="bold"), Text(close), Text(fits, style="dim"))
    return table, cut


def _setting(cost: Cost) -> str:
    """How it is run, in words."""
    setting = cost.setting
    words = ["forward and backward" if setting.step == "training" else setting.step]
    words.append(str(setting.dtype).removeprefix("torch."))
    if setting.backend is not None:
        words.append(f"backend {setting.backend}")
    if not setting.stable:
        words.append("plain softmax")
    if setting.serial:
        words.append("serial sums")
    return ", ".join(words)


# Parts

COLUMNS = ("parameters", "macs", "bytes", "activation_bytes")


def _parts(cost: Cost, levels: int | None, width: int) -> tuple[Table, str, bool] | None:
    """The parts as a table, what was left out of it, and whether a formula was cut; None if there is one part only."""
    deepest = max((part.name.count(".") + 1 for part in cost.parts), default=0)
    shown = levels if levels is not None else _finest(cost, deepest)
    found = cost.by_part(shown)
    if len(found) < 2:
        return None
    remark = f"{shown} of {deepest} levels of parts; levels={deepest} shows all" if shown < deepest else ""
    kept = {name: {column: part.quantity(column) for column in COLUMNS} for name, part in found.items()}
    kept = {name: each for name, each in kept.items() if any(quantity.formula != 0 for quantity in each.values())}
    columns = [column for column in COLUMNS if any(each[column].formula != 0 for each in kept.values())]
    values = {name: {column: number(each[column]) for column in columns} for name, each in kept.items()}
    if any(row[column] is None for row in values.values() for column in columns):
        table, cut = _formulas(kept, columns, width)
        return table, remark, cut
    return _numbers(cost, values, columns, width), remark, False


def depths(cost: Cost, levels: int | None = None, width: int = WIDTH) -> RenderableType:
    """The depth of every part, one after the other: what no number of processors makes shorter."""
    deepest = max((part.name.count(".") + 1 for part in cost.parts), default=0)
    found = {name: part.depth for name, part in cost.by_part(levels or _finest(cost, deepest)).items()}
    rows = [(name, number(depth), str(depth.formula)) for name, depth in found.items() if depth.formula != 0]
    table = ruled([("part", "left"), ("depth", "right"), ("formula", "left")])
    named = min(max((len(name) for name, _, _ in rows), default=4), width // 2)
    told = ["-" if value is None else exact(value) for _, value, _ in rows]
    room = max(width - named - max(map(len, ["depth", *told])) - 4, LEAST)
    for (name, _, formula), value in zip(rows, told, strict=True):
        table.add_row(Text(_inner(name, named)), value, Text(cut_short(formula, room), style="dim"))
    return table


def _finest(cost: Cost, deepest: int) -> int:
    """As many levels as there is room for, and one at least."""
    for levels in range(deepest, 1, -1):
        if len({".".join(part.name.split(".")[:levels]) for part in cost.parts}) <= MOST_PARTS:
            return levels
    return min(deepest, 1)


def _numbers(cost: Cost, values: dict[str, dict[str, Any]], columns: list[str], width: int) -> Table:
    heads = {"parameters": "parameters", "macs": "MACs", "bytes": "bytes", "activation_bytes": "activations"}
    total = number(cost.macs) if "macs" in columns else None

    def rows(whole: bool) -> list[list[str]]:
        found = []
        for name, row in values.items():
            cells = [name]
            for column in columns:
                count = row[column]
                # Bytes are estimates of what is moved; parameters and products are counts, told to the unit.
                told = exact(count) if whole and "bytes" not in column else short(count, UNITS.get(column, ""))
                cells.append("-" if count == 0 else told)
                if column == "macs":
                    cells.append(f"{100 * count / total:.1f}%" if total and count else "-")
            found.append(cells)
        return found

    names = ["part"]
    for column in columns:
        names += [heads[column], "share"] if column == "macs" else [heads[column]]
    cells, taken = [], 0
    for whole in (True, False):  # counts are shortened before names are
        cells = rows(whole)
        taken = sum(2 + max(len(row[column]) for row in [*cells, names]) for column in range(1, len(names)))
        if taken + max(len(row[0]) for row in cells) <= width:
            break
    room = max(width - taken, LEAST)
    table = ruled([(name, "left" if name == "part" else "right") for name in names])
    for name, *rest in cells:
        table.add_row(Text(_inner(name, room)), *rest)
    return table


def _inner(name: str, room: int) -> str:
    """The end of a long name, which says most."""
    return name if len(name) <= room else f"... {name[-max(room - 4, 1) :]}"


def _formulas(kept: dict[str, dict[str, Quantity]], columns: list[str], width: int) -> tuple[Table, bool]:
    """Formulas instead of numbers, where a letter has none."""
    columns = [column for column in columns if column in ALWAYS] or columns[:1]
    named = min(max(len(name) for name in kept), width // 3)
    room = max((width - named) // len(columns) - 3, LEAST)
    table, cut = ruled([("part", "left"), *((WORDS.get(column, column), "left") for column in columns)]), False
    for name, each in kept.items():
        whole = ["-" if each[column].formula == 0 else str(each[column].formula) for column in columns]
        cells = [cut_short(formula, room) for formula in whole]
        cut = cut or cells != whole
        table.add_row(Text(_inner(name, named)), *(Text(cell, style="dim") for cell in cells))
    return table, cut


# Letters


def _letters(letters: list[tuple[str, str, Any]], width: int) -> Table:
    """Letter, number and meaning; a letter of several stages takes one line."""
    staged: dict[str, list[tuple[str, str, str]]] = {}
    for letter, words, value in letters:
        base = letter.partition("_")[0]
        staged.setdefault(base, []).append((letter, words, _letter_number(value)))
    rows = []
    for several in staged.values():
        (first, words, value), last = several[0], several[-1][0]
        if len(several) == 1:
            rows.append((first, value, words))
        elif all(letter.partition("_")[2] for letter, _, _ in several):
            numbers = " ".join(number for _, _, number in several)
            rows.append((f"{first} .. {last}", numbers, f"{words.rpartition(', stage')[0]}, by stage"))
        else:
            rows += [(letter, number, meaning) for letter, meaning, number in several]
    table = ruled([("letter", "left"), ("number", "right"), ("meaning", "left")])
    heads = [max(len(row[column]) for row in [*rows, ("letter", "number", "")]) for column in range(2)]
    room = max(width - sum(heads) - 4, LEAST)
    for letter, value, words in rows:
        table.add_row(letter, value, Text(cut_short(words, room), style="dim"))
    return table


def _letter_number(value: Any) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, sympy.Expr) and not value.is_number else exact(sympy_number(value))


def sympy_number(value: Any) -> int | float:
    """A plain number of whatever stands for one."""
    if isinstance(value, sympy.Expr):
        return int(value) if value.is_integer else float(value)
    return value


def _room() -> int:
    """As wide as the terminal that `print` writes to, if it does."""
    return Console().width if sys.stdout.isatty() else WIDTH
