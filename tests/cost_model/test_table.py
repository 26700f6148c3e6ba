"""The table of a cost: every number to the unit, at any width, with and without numbers for the symbols."""

from __future__ import annotations

import sys

import pytest

from regard.cost_model.cost import Cost
from regard.cost_model.cost_part import CostPart, PassCost
from regard.cost_model.depth import norm, total
from regard.cost_model.run_mode import RunMode
from regard.cost_model.symbols import size_symbols
from regard.cost_model.table import show, text
from regard.cost_model.units import exact, short

B, N, D, H = size_symbols("B N D H")
SIZES = {B: 3, N: 257, D: 509, H: 7}


def a_cost(values=None, name="Layer[big](509)", **setting) -> Cost:
    how = RunMode(**setting)
    parts = [
        CostPart(
            "attention.query",
            parameters=D * D + D,
            forward=PassCost(macs=B * N * D * D, bytes=4 * (2 * B * N * D + D * D + D), depth=total(D) + 2),
            backward=PassCost(macs=2 * B * N * D * D),
            saved=4 * B * N * D,
        ),
        CostPart(
            "attention.scores",
            forward=PassCost(macs=B * D * N**2, exponentials=B * H * N**2, bytes=4 * B * H * N**2),
            backward=PassCost(macs=2 * B * D * N**2),
            pairs=B * H * N**2,
        ),
        CostPart(
            "norm", parameters=2 * D, forward=PassCost(depth=norm(D)), saved=4 * B * N * (D + 2), normalised=B * N * D
        ),
    ]
    return Cost(name, parts, SIZES if values is None else values, how, notes=("A remark [with brackets].",))


def row(table: str, name: str) -> list[str]:
    (found,) = [line for line in table.splitlines() if line.startswith(f"{name} ")]
    return found.split("  ")


def test_every_quantity_is_printed_to_the_unit_with_its_formula():
    printed = text(a_cost(), width=100)
    macs = 3 * 257 * 509 * 509 + 3 * 509 * 257**2
    assert printed.splitlines()[0] == "Layer[big](509)  forward, float32"
    for name, number, unit in [
        ("MACs", macs, "MAC"),
        ("FLOPs", 2 * macs, "FLOP"),
        ("parameters", 509 * 509 + 509 + 2 * 509, ""),
        ("pairs", 3 * 7 * 257**2, ""),
        ("activation bytes", 4 * (2 * 3 * 257 * 509 + 2 * 3 * 257), "B"),
    ]:
        cells = [cell.strip() for cell in row(printed, name) if cell.strip()]
        assert cells[1] == f"{number:,}"
        assert cells[2] == short(number, unit)
    assert "B*D*N*(D + N)" in printed


def test_parts_have_their_share_and_add_up():
    printed = text(a_cost(), width=100)
    query, scores = 3 * 257 * 509 * 509, 3 * 509 * 257**2
    assert f"{query:,}" in printed
    assert f"{100 * query / (query + scores):.1f}%" in printed
    assert f"{100 * scores / (query + scores):.1f}%" in printed
    assert row(text(a_cost(), levels=1), "attention")[0] == "attention"
    assert "attention.scores" not in text(a_cost(), levels=1)
    assert "1 of 2 levels of parts; levels=2 shows all" in text(a_cost(), levels=1)


def test_the_backward_pass_is_named():
    printed = text(a_cost(step="backward", serial=True, stable=False, backend="native"))
    assert printed.splitlines()[0].endswith("backward, float32, backend native, plain softmax, serial sums")
    assert f"{2 * (3 * 257 * 509 * 509 + 3 * 509 * 257**2):,}" in printed


@pytest.mark.parametrize("width", [80, 100, 132])
@pytest.mark.parametrize("scale", [1, 1000])
def test_no_line_is_wider_than_the_room(width, scale):
    values = {letter: number * scale for letter, number in SIZES.items()}
    cost = a_cost(values)
    cost.parts = [part.with_prefix("a_model_with_a_long_name.layers") for part in cost.parts]
    lines = text(cost, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    rules = [line for line in lines if set(line) == {"-"}]
    assert len(rules) == 3  # quantities, parts, symbols: no row was folded into two


@pytest.mark.parametrize("width", [1, 40, 60])
def test_where_there_is_no_room_no_digit_is_left_out(width):
    printed = text(a_cost(), width=width)
    for name in ("macs", "parameters", "bytes", "activation_bytes"):
        assert f" {a_cost().quantity(name).value:,} " in printed


def test_symbols_without_numbers_have_a_dash_and_the_formulas_stay():
    printed = text(a_cost({B: 1, D: 509, H: 7}), width=80)
    assert [cell.strip() for cell in row(printed, "MACs") if cell.strip()] == ["MACs", "-", "B*D*N*(D + N)"]
    assert f"{509 * 509 + 3 * 509:,}" in printed  # what has no N has its number
    assert [cell.strip() for cell in row(printed, "attention.scores") if cell.strip()][2] == "B*D*N**2"
    assert [cell.strip() for cell in row(printed, "N") if cell.strip()] == ["N", "-", "sequence length"]


def test_a_long_formula_is_cut_and_says_so():
    cost = a_cost()
    cost.parts.append(CostPart("other", forward=PassCost(bytes=sum(B**i * D + N**i for i in range(1, 12)))))
    printed = text(cost, width=80)
    assert "..." in row(printed, "bytes")[-1]
    assert "ends in ... is longer; .formula and to_json() have the whole." in printed.replace("\n", " ")
    assert "..." not in text(a_cost(), width=132)


def test_parts_that_are_too_many_are_grouped_until_there_is_room():
    parts = [CostPart(f"layer_{i}.part_{j}", forward=PassCost(macs=D)) for i in range(5) for j in range(11)]
    cost = Cost("Deep", parts, {D: 2})
    assert "part_3" not in text(cost)
    assert "1 of 2 levels of parts; levels=2 shows all" in text(cost)
    assert "layer_4.part_10" in text(cost, levels=2)


def test_a_thing_of_one_part_has_no_table_of_parts():
    cost = Cost("One", [CostPart("only", forward=PassCost(macs=D))], {D: 5})
    assert "share" not in text(cost)
    assert row(text(cost), "MACs")[0] == "MACs"
    assert "5" in text(cost)


def test_remarks_and_names_are_text_and_never_markup():
    printed = text(a_cost(name="a[bold]b[/bold]"))
    assert "a[bold]b[/bold]" in printed
    assert "A remark [with brackets]." in printed


def test_without_a_terminal_it_is_plain_and_as_wide_as_a_page(capsys):
    show(a_cost())
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.rstrip("\n") == text(a_cost()) == str(a_cost())
    assert max(map(len, out.splitlines())) <= 100


def test_print_follows_the_width_of_a_terminal(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "64")
    assert str(a_cost()) == text(a_cost(), width=64)


@pytest.mark.parametrize(
    ("number", "unit", "printed"),
    [
        (0, "", "0"),
        (999, "B", "999 B"),
        (1000, "B", "1.000 kB"),
        (999_949, "", "999.9 k"),
        (999_950, "", "1.000 M"),
        (17_563_828_224, "MAC", "17.56 GMAC"),
        (-2048, "B", "-2.048 kB"),
        (10**21, "", "1.000 Z"),
        (0.25, "", "0.25"),
    ],
)
def test_short_numbers(number, unit, printed):
    assert short(number, unit) == printed


def test_exact_numbers():
    assert exact(1234567) == "1,234,567"
    assert exact(2.0) == "2"
    assert exact(0.33333333) == "0.3333"
    assert exact(12345.678) == "12,345.7"
