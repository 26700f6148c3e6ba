"""Break-even points: as formulas where algebra finds them, by search where formulas have steps."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import Attention, Blocks, Causal, First, Random, Window, cost
from regard.cost_model.cost import Cost
from regard.cost_model.cost_part import CostPart, PassCost
from regard.cost_model.depth import Log2Up
from regard.cost_model.quantity import Quantity
from regard.cost_model.solving import _find_sign_changes
from regard.cost_model.symbols import size_symbol, size_symbols
from regard.errors import CostError

N, D, C, P = size_symbols("N D C P")


def of(macs, **values) -> Cost:
    """A cost that is one formula."""
    return Cost(
        "made up",
        [CostPart("all", forward=PassCost(macs=sympy.sympify(macs)))],
        {size_symbol(k): v for k, v in values.items()},
    )


def test_linear_beats_softmax_from_one_token_more_than_channels():
    softmax, linear = (cost(Attention(feature_map=name), tokens=256, dim=64) for name in (None, "elu1"))
    (found,) = softmax.solve("tokens", linear)
    assert found == 65
    assert str(found.formula) == "d + 1"
    assert linear.solve("N", softmax)[0] == 65
    for tokens, cheaper in ((64, True), (66, False)):
        assert (softmax.at(tokens=tokens).macs.value < linear.at(tokens=tokens).macs.value) is cheaper


def test_a_symbol_without_a_number_stays_in_the_answer():
    (found,) = cost(Attention()).solve("tokens", cost(Attention(feature_map="elu1")))
    assert str(found.formula) == "d + 1"
    with pytest.raises(CostError, match="no number yet"):
        _ = found.value


def test_channels_are_cheaper_than_patches_where_there_are_fewer():
    patches, channels = of(2 * N**2 * C, N=256, C=512), of(2 * C**2 * N, N=256, C=512)
    (found,) = patches.solve("channels", channels)
    assert str(found.formula) == "N"
    assert found == 256
    assert patches.solve("tokens", channels)[0] == 512


def test_a_number_is_a_budget():
    price = cost(Attention(), tokens=256, dim=64, heads=8)
    (tokens,) = price.solve("tokens", 2 * 8 * 64 * 1000**2)
    assert tokens == 1000
    (between,) = price.solve("tokens", 2 * 8 * 64 * 1000**2 + 1)
    assert 1000 < between.value < 1001
    assert price.solve("tokens", 1e9)[0].value == pytest.approx((1e9 / 1024) ** 0.5)
    assert price.solve("tokens", cost(Attention(), tokens=17, dim=64, heads=8).macs.value) == [17]


def test_a_symbol_that_differs_on_both_sides_is_its_number_on_each():
    narrow, wide = cost(Attention(), tokens=256, dim=64), cost(Attention(feature_map="relu"), tokens=256, dim=32)
    (found,) = narrow.solve("tokens", wide)
    assert found.value == pytest.approx(32 * 33 / 64)


def test_several_roots_come_smallest_first():
    roots = of(N**2 + 12, N=1).solve("tokens", of(7 * N, N=1))
    assert [root.value for root in roots] == [3, 4]
    assert [root.value for root in of(N**3 + 11 * N, N=1).solve("N", of(6 * N**2 + 6, N=1))] == [1, 2, 3]
    assert of(N**2 + 12, N=1).solve("N", of(N, N=1)) == []


def test_roots_no_one_could_read_are_numbers():
    (found,) = of(N**3 + D * N**2, D=5).solve("N", 1000)
    assert not found.formula.free_symbols
    assert found.value**3 + 5 * found.value**2 == pytest.approx(1000)


@given(first=st.integers(1, 200), second=st.integers(1, 200), factor=st.integers(1, 9))
@settings(max_examples=15, deadline=None)
def test_every_root_of_a_quadratic_is_found(first, second, factor):
    product = sympy.expand(factor * (N - first) * (N - second))
    roots = of(product + 5 * N).solve("tokens", of(5 * N))
    assert [root.value for root in roots] == sorted({first, second})


# Search


def test_steps_of_depth_are_found_among_whole_numbers():
    price = cost(Attention(), tokens=256, dim=64, stable=False)
    # (1 + 6) + 1 + lg N + 1 + 1 + lg N = 30 from 513 tokens on
    assert price.solve("tokens", 30, of="depth") == [513]
    assert price.solve("tokens", 31, of="depth") == [1025]  # passed, and never met
    assert price.solve("tokens", 5, of="depth") == []


@given(target=st.integers(3, 10**6))
@settings(max_examples=6, deadline=None)
def test_the_first_number_after_a_step_is_exact(target):
    step = of(Log2Up(N) * 1000 + N)
    (found,) = step.solve("tokens", target)
    here = found.value
    assert step._with({N: here}).macs.value >= target
    assert here == 1 or step._with({N: here - 1}).macs.value < target


def test_whole_chunks_are_steps_too():
    chunks = of(64 * sympy.ceiling(N / 64))
    assert chunks.solve("N", 640) == [577]
    # N and the chunks it fills are equal at 64 first, and again at every whole chunk.
    assert chunks.solve("N", of(N))[0] == 64


def test_a_stretch_in_which_both_are_equal_counts_once():
    assert of(sympy.Max(N, 10)).solve("N", 10) == [1]
    assert of(sympy.Min(N, 10)).solve("N", 10) == [10]


def test_pairs_without_a_formula_are_counted_at_every_length():
    blocks = cost(Attention(pattern=Causal() & Blocks(16)), tokens=100, dim=8)
    assert P in blocks.macs.formula.free_symbols
    (found,) = blocks.solve("tokens", cost(Attention(pattern=Window(3, 0)), tokens=100, dim=8))
    assert found == 1  # the first four tokens see the same
    budget = 2 * 8 * (Causal() & Blocks(16)).pairs(300)
    assert blocks.solve("tokens", budget) == [300]


def test_roots_outside_the_range_of_a_formula_are_no_roots():
    # 257 N - 16512 = 100 N would meet where the window is wider than the text.
    window = cost(Attention(pattern=Window(128, 128)), tokens=4096, dim=1)
    assert window.solve("tokens", cost(Attention(pattern=First(25)), tokens=4096, dim=1), of="pairs") == []
    inside = window.solve("tokens", Quantity(200 * N), of="pairs")
    assert [root.value for root in inside] == [pytest.approx(16512 / 57)]


# Errors


def test_what_cannot_be_solved_is_said():
    softmax, linear = cost(Attention(), tokens=256, dim=64), cost(Attention(feature_map="elu1"), tokens=256, dim=64)
    with pytest.raises(CostError, match="does not depend on V"):
        softmax.solve("vocab_size", linear)
    with pytest.raises(CostError, match="same everywhere"):
        softmax.solve("tokens", softmax)
    with pytest.raises(CostError, match="nothing to compare"):
        softmax.solve("tokens", "linear")
    with pytest.raises(CostError, match="no quantity 'time'"):
        softmax.solve("tokens", linear, of="time")
    with pytest.raises(CostError, match="No formula has a symbol 'lenght'"):
        softmax.solve("lenght", linear)
    with pytest.raises(CostError, match="how large d is"):
        cost(Attention()).solve("tokens", 30, of="depth")
    counted = cost(Attention(pattern=Causal() & Random(2, 5)), tokens=64, dim=8).macs
    with pytest.raises(CostError, match="one number of tokens only"):
        softmax.solve("tokens", counted)


@pytest.mark.parametrize("alone", [1, 2, 7, 63, 64])
def test_a_search_sees_every_short_length(alone: int) -> None:
    """Both cost the same for one number only."""
    assert list(_find_sign_changes(lambda number: int(number != alone), 1 << 10)) == [alone]
