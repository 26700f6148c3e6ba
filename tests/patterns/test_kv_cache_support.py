"""Cache-related properties of patterns against their matrices; conservative results are allowed, wrong ones are not."""

import pytest
import torch
from catalog import GRID, LEAVES, PATTERNS, TOKENS, as_of, fits

from regard import (
    Axial,
    Blocks,
    Causal,
    First,
    Full,
    GridStride,
    GridWindow,
    Neighborhood,
    Padding,
    Random,
    Selected,
    Strided,
    Where,
    Window,
)
from regard.patterns import Not

WITH_PAST = [Causal() & leaf for leaf in LEAVES] + [leaf & Window(4, 0, step=3) for leaf in LEAVES]
MIXED = [
    ~Full(),
    ~(~Causal()),
    ~(~Causal() | Strided(2)),
    ~(~Causal() & ~Window(2, 0)),
    ~(Full() & Not(Causal() & Blocks(4))),
    Window(2, 0) | Window(3, 0, step=4),
    Window(2, 0) | Window(3, 1),
    (Causal() & First(3)) | (Window(5, 0) & Blocks(4)),
    (Causal() & Blocks(4)) | (Window(9, 2) & Neighborhood(GRID, 1)),
    Causal() | Padding([TOKENS, 9]),
    Causal() & ~Padding([4, 31], side="left"),
    Blocks(8) & ~Blocks(3),
    Blocks(1),
    ~Blocks(5),
    GridWindow(GRID, 9),
    GridStride(GRID, 1),
    GridStride(GRID, (4, 5)),
    Axial((1, 35)),
    Axial((35, 1)),
    Neighborhood(GRID, 20),
    Neighborhood(GRID, 20, step=3),
    Neighborhood(GRID, (2, 3), edges="shift"),
    Strided(3) | Window(1, 0),
    ~(Strided(3) & Window(9, 2)),
]
PREFIXES = [1, 2, 5, 13, 20, 34, TOKENS]
EVERYTHING = PATTERNS + WITH_PAST + [~pattern for pattern in PATTERNS] + MIXED


def matrices(pattern):
    """The mask of every prefix, as `(row, query, key)`."""
    return {n: as_of(pattern, n).matrix(n).reshape(-1, n, n) for n in PREFIXES}


def keeps_its_past(pattern):
    """The truth: no mask has a pair in the future, and each is the corner of the next."""
    masks = matrices(pattern)
    whole = masks[TOKENS]
    return all(bool((mask == whole[:, :n, :n]).all()) and not bool(mask.triu(1).any()) for n, mask in masks.items())


def farthest(pattern, tokens=TOKENS):
    """The largest `i - j` among allowed pairs; -1 when nothing at or before the query is seen."""
    mask = pattern.matrix(tokens).reshape(-1, tokens, tokens).any(0)
    i, j = mask.nonzero(as_tuple=True)
    return int((i - j).clamp(min=-1).max()) if len(i) else -1


def is_toeplitz(mask):
    return torch.equal(mask[..., 1:, 1:], mask[..., :-1, :-1])


@pytest.mark.parametrize("pattern", EVERYTHING, ids=repr)
def test_what_has_a_past_is_lower_triangular_and_the_corner_of_what_comes_later(pattern):
    assert not pattern.supports_kv_cache or keeps_its_past(pattern)


@pytest.mark.parametrize("pattern", EVERYTHING, ids=repr)
def test_no_query_sees_farther_back_than_the_reach(pattern):
    limit = pattern.reach
    assert limit is None or farthest(pattern) <= limit


@pytest.mark.parametrize("pattern", EVERYTHING, ids=repr)
def test_what_is_shiftable_is_constant_along_its_diagonals(pattern):
    assert not pattern.is_shift_invariant() or is_toeplitz(pattern.matrix(TOKENS))


