"""Pairs of a pattern: every form against the mask itself, wherever its conditions hold."""

from __future__ import annotations

import pytest
import sympy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regard import (
    Attention,
    Axial,
    Blocks,
    Causal,
    First,
    Full,
    GridStride,
    GridWindow,
    Neighborhood,
    Padding,
    PatternError,
    Random,
    Segments,
    Selected,
    Strided,
    Window,
    cost,
)
from regard.cost_model.attention.pairs import count_pairs, find_longest_row
from regard.cost_model.symbols import size_symbols

B, N, M, P, R, W = size_symbols("B N M P R W")
ONE = sympy.Integer(1)

small = st.integers(0, 9)
steps = st.integers(1, 5)
line = st.one_of(
    st.just(Full()),
    st.just(Causal()),
    st.builds(Window, small, small, steps),
    st.builds(Strided, steps),
    st.builds(First, small),
    st.builds(Selected, st.lists(st.integers(0, 30), max_size=4)),
    st.builds(Blocks, steps),
)
patterns = st.recursive(
    line,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=3,
)
grids = st.tuples(st.integers(1, 7), st.integers(1, 9))


@st.composite
def on_grids(draw):
    grid, start = draw(grids), draw(st.integers(0, 2))
    kind = draw(st.sampled_from(["near", "shifted", "window", "stride", "axial"]))
    pair = st.tuples(st.integers(1, 4), st.integers(1, 4))
    try:
        if kind in ("near", "shifted"):
            radius = draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
            edges = "clip" if kind == "near" else "shift"
            made = Neighborhood(grid, radius, step=draw(st.integers(1, 3)), edges=edges, start=start)
        elif kind == "window":
            made = GridWindow(grid, draw(pair), shift=draw(st.tuples(small, small)), start=start)
        elif kind == "stride":
            made = GridStride(grid, draw(pair), start=start)
        else:
            made = Axial(grid, start=start)
    except PatternError:
        assume(False)
    return made | First(start) if draw(st.booleans()) else made


def brute(pattern, queries, keys) -> int:
    return int(pattern.matrix(queries, keys).sum())


def number(pairs, values) -> int:
    return pairs.formula.subs({**values, **pairs.values, B: 1})


