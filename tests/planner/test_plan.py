"""A plan names every allowed pair once, without evaluating the square."""

import time

import numpy as np
import pytest
import torch
from catalog import LENGTHS, PATTERNS, TOKENS, fits
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import Causal, First, Full, Neighborhood, Random, Strided, Where, Window, attend, plan
from regard.patterns import Pattern
from regard.patterns.box import ALL, NONE, SOME


def assert_plan_is_the_pattern(pattern, queries, keys, **words):
    expected = pattern.matrix(queries, keys).long()
    planned = plan(pattern, queries, keys, **words)
    rebuilt = planned.matrix()
    assert torch.equal(rebuilt, expected if expected.ndim == 3 else expected[None]), (pattern, queries, keys, words)
    assert planned.pairs == int(expected.sum())
    assert planned.area >= planned.pairs


@pytest.mark.parametrize("sort", [True, False])
@pytest.mark.parametrize("block", [4, 16, 128])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_plan_rebuilds_its_pattern(pattern, block, sort):
    for lengths in [*LENGTHS, (0, TOKENS), (3, 0)]:
        if fits(pattern, lengths):
            assert_plan_is_the_pattern(pattern, *lengths, block=block, sort=sort)


def expressions() -> st.SearchStrategy[Pattern]:
    return st.recursive(
        st.sampled_from(PATTERNS),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
            st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
            inner.map(lambda pattern: ~pattern),
        ),
        max_leaves=5,
    )


@settings(max_examples=150)
@given(expressions(), st.sampled_from(LENGTHS), st.sampled_from([3, 8, 64]))
def test_any_expression_of_patterns_is_planned_right(pattern, lengths, block):
    if fits(pattern, lengths):
        assert_plan_is_the_pattern(pattern, *lengths, block=block)


@settings(max_examples=60)
@given(expressions(), st.sampled_from(LENGTHS), st.sampled_from([None, 0.0, 1.7, float("inf")]), st.booleans())
def test_any_expression_of_patterns_runs_as_the_reference_does(pattern, lengths, scale, grouped):
    from catalog import assert_agree, bounds, results, tensors

    if not fits(pattern, lengths):
        return
    inputs = tensors(lengths, kv_heads=1 if grouped else 3)
    found = results(attend, *inputs, pattern=pattern, scale=scale, backend="blocked")
    expected = results(attend, *inputs, pattern=pattern, scale=scale, backend="reference")
    assert_agree(found, expected, bounds(*inputs, scale, torch.float64))


def test_the_check_of_a_plan_can_fail():
    class Wrong(Window):
        """Claims that windows are whole, which their edges are not."""

        def _box_coverage(self, query, key, row, lengths):
            honest = super()._box_coverage(query, key, row, lengths)
            return np.where(honest == SOME, ALL, honest).astype(np.int8)

    with pytest.raises(AssertionError):
        assert_plan_is_the_pattern(Wrong(3, 2), TOKENS, TOKENS)

    class Blind(Window):
        """Omits the keys after a query."""

        def _box_coverage(self, query, key, row, lengths):
            honest = super()._box_coverage(query, key, row, lengths)
            return np.where(key.first > query.last, NONE, honest).astype(np.int8)

    with pytest.raises(AssertionError):
        assert_plan_is_the_pattern(Blind(3, 2), TOKENS, TOKENS, block=4)


def test_a_million_tokens_are_planned_without_touching_the_square():
    planned = plan(Window(128, 128), 1_000_000)
    runs = sum(part.runs for part in planned.parts)
    assert planned.pairs == 1_000_000 * 257 - 128 * 129
    assert runs <= 3 * planned.tiles
    assert planned.area < 1_000_000 * 400


class Counting(Window):
    """A window that counts the boxes it is evaluated for."""

    evaluated = 0

    def _box_coverage(self, query, key, row, lengths):
        Counting.evaluated += query.first.size
        return super()._box_coverage(query, key, row, lengths)


def test_twice_the_tokens_are_twice_the_work():
    counts = []
    for tokens in (1 << 14, 1 << 15, 1 << 16):
        Counting.evaluated = 0
        plan(Counting(128, 128), tokens)
        counts.append(Counting.evaluated)
    # One more level of halving for each doubling: work grows a little faster than the tokens, far from their square.
    assert 1.9 < counts[1] / counts[0] < 2.3
    assert 1.9 < counts[2] / counts[1] < 2.3


def test_dilated_and_strided_patterns_become_dense_by_sorting():
    for pattern in (Window(32, 32, step=4), Causal() & Strided(64)):
        sorted_plan, natural = plan(pattern, 4096, block=64), plan(pattern, 4096, block=64, sort=False)
        assert sorted_plan.pairs == natural.pairs
        assert sorted_plan.area < 2.5 * sorted_plan.pairs
        assert natural.area > 2 * sorted_plan.area


def test_a_union_of_a_window_and_a_stride_is_two_parts_without_overlap():
    pattern = Causal() & (Window(31, 0) | Strided(32))
    planned = plan(pattern, 1024, block=32)
    assert len(planned.parts) == 2
    assert int(planned.matrix().max()) == 1
    assert planned.area < 4 * planned.pairs


def test_many_unions_under_one_and_stay_few_parts():
    pattern = Full()
    for step in range(2, 14):
        pattern = pattern & (Window(3, 3) | Strided(step))
    planned = plan(pattern, 120)
    assert len(planned.parts) <= 16
    assert torch.equal(planned.matrix()[0], pattern.matrix(120).long())


def test_neighbourhoods_share_keys_in_square_tiles():
    planned = plan(Neighborhood((56, 56), 3), 3136)
    assert planned.pairs == 144_400
    assert planned.pairs / planned.area > 0.28


def test_a_predicate_is_evaluated_in_tiles_and_empty_ones_are_dropped():
    planned = plan(Where(_near), 512, block=64)
    assert planned.pairs == Window(3, 3).pairs(512)
    assert planned.area < 512 * 512 // 4


def _near(i, j):
    return (i - j).abs() <= 3


def test_a_plan_describes_itself():
    text = str(plan(Window(128, 128) | First(2) | Random(1, 0, block=64), 1024))
    assert "1,024 queries x 1,024 keys" in text
    assert "useful" in text
    assert "nothing to do" in str(plan(Full(), 0, 5))


@pytest.mark.slow
def test_planning_a_million_tokens_takes_seconds_not_minutes():
    begin = time.perf_counter()
    plan(Window(127, 128), 1_000_000)
    assert time.perf_counter() - begin < 30
