"""The view Play in a real browser: the pattern editor, and every figure with knobs."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from urllib.parse import unquote

import pytest

PHONE, DESK = (390, 844), (1440, 900)
FIGURES = {"scale": "softmax", "key": "key", "convolution": "quadratic", "linear": "linear"}


def sideways(page) -> int:
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def read_hash(page) -> str:
    page.wait_for_timeout(300)
    return unquote(page.evaluate("location.hash").replace("+", " "))


@pytest.mark.slow
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("figure", sorted(FIGURES))
def test_every_figure_at_every_width_can_be_saved(visit, figure, size, scheme):
    page = visit(f"play?figure={figure}", size, scheme)
    page.wait_for_selector(f"regard-{FIGURES[figure]}[data-ready]")
    assert sideways(page) <= 0
    with page.expect_download() as download:
        page.get_by_role("button", name="SVG").click()
    drawing = ElementTree.fromstring(download.value.path().read_text())
    assert len(list(drawing.iter())) > 20
    lines = page.evaluate("document.querySelector('section.card > *').pythonLines()")
    compile(lines, "copied", "exec")


def test_a_slider_moved_by_keys_changes_the_figure_and_the_address(visit):
    page = visit("play?figure=scale")
    page.wait_for_selector("regard-softmax[data-ready]")
    before = page.locator("regard-softmax .rg-status").first.inner_text()
    slider = page.get_by_label("scale β")
    slider.focus()
    page.keyboard.press("Home")
    assert page.locator("regard-softmax .rg-status").first.inner_text() != before
    assert "beta=-2" in read_hash(page)
    again = visit(page.evaluate("location.hash.slice(1)"))
    again.wait_for_selector("regard-softmax[data-ready]")
    assert again.get_by_label("scale β").input_value() == "-2"


@pytest.mark.slow
@pytest.mark.parametrize("figure", ["scale", "key", "convolution", "linear"])
def test_copied_lines_run(visit, figure, capsys):
    page = visit(f"play?figure={figure}")
    page.wait_for_selector(f"regard-{FIGURES[figure]}[data-ready]")
    lines = page.evaluate("document.querySelector('section.card > *').pythonLines()")
    exec(compile(lines, "copied", "exec"), {})
    assert "tensor" in capsys.readouterr().out


@pytest.mark.slow
def test_a_key_is_moved_by_keys_and_the_law_agrees_with_the_run(visit):
    page = visit("play?figure=key")
    page.locator("[data-dot='0']").focus()
    for key in ("ArrowUp", "ArrowUp", "ArrowLeft"):
        page.keyboard.press(key)
    names, values = (page.locator(f"regard-key {kind}").all_inner_texts() for kind in ("dt", "dd"))
    facts = dict(zip(names, values, strict=True))
    assert facts["weight by the law"] == facts["weight of the run"]
    assert float(facts["largest difference"]) < 1e-12
    assert "shift" in read_hash(page)
    assert page.evaluate("document.activeElement.dataset.dot") == "0"


@pytest.mark.slow
def test_narrow_heads_one_pixel_apart_are_the_convolution(visit):
    page = visit("play?figure=convolution&alpha=50&spread=1")
    page.wait_for_selector("regard-quadratic[data-ready]")
    assert "the heads are the convolution" in page.locator("regard-quadratic .rg-status").inner_text()
    wide = visit("play?figure=convolution&alpha=0.3&spread=1")
    wide.wait_for_selector("regard-quadratic[data-ready]")
    assert "the heads are the convolution" not in wide.locator("regard-quadratic .rg-status").inner_text()