@given(pattern=patterns, queries=st.integers(1, 40), more=st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_pairs_are_those_of_the_mask(pattern, queries, more):
    keys = queries + more
    values = {N: queries, M: keys}
    counted = count_pairs(pattern, B, N, M if more else N, (queries, keys), values)
    assert number(counted, values) == brute(pattern, queries, keys)


@given(pattern=patterns, past=st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_a_decoding_step_sees_the_last_row(pattern, past):
    counted = count_pairs(pattern, B, ONE, N + 1, (1, past + 1), {N: past})
    assert number(counted, {N: past}) == brute(pattern, 1, past + 1)


@given(pattern=line, queries=st.integers(1, 40), keys=st.integers(1, 60))
@settings(max_examples=80, deadline=None)
def test_every_form_holds_where_its_conditions_do(pattern, queries, keys):
    values = {N: queries, M: keys}
    for form in pattern._pair_count_formulas(N, M, (queries, keys)):
        if all(sympy.sympify(condition).subs(values) == sympy.true for condition in form.when):
            assert form.formula.subs(values) == brute(pattern, queries, keys)


@given(pattern=on_grids())
@settings(max_examples=40, deadline=None)
def test_pairs_on_a_grid_are_those_of_the_mask(pattern):
    tokens = pattern.fixed_length
    counted = count_pairs(pattern, B, N, N, (tokens, tokens), {N: tokens})
    assert number(counted, {N: tokens}) == brute(pattern, tokens, tokens)


@given(pattern=st.one_of(line, on_grids()), tokens=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_no_query_sees_more_than_the_longest_row(pattern, tokens):
    tokens = pattern.fixed_length or tokens
    most = int(pattern.matrix(tokens).sum(-1).max())
    assert most <= find_longest_row(pattern, N, {N: tokens}).subs({N: tokens}) <= tokens


@pytest.mark.parametrize(
    ("pattern", "formula"),
    [
        (Full(), N**2),
        (Causal(), N * (N + 1) / 2),
        (Window(1, 1), 3 * N - 2),
        (Window(2, 0), 3 * N - 3),
        (Window(2, 0, step=2), 3 * N - 6),
        (Causal() & Window(2, 7), 3 * N - 3),
        (Strided(4), N**2 / 4),
        (Blocks(4), 4 * N),
        (First(2), 4 * N - 4),
        (First(2) | Window(1, 1), 7 * N - 12),
        (~Causal(), N**2 - N * (N + 1) / 2),
    ],
    ids=repr,
)
def test_forms_need_no_number_of_tokens(pattern, formula):
    open_, known = (count_pairs(pattern, ONE, N, N, lengths, {N: 256}) for lengths in (None, (256, 256)))
    assert sympy.expand(open_.formula - formula) == 0
    assert sympy.expand(known.formula - formula) == 0


@pytest.mark.parametrize(
    ("pattern", "formula"),
    [
        (Neighborhood((16, 12), 1), (3 * R - 2) * (3 * W - 2)),
        (Neighborhood((16, 12), 3, edges="shift"), 49 * R * W),
        (GridWindow((16, 12), 4), 16 * R * W),
        (GridStride((16, 12), 4), R**2 * W**2 / 16),
        (Axial((16, 12)), R * W * (R + W - 1)),
    ],
    ids=repr,
)
def test_forms_on_grids_are_products_of_their_sides(pattern, formula):
    counted = count_pairs(pattern, ONE, N, N, (192, 192), {N: 192})
    assert sympy.expand(counted.formula - formula) == 0
    assert counted.values == {R: 16, W: 12}


def test_what_a_form_needs_is_said():
    assert count_pairs(Window(128, 128), ONE, N, N, None, {}).notes == ("pairs: 257*N - 16512 holds for N >= 128",)
    assert "N mod 4 = 2" in count_pairs(Blocks(4), ONE, N, N, (10, 10), {N: 10}).notes[0]
    # Windows as wide as the text are the text.
    assert count_pairs(Window(128, 128), ONE, N, N, (100, 100), {N: 100}).formula == N**2


def test_patterns_without_a_closed_form_have_a_symbol():
    pattern = Causal() & Random(2, 5)
    counted = count_pairs(pattern, B, N, N, (64, 64), {N: 64})
    assert counted.formula == B * P
    assert counted.values == {P: brute(pattern, 64, 64)}
    assert count_pairs(pattern, B, N, N, None, {}).values == {}


def test_rows_are_added_up():
    padding = Padding([3, 5, 7])
    assert count_pairs(padding, B, N, N, (11, 11), {N: 11}).formula == 15 * N
    both = padding & Causal()
    assert count_pairs(both, B, N, N, (11, 11), {N: 11}).formula == brute(both, 11, 11)
    segments = Segments([[0, 0, 1], [2, 2, 2]])
    assert count_pairs(segments, B, N, N, (3, 3), {N: 3}).formula == 4 + 1 + 9
    assert count_pairs(segments, B, N, N, None, {}).formula == B * P


def test_simple_patterns_stay_and_obvious_ones_become_simple():
    assert (Causal() & Window(3, 5, step=2))._simplify() == Window(3, 0, step=2)
    assert (Window(3, 5) & Window(4, 2))._simplify() == Window(3, 2)
    assert (Full() & (Full() & Causal()))._simplify() == Causal()
    assert (Causal() & Blocks(3))._simplify() == Causal() & Blocks(3)


@pytest.mark.parametrize(
    ("pattern", "sizes", "sums"),
    [
        (Window(2, 0), {"tokens": 1, "keys": 1}, 1),  # one pair, and not a running sum that is taken apart
        (Window(2, 0), {"tokens": 11, "keys": 11}, 30),
        (Window(9, 0), {"tokens": 40, "keys": 40}, 3 * 40),
        (Blocks(2), {"tokens": 1, "keys": 10}, 2),
        (Full(), {"tokens": 7, "keys": 10}, 10),
    ],
)
def test_a_mean_takes_running_sums_where_they_are_fewer_than_pairs(pattern, sizes, sums) -> None:
    assert cost(Attention(pattern=pattern, scale=0.0), dim=3, value_dim=5, **sizes).macs == 5 * sums
