"""Patterns, their time, and quadratic heads over HTTP, against the library."""

from __future__ import annotations

import pytest
import torch
from lab_client import decode

from regard import Attention, Causal, First, Quadratic, Window, cost, read_pattern
from regard.layers.profiles import head_profile
from regard.visualize.attention_map import grid_weights


@pytest.mark.parametrize(
    ("expression", "tokens"),
    [("Causal() & Window(8, 0) | First(1)", 47), ("~Strided(5)", 61), ("Random(3, seed=1, block=4)", 53),
     ("Neighborhood((6, 8), 1)", 48)],
)  # fmt: skip
def test_a_pattern_is_drawn_counted_and_priced(client, expression, tokens):
    pattern = read_pattern(expression)
    found = client.post("pattern", expression=expression, tokens=tokens)
    assert not found["pooled"]
    assert torch.equal(decode(found["picture"]).bool(), pattern.matrix(tokens))
    assert found["pairs"] == int(pattern.matrix(tokens).sum())
    assert found["density"] == pytest.approx(float(pattern.matrix(tokens).float().mean()))
    assert read_pattern(found["expression"]) == pattern
    assert found["supports_kv_cache"] == pattern.supports_kv_cache
    curve = dict(map(tuple, found["curve"]))
    assert curve[tokens] == cost(Attention(pattern=pattern), tokens=tokens, dim=64, heads=1).macs.value
    assert curve[tokens] == 2 * 64 * found["pairs"]
    space: dict = {}
    exec(found["python"], space)
    assert space["pattern"] == pattern


def test_a_large_pattern_is_pooled_to_shares_of_its_cells(client):
    found = client.post("pattern", expression="Causal() & Window(100, 0) | First(3)", tokens=1009)
    picture = decode(found["picture"])
    assert found["pooled"]
    cell = 8
    whole = (Causal() & Window(100, 0) | First(3)).matrix(1009).float()
    assert picture.shape == (127, 127)
    for row, column in ((0, 0), (60, 60), (60, 48), (126, 126), (5, 90)):
        part = whole[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]
        assert float(picture[row, column]) == pytest.approx(255 * float(part.mean()), abs=0.51)


def test_a_grid_ends_its_curve_which_says_so(client):
    found = client.post("pattern", expression="Axial((5, 7))", tokens=35)
    assert [length for length, _ in found["curve"]] == [16, 32, 35]
    assert found["curve_ends"]


@pytest.mark.parametrize(
    "expression",
    ["", "import os", "__import__('os').system('true')", "Causal().__class__", "(lambda: 1)()", "Window(1, 2, 3, 4)",
     "Causal() & 3", "Where(print)", "Mask(1)", "(" * 400, "~" * 499, "Window(" + "9" * 300 + ", 0)", "Causal(" * 60,
     "Window(1e400, 0)", "Random(-1)", "Blocks(0)", "[Causal()]", "Causal() if 1 else Full()", "Window(*[1, 2])",
     "Segments([1, 2])", "Causal()\n& Full() ;", "\x00", "Neighborhood((0, 0), 1)", "x" * 501, 5, None, ["Causal()"]],
)  # fmt: skip
def test_what_is_no_pattern_is_refused_and_nothing_is_evaluated(client, expression):
    for name in ("pattern", "time", "cost"):
        status, error = client.refuse(name, expression=expression, tokens=16, sizes={"tokens": 16})
        assert status in (200, 400)  # a stream has begun, or not
        assert {"title", "because"} <= set(error)


def test_the_time_of_a_pattern_is_measured_and_its_backend_named(client):
    found = client.post("time", expression="Causal() & Window(31, 0)", tokens=257)
    assert found["milliseconds"] > 0
    assert found["backend"] in ("native", "sdpa", "blocked", "reference")


def test_quadratic_heads_are_those_of_the_library_and_become_a_convolution(client):
    heads = [{"center": [0, 1], "width": 1.3}, {"center": [-1, 0.5], "width": 2}]
    found = client.post("quadratic", grid=[5, 7], heads=heads, query=[2, 3])
    bias = Quadratic(2, (5, 7), centre=[[0, 1], [-1, 0.5]], alpha=[1 / (2 * 1.3**2), 1 / 8])
    expected = grid_weights(head_profile(bias), (2, 3))
    torch.testing.assert_close(decode(found["maps"]), expected, atol=1e-6, rtol=1e-5)
    assert found["kernel"] is None
    sharp = [{"center": [row, column], "width": 0.1} for row in (-1, 0, 1) for column in (-1, 0, 1)]
    found = client.post("quadratic", grid=[5, 7], heads=sharp, query=[2, 3])
    assert found["convolution_error"] < 1e-9
    assert found["kernel"] == [[row, column] for row in (-1, 0, 1) for column in (-1, 0, 1)]
    assert torch.equal(decode(found["maps"]).flatten(1).argmax(-1), torch.tensor([9, 10, 11, 16, 17, 18, 23, 24, 25]))


@pytest.mark.parametrize(
    "fields",
    [{"grid": [5]}, {"grid": [5, 0]}, {"grid": [65, 2]}, {"query": [5, 0]}, {"heads": []}, {"heads": [3]},
     {"heads": [{"center": [1], "width": 1}]}, {"heads": [{"center": [1, 1], "width": 0}]}, {"heads": "many"}],
)  # fmt: skip
def test_heads_that_lie_nowhere_are_refused(client, fields):
    whole = {"grid": [5, 7], "heads": [{"center": [0, 1], "width": 1}], "query": [2, 3], **fields}
    assert client.refuse("quadratic", **whole)[0] == 400
