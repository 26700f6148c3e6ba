"""Markup: text is escaped wherever it enters, and nothing is escaped twice."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from regard.errors import InputError
from regard.render.colors import DARK, HEADS, LIGHT, css_variables
from regard.render.files import check_suffix, write_file
from regard.render.markup import Markup, element, escape, join, script_data
from regard.render.page import Page, Widget, paragraph, render_page
from regard.render.svg import Box, document, place_label, spread_labels

EVIL = """<script>alert("'&'")</script>"""


def test_content_and_attributes_are_escaped_and_read_back_as_they_were():
    made = element("text", EVIL, "&", x=EVIL)
    assert "<script" not in made
    read = ElementTree.fromstring(made)
    assert read.text == EVIL + "&"
    assert read.get("x") == EVIL


def test_markup_is_escaped_once():
    inner = element("b", "a < b")
    assert element("p", inner) == "<p><b>a &lt; b</b></p>"
    assert escape(escape("a < b")) == "a &lt; b"
    assert join(["<", inner], "-") == "&lt;-<b>a &lt; b</b>"
    assert not isinstance(inner + "<", Markup)  # a sum with plain text is plain text again, and is escaped


def test_attributes_may_be_flags_or_left_out():
    assert element("input", hidden=True, value=None, disabled=False, data_head=3) == '<input hidden data-head="3"/>'


def test_no_text_ends_the_element_of_the_data():
    made = script_data({"name": "</script><script>alert(1)</script>"})
    assert made.count("</script>") == 1
    with pytest.raises(ValueError, match="JSON compliant"):
        script_data(float("nan"))


def test_a_body_that_is_no_markup_is_escaped():
    assert "<script>" not in render_page(EVIL, EVIL)


def test_a_page_carries_the_style_and_the_script_of_a_widget_once():
    page = Page("two")
    widget = Widget("<i>w</i>", style=".w {}", script="run();")
    page.add("first", widget, paragraph("words"))
    page.add("second", widget)
    assert page.html.count(".w {}") == page.html.count("run();") == 1
    assert page.html.count("<i>w</i>") == 2
    assert ".w {}" in widget.standalone
    assert "run();" in widget.standalone
    assert "run();" not in Page("none").html


def test_every_color_of_the_palette_is_there_for_light_and_dark():
    assert set(LIGHT) == set(DARK)
    for name in [*LIGHT, *(f"h{index}" for index in range(len(HEADS)))]:
        assert css_variables().count(f"--{name}: ") == 3  # light; dark by the reader's system, and by the page


def test_a_document_is_a_file_of_its_own():
    root = ElementTree.fromstring(document([element("text", EVIL)], 7.5, 11))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("viewBox") == "0 0 7.5 11"


def test_a_label_covers_nothing_that_is_taken():
    inside = Box(0, 0, 200, 100)
    taken = [Box(x, 0, x + 20, 100) for x in (0, 60, 120)]
    found = place_label(50, 50, 16, 10, inside, taken, [])
    assert found is not None
    assert not any(found[0].overlaps(box) for box in taken)
    assert inside.contains(found[0])
    assert place_label(50, 50, 300, 10, inside, [], []) is None


def test_labels_are_spread_within_their_limits():
    places = [3.0, 1.0, 3.5, 3.25]
    moved = spread_labels(places, 2.0, low=0.0, high=7.0)
    assert sorted(range(4), key=moved.__getitem__) == sorted(range(4), key=places.__getitem__)
    ordered = sorted(moved)
    assert all(b - a >= 2.0 for a, b in pairwise(ordered))
    assert min(moved) >= 0.0
    assert max(moved) <= 7.0


def test_files_are_refused_with_a_reason(tmp_path):
    with pytest.raises(InputError, match=r"cannot be written as \.png") as failure:
        check_suffix("a.png", (".svg", ".html"))
    assert failure.value.instead == "a.svg or a.html"
    with pytest.raises(InputError, match="not a file name"):
        check_suffix(7, (".svg",))  # type: ignore[arg-type]
    assert write_file(tmp_path / "new" / "a.txt", "é").read_bytes() == "é".encode()
    with pytest.raises(InputError, match="cannot be written"):
        write_file(tmp_path, "")