def test_a_past_is_found_wherever_there_is_one_but_for_a_few_accidents():
    found = [pattern for pattern in EVERYTHING if pattern.supports_kv_cache]
    missed = [pattern for pattern in EVERYTHING if keeps_its_past(pattern) and not pattern.supports_kv_cache]
    assert [pattern for pattern in PATTERNS if pattern.supports_kv_cache] == [
        Causal(),
        Window(0, 0),
        Causal() & Window(4, 0),
        Causal() & (Window(2, 0) | Strided(5)),
        Causal() & Padding([TOKENS, 20]),
        Causal() & Axial(GRID),
        ~(Full() | Causal()),
    ]
    assert missed == [Blocks(1)]  # an accident of its size
    lost = [leaf for leaf in LEAVES if not (Causal() & leaf).supports_kv_cache]
    assert lost == [Random(2, 5), Random(2, 1, block=4)]
    assert len(found) > 50


def test_a_random_draw_has_a_past_only_when_its_tokens_are_fixed():
    assert (Causal() & Random(1, 2, block=3, tokens=60)).supports_kv_cache
    for free in (Random(2, 5), Random(2, 1, block=4)):
        assert not (Causal() & free).supports_kv_cache
        assert not keeps_its_past(Causal() & free)


def test_an_or_needs_both_operands_and_a_not_its_operand():
    assert (Window(2, 0) | Window(3, 0, step=4)).supports_kv_cache
    assert not (Window(2, 0) | Window(3, 1)).supports_kv_cache
    assert not (~Causal()).supports_kv_cache
    assert (~(~Causal() | Strided(2))).supports_kv_cache
    assert not (~(~Causal() & Strided(2))).supports_kv_cache


def _near(i, j):
    return (i - j).abs() < 3


EXACT = [
    (Window(3, 2), 3),
    (Window(3, 1, step=4), 12),
    (Blocks(6), 5),
    (Causal() & Blocks(6), 5),
    (Blocks(6) & Window(3, 3), 3),
    (Window(2, 0) | Window(3, 0, step=4), 12),
    (Window(9, 9) & ~Window(2, 2), 9),
    (Neighborhood(GRID, 1), 8),
    (Neighborhood(GRID, (1, 2), edges="shift"), 2 * 7 + 4),
    (Neighborhood(GRID, (0, 1), step=2), 2),
    (Neighborhood(GRID, (0, 1), step=2, edges="shift"), 4),
    (Neighborhood(GRID, 20), 34),
    (Neighborhood(GRID, 20, step=3), 3 * 7 + 6),
    (Neighborhood((4, 8), 1, start=3), 9),
    (GridWindow(GRID, (2, 3), shift=1), 7 + 2),
    (GridStride(GRID, (2, 3)), 4 * 7 + 6),
    (GridStride(GRID, (4, 5)), 4 * 7 + 5),
    (Axial(GRID), 28),
    (Axial((1, 35)), 34),
    (Axial((35, 1)), 34),
]


@pytest.mark.parametrize(("pattern", "far"), EXACT, ids=lambda case: repr(case))
def test_the_reach_is_the_largest_distance_there_is(pattern, far):
    assert fits(pattern, (TOKENS, TOKENS))
    assert pattern.reach == far == farthest(pattern)


@pytest.mark.parametrize(
    "pattern",
    [Full(), Causal(), Strided(3), First(2), Selected([4]), ~Window(2, 2), Causal() | Blocks(6), Where(_near)],
    ids=repr,
)
def test_without_a_limit_there_is_no_reach(pattern):
    assert pattern.reach is None


def test_only_distances_count_for_these_of_the_catalog():
    assert [pattern for pattern in PATTERNS if pattern.is_shift_invariant()] == [
        Full(),
        Causal(),
        Window(3, 2),
        Window(0, 0),
        Window(50, 3),
        Window(3, 1, step=4),
        Strided(3),
        Causal() & Window(4, 0),
        Causal() & (Window(2, 0) | Strided(5)),
        ~Causal(),
        Window(9, 9) & ~Window(2, 2),
        ~(Full() | Causal()),
    ]
