"""Curves of cost: exact crossings, a drawing that is well-formed, and labels that do not cover one another."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import pytest
import sympy

from regard.cost_model.chart import CostChart, draw_curves
from regard.cost_model.cost import Cost
from regard.cost_model.cost_part import CostPart, PassCost
from regard.cost_model.symbols import size_symbols
from regard.errors import CostError, InputError
from regard.render.chart import LEFT, TOP, WIDTH, x_ticks
from regard.render.svg import LETTER_WIDTH, Box, spread_labels

B, N, d = size_symbols("B N d")
SVG = "{http://www.w3.org/2000/svg}"


def a_cost(macs, **more) -> Cost:
    return Cost("a", [CostPart("a", forward=PassCost(macs=sympy.sympify(macs)))], {B: 1, d: 64}, **more)


SOFTMAX, LINEAR, WINDOW = a_cost(2 * N**2 * d), a_cost(2 * N * d**2 + 2 * N * d), a_cost(2 * d * 129 * N)
MANY = {
    "Full()": SOFTMAX,
    "linear": LINEAR,
    "Window(128, 0)": WINDOW,
    "Causal()": a_cost(d * (N**2 + N)),
    "channels": a_cost(2 * N * 512 * d),
    "few <global> & others": a_cost(8 * N * d + 10**6),
}


def drawn(picture: CostChart) -> ElementTree.Element:
    return ElementTree.fromstring(picture.svg)


def test_linear_attention_is_cheaper_from_one_more_than_its_dimension():
    (crossing,) = draw_curves({"softmax": SOFTMAX, "linear": LINEAR}).crossings
    assert (crossing.length, crossing.before, crossing.after, crossing.equal) == (65, "softmax", "linear", True)
    assert crossing.value == 2 * 65**2 * 64
    assert str(crossing) == "65: linear costs as much as softmax, and less beyond"


def test_a_crossing_between_two_lengths_is_the_first_at_which_the_other_is_cheaper():
    one, other = a_cost(N**2), a_cost(100 * N + 1)
    (crossing,) = draw_curves({"square": one, "line": other}, low=2).crossings
    assert crossing.length == next(n for n in range(1, 1000) if n**2 > 100 * n + 1) == 101
    assert not crossing.equal
    assert "101: from here on line costs less than square" in str(crossing)


@pytest.mark.parametrize("offset", [3, 7, 63, 64, 65, 1021, 4099, 65535])
def test_crossings_are_exact_wherever_they_lie(offset):
    (crossing,) = draw_curves({"square": a_cost(N**2), "line": a_cost(offset * N)}, low=2, high=131072).crossings
    assert (crossing.length, crossing.equal) == (offset, True)


def test_curves_that_only_part_do_not_cross():
    window = a_cost(N * sympy.Min(N, 128))
    assert draw_curves({"full": a_cost(N**2), "window": window}).crossings == []
    both = draw_curves({"full": a_cost(N**2), "other": a_cost(sympy.Max(2 * N, N**2 - 10000))}, low=1, high=512)
    assert [(crossing.length, crossing.after) for crossing in both.crossings] == [(2, "other")]


def test_every_length_is_computed_again_where_a_cost_can_be_recomputed():
    """Pairs of a pattern are a number that a length decides; a formula with an old one would be wrong."""
    lengths = []

    def again(**sizes):
        lengths.append(sizes["tokens"])
        return a_cost(sizes["tokens"] * min(sizes["tokens"], 128))

    cost = a_cost(1, recompute=again)
    picture = draw_curves({"window": cost, "half": a_cost(N**2 / 2)}, low=16, high=1024)
    assert [(crossing.length, crossing.after) for crossing in picture.crossings] == [(256, "window")]
    assert len(lengths) == len(set(lengths))


def test_a_curve_ends_where_the_thing_does():
    def again(**sizes):
        if sizes["tokens"] > 1000:
            raise InputError("1,001 tokens are too many.", because="there are 1,000 positions", instead="fewer")
        return a_cost(sizes["tokens"])

    picture = draw_curves({"short": a_cost(1, recompute=again), "other": a_cost(3 * N)})
    assert max(length for length, _ in picture.to_dict()["curves"]["short"]) <= 1000
    assert "short ends at 861: 1,001 tokens are too many." in picture.svg
    assert picture.table().splitlines()[4].split()[-1] == "-"


def test_the_drawing_is_well_formed_and_says_what_it_shows():
    picture = draw_curves(MANY, low=16)
    root = drawn(picture)
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title").text == "Multiply-adds against tokens"
    words = root.find(f"{SVG}desc").text
    assert "65: linear costs as much as Full(), and less beyond." in words
    assert "Full(): 32.77 kMAC at 16, 549.8 GMAC at 65,536." in words
    assert root.get("aria-labelledby").split() == ["regard-title", "regard-desc"]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "few <global> & others" in texts
    assert {"65", "129", "257", "512", "1,023"} <= set(texts)
    assert "prefers-color-scheme:dark" in root.find(f"{SVG}style").text
    dashes = [line.get("stroke-dasharray") for line in root.iter(f"{SVG}polyline")]
    assert len(set(dashes)) == len(MANY)


def _boxes(root: ElementTree.Element, name: str) -> list[Box]:
    found = []
    for text in root.iter(f"{SVG}text"):
        if text.get("class") == name:
            x, y, wide = float(text.get("x")), float(text.get("y")), LETTER_WIDTH * 13 * len(text.text)
            left = x - wide / 2 if text.get("text-anchor") == "middle" else x
            found.append(Box(left, y - 11, left + wide, y + 2))
    return found


@pytest.mark.parametrize("low", [1, 16, 60])
def test_labels_cover_neither_each_other_nor_a_ring(low):
    root = drawn(draw_curves(MANY, low=low))
    marks, names = _boxes(root, "mark"), _boxes(root, "strong")
    rings = [
        Box(x - 4, y - 4, x + 4, y + 4)
        for x, y in ((float(ring.get("cx")), float(ring.get("cy"))) for ring in root.iter(f"{SVG}circle"))
    ]
    assert len(marks) >= 5
    assert len(names) == len(MANY)
    for one, other in itertools.combinations([*marks, *names], 2):
        assert not one.overlaps(other)
    for mark, ring in itertools.product(marks, rings):
        assert not mark.overlaps(ring)
    width, height = float(root.get("width")), float(root.get("height"))
    for box in [*marks, *names]:
        assert box.left >= 0
        assert box.right <= width
        assert box.top >= TOP - 8
        assert box.bottom <= height


def test_names_of_curves_that_end_together_are_spread():
    assert spread_labels([100.0, 101.0, 102.0], 18, 50, 400) == [83.0, 101.0, 119.0]
    assert spread_labels([398.0, 399.0, 400.0], 18, 50, 400) == [364.0, 382.0, 400.0]
    assert spread_labels([51.0, 50.0, 66.0], 18, 50, 400) == [68.0, 50.0, 86.0]
    assert spread_labels([50.0, 399.0], 18, 50, 400) == [50.0, 399.0]
    assert spread_labels([], 18, 50, 400) == []


def test_ticks_are_powers_of_two_with_room_between_them():
    assert x_ticks(64, 1024) == [64, 128, 256, 512, 1024]
    assert x_ticks(100, 120) == [100, 120]
    for high in (2**12, 2**20, 2**40):
        ticks = x_ticks(1, high)
        assert (WIDTH / 12 if high == 2**12 else WIDTH) / len(ticks) > 0
        assert LETTER_WIDTH * 12 * len(f"{high:,}") <= WIDTH / max(len(ticks) - 1, 1) + 12


def test_a_picture_of_constants_and_of_one_curve_is_drawn():
    picture = draw_curves({"constant": a_cost(5 * B * d)})
    assert picture.crossings == []
    assert "nan" not in picture.svg
    points = next(drawn(picture).iter(f"{SVG}polyline")).get("points").split()
    assert float(points[0].split(",")[0]) == LEFT
    assert float(points[-1].split(",")[0]) == LEFT + WIDTH


def test_saved_as_a_drawing_and_as_a_page(tmp_path):
    picture = draw_curves({"softmax": SOFTMAX, "linear": LINEAR})
    picture.save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == picture.svg + "\n" == picture._repr_svg_() + "\n"
    picture.save(tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert page.startswith("<!doctype html>")
    assert picture.svg in page
    assert "<li>65: linear costs as much as softmax, and less beyond</li>" in page
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")  # it needs nothing else
    with pytest.raises(InputError, match=r"cannot be written as \.png"):
        picture.save(tmp_path / "a.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        picture.save(tmp_path / "file" / "a.svg")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"costs": {}}, "There is no curve to draw"),
        ({"of": "joules"}, "There is no quantity 'joules'"),
        ({"low": 64, "high": 64}, "No length lies between 64 and 64"),
        ({"symbol": "length"}, "No formula has a symbol 'length'"),
        ({"of": "parameters"}, "nothing has no logarithm"),
        ({"costs": {"a": a_cost(N * size_symbols("H")[0])}}, "A formula has no number yet"),
    ],
)
def test_a_question_that_cannot_be_drawn_is_refused_in_words(arguments, words):
    with pytest.raises(CostError) as failure:
        draw_curves(**{"costs": {"softmax": SOFTMAX}, **arguments})
    assert words in str(failure.value)
    assert failure.value.because
    assert failure.value.instead
