"""Numbers that have a formula, symbols, and how the parts of a cost add up."""

from __future__ import annotations

import json

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import Attention, Causal, Window, cost
from regard.cost_model import depth
from regard.cost_model.cost_part import CostPart, PassCost, group_parts
from regard.cost_model.quantity import Quantity
from regard.cost_model.symbols import (
    MEANINGS,
    find_common_values,
    fix_differing,
    legend,
    meaning,
    read_symbol,
    size_symbol,
    size_symbols,
)
from regard.errors import CostError

N, D, H = size_symbols("N D H")


def test_a_quantity_is_its_number():
    macs = Quantity(2 * N**2 * D, {N: 3, D: 5})
    assert macs == 90
    assert macs.value == 90
    assert isinstance(macs.value, int)
    assert int(macs) == 90
    assert float(macs) == 90.0
    assert f"{Quantity(N, {N: 1234567}):,}" == "1,234,567"
    assert macs < 91
    assert macs <= Quantity(90)
    assert macs > 89
    assert macs >= 90
    assert hash(macs) == hash(90)
    assert bool(macs) is True
    assert not Quantity(0)
    assert repr(macs) == "90 = 2*D*N**2"
    assert repr(Quantity(7)) == "7"


def test_a_number_that_is_not_whole_is_a_float():
    assert Quantity(N / D, {N: 3, D: 2}).value == 1.5
    assert isinstance(Quantity(N / D, {N: 4, D: 2}).value, int)


def test_a_formula_without_numbers_says_which_are_missing():
    with pytest.raises(CostError, match="how large D, N is"):
        _ = Quantity(N * D).value
    assert Quantity(N * D).formula == N * D
    assert Quantity(N * D).at({N: 2, D: 3}) == 6


@given(a=st.integers(1, 99), b=st.integers(1, 99))
@settings(max_examples=25, deadline=None)
def test_quantities_calculate_as_their_numbers_do(a, b):
    one, other = Quantity(N**2, {N: a}), Quantity(3 * N + D, {N: a, D: b})
    assert one + other == a**2 + 3 * a + b
    assert one - other == a**2 - 3 * a - b
    assert one * other == a**2 * (3 * a + b)
    assert (one / other).value == pytest.approx(a**2 / (3 * a + b))
    assert 2 * one + 1 == 2 * a**2 + 1
    assert 1 - one == 1 - a**2
    assert (1 / one).value == pytest.approx(1 / a**2)
    assert sum([one, other], Quantity(0)) == a**2 + 3 * a + b


def test_symbols_that_mean_other_numbers_become_numbers():
    short, long = Quantity(N * D, {N: 3, D: 7}), Quantity(N * D, {N: 4, D: 7})
    together = short + long
    assert together == 49
    assert together.formula == 7 * D
    assert find_common_values({N: 3, D: 7}, {N: 4, D: 7}) == {D: 7}
    assert fix_differing(N * D, {N: 3, D: 7}, {D: 7}) == 3 * D


def test_a_symbol_has_one_meaning():
    assert len({keyword for keyword, _ in MEANINGS.values()}) == len(MEANINGS)
    assert read_symbol("tokens") == read_symbol("N") == read_symbol(N) == N
    assert read_symbol("D_2") == size_symbol("D", 2)
    assert meaning(size_symbol("D", 2)).endswith("stage 2")
    assert N.is_positive
    assert N.is_integer
    # Beside no key length M, the query length is the sequence length.
    assert legend([N * D], {N: 3}) == [("N", "sequence length", 3), ("D", MEANINGS["D"][1], None)]
    with pytest.raises(CostError, match="No formula has a symbol 'zebra'"):
        read_symbol("zebra")
    with pytest.raises(KeyError):
        size_symbol("zebra")


# Depth


@pytest.mark.parametrize(("n", "levels"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (1024, 10), (1025, 11)])
def test_a_tree_of_sums(n, levels):
    assert depth.total(n) == levels
    assert depth.inner(n) == 1 + levels
    assert depth.total(n, serial=True) == n - 1
    assert depth.softmax(n, stable=False) == 2 + levels
    assert depth.softmax(n) == 3 + 2 * levels


def test_a_logarithm_stays_until_there_is_a_number():
    rounded = depth.Log2Up(N)
    assert str(rounded) == "ceil(lg(N))"
    assert rounded.subs(N, 65) == 7
    assert depth.Log2Up(N * D).subs({N: 5, D: 13}) == 7
    assert sympy.latex(rounded) == r"\lceil \lg N \rceil"


# Parts and costs


def test_parts_of_one_name_are_added():
    parts = [
        CostPart("a.x", parameters=N, forward=PassCost(macs=N)),
        CostPart("a.y", forward=PassCost(macs=D)),
        CostPart("a.x", saved=H),
    ]
    fine, coarse = group_parts(parts), group_parts(parts, 1)
    assert list(fine) == ["a.x", "a.y"]
    assert (fine["a.x"].parameters, fine["a.x"].saved) == (N, H)
    assert coarse["a"].forward.macs == N + D
    assert (parts[0] * 3).forward.macs == 3 * N
    assert parts[0].with_prefix("block").name == "block.a.x"


def test_parts_add_up_to_the_whole():
    price = cost(Attention(pattern=Causal()), tokens=100, dim=8, heads=3, step="training")
    for name in ("parameters", "macs", "flops", "bytes", "activation_bytes", "depth", "pairs", "exponentials"):
        assert sum(part.quantity(name).value for part in price.by_part().values()) == price.quantity(name)


def test_costs_are_subtracted_part_by_part():
    full, window = (cost(Attention(pattern=p), tokens=100, dim=8) for p in (None, Window(3, 0)))
    saved = full - window
    assert saved.macs == full.macs.value - window.macs.value
    assert list(saved.by_part()) == ["scores", "softmax", "values"]
    assert (full + window).pairs == 10_000 + 394
    ratio = full.ratio(window)
    assert ratio["macs"].value == pytest.approx(10_000 / 394)
    assert "parameters" not in ratio  # neither has any


def test_the_same_question_at_another_size():
    price = cost(Attention(pattern=Window(3, 0)), tokens=100, dim=8)
    assert price.at(tokens=2).pairs == 3  # where the window is wider than the text
    assert price.at(tokens=1000).pairs == 3994


def test_a_cost_is_plain_python_too():
    price = cost(Attention(pattern=Causal()), tokens=100, dim=8)
    plain = json.loads(price.to_json())
    assert plain["quantities"]["macs"] == {"formula": "B*H*N*d*(N + 1)", "value": 80_800}
    assert plain["letters"]["N"]["value"] == 100
    assert set(plain["parts"]) == {"scores", "softmax", "values"}


def test_a_formula_without_a_number_can_be_printed() -> None:
    price = cost(Attention(), dim=64)
    assert repr(price.macs) == "2*B*H*N**2*d"
    assert not price.macs.known
    assert "macs 2*B*H*N**2*d" in repr(price)
    assert cost(Attention(), dim=64, tokens=3).macs.known
