"""One table for a terminal, plain text, Markdown and HTML."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from regard.errors import InputError
from regard.render.table import Bar, Cell, Column, Table, shorten
from regard.render.terminal import one_line, plain_text, print_fitted, remarks, stack

EVIL = "<script>[bold]|&"
TABLE = Table(
    [Column("name"), Column("count", "right"), Column("formula", "left", "cut")],
    [("one", "1,234,567", Cell("a + b", "faint")), (Cell("two", "broken", "#two"), "8", "a*b + c*d*e*f*g + h*i")],
)


def test_plain_text_has_aligned_columns_two_spaces_apart():
    assert str(TABLE).split("\n") == [
        "name      count  formula",
        "--------------------------------------",
        "one   1,234,567  a + b",
        "two           8  a*b + c*d*e*f*g + h*i",
    ]
    assert TABLE.width == 38


def test_text_is_truncated_and_numbers_are_not():
    lines = TABLE.to_text(33).split("\n")
    assert lines[-1] == "two           8  a*b + c*d*e ..."
    assert TABLE.to_text(5).split("\n")[2].startswith("one   1,234,567  a + b")
    assert TABLE.fit(38).rows == [tuple(row) for row in TABLE.rows]


@pytest.mark.parametrize("width", [42, 47, 60])
def test_flexible_columns_share_the_width(width):
    names = [Column("a", "left", "cut-start"), Column("b"), Column("c", "left", "cut")]
    table = Table(names, [("x" * 50, "fixed", "y" * 50), ("short", "", "z")])
    lines = table.to_text(width).split("\n")
    assert max(map(len, lines)) in (width - 1, width)
    assert lines[2].startswith("... x")
    assert lines[2].endswith("y ...")


def test_a_column_that_needs_less_leaves_the_rest_to_the_others():
    names = [Column("a", "left", "cut-start"), Column("b", "left", "cut")]
    table = Table(names, [("x" * 18, "y" * 40)])
    assert table.to_text(60) == table.to_text(100)
    assert "x" * 18 in table.to_text(50)


def test_wrapped_text_keeps_every_word_and_no_index_is_split():
    words = "input[:, 1] -> output[0, 3] moved by 4.7e-01, bound 3.5e-11"
    text = Table([Column("law"), Column("", "left", "wrap")], [("L1", words)]).to_text(35)
    assert " ".join(text.split("\n", 2)[2].replace("L1", "").split()) == words
    assert all("[" not in line or "]" in line for line in text.split("\n"))
    assert max(map(len, text.split("\n"))) <= 35


def test_long_names_of_columns_take_two_lines_before_anything_is_cut():
    table = Table([Column("x"), Column("layers until connected", "right")], [("full", "1")])
    assert max(map(len, table.to_text(20).split("\n"))) <= 20
    assert "layers until connected" in table.to_text(40)


def test_a_section_begins_after_an_empty_line():
    lines = Table([Column("a")], [("x",), ("y",), ("z",)], sections=(0, 2)).to_text().split("\n")
    assert lines == ["a", "-", "x", "y", "", "z"]


def test_texts_are_never_markup():
    table = Table([Column(EVIL), Column(EVIL)], [(EVIL, Cell(EVIL, "holds", EVIL)), (EVIL, Bar(0.5, EVIL))])
    assert str(table).count(EVIL) == 6
    root = ElementTree.fromstring(table.to_html())
    assert "script" not in [each.tag for each in root.iter()]
    assert "".join(root.itertext()).count(EVIL) == 5
    assert root.find(".//a").get("href") == EVIL  # type: ignore[union-attr]
    markdown = table.to_markdown()
    assert "<script>" not in markdown
    assert all(line.replace("\\|", "").count("|") == 3 for line in markdown.split("\n"))


def test_html_has_kinds_sides_bars_and_links():
    root = ElementTree.fromstring(TABLE.to_html())
    assert [each.get("class") for each in root.iter("td")] == ["number", "faint", "number", None]
    assert [each.get("data-label") for each in root.iter("td")] == ["count", "formula"] * 2
    assert [each.get("href") for each in root.iter("a")] == ["#two"]
    bar = Table([Column("a"), Column("b")], [("x", Bar(0.25, "a quarter"))]).to_html()
    assert 'style="width:25.00%"' in bar
    assert 'aria-label="a quarter"' in bar


def test_unequal_rows_are_refused_and_no_rows_are_fine():
    with pytest.raises(InputError, match="unequal"):
        Table([Column("a"), Column("b")], [("x",)])
    assert str(Table([Column("a"), Column("b")], [])).split("\n")[0] == "a  b"


def test_a_terminal_has_colors_and_other_outputs_have_none(capsys):
    console = Console(force_terminal=True, color_system="truecolor", width=80, file=None)
    with console.capture() as caught:
        console.print(TABLE.to_rich(80))
    assert "\x1b[" in caught.get()
    print_fitted(TABLE.to_rich)
    assert capsys.readouterr().out.rstrip("\n") == str(TABLE)


def test_blocks_are_stacked_with_one_empty_line_between_them():
    shown = stack(one_line(("a", "bold")), [], [one_line(("b", "")), one_line(("c", ""))], remarks(["d " * 30], 40))
    assert plain_text(shown).split("\n") == ["a", "", "b", "c", "", ("d " * 20).strip(), ("d " * 10).strip()]


def test_shortened_texts_say_that_something_is_left_out():
    assert shorten("a + b*c", 7) == "a + b*c"
    assert shorten("a*b + c*d", 8) == "a*b ..."
    assert shorten("blocks.0.attention", 13, "cut-start") == "... attention"
