"""Every pattern: definition, pair count, repr and equality."""

import math

import numpy as np
import pytest
import torch
from catalog import EXPRESSIONS, GRID, LEAVES, LENGTHS, PATTERNS, TOKENS, fits

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
    PatternError,
    Random,
    Segments,
    Selected,
    Strided,
    Where,
    Window,
    layers_to_connect,
    plan,
    read_pattern,
)
from regard.patterns import EVERY


def rc(position, grid, start=0):
    return divmod(position - start, grid[1])


# The table of definitions, written out for single pairs in plain Python.
DEFINITIONS = [
    (Full(), lambda i, j: True),
    (Causal(), lambda i, j: j <= i),
    (Window(3, 2), lambda i, j: i - 3 <= j <= i + 2),
    (Window(2, 1, step=3), lambda i, j: j in {i, i - 3, i - 6, i + 3}),
    (Strided(4), lambda i, j: (i - j) % 4 == 0),
    (First(3), lambda i, j: i < 3 or j < 3),
    (Selected([2, 9]), lambda i, j: i in (2, 9) or j in (2, 9)),
    (Blocks(4), lambda i, j: i // 4 == j // 4),
    (Neighborhood(GRID, 1), lambda i, j: abs(i // 7 - j // 7) <= 1 and abs(i % 7 - j % 7) <= 1),
    (GridWindow(GRID, (2, 3)), lambda i, j: i // 7 // 2 == j // 7 // 2 and i % 7 // 3 == j % 7 // 3),
    (
        GridWindow(GRID, 4, shift=2),
        lambda i, j: (i // 7 - 2) // 4 == (j // 7 - 2) // 4 and (i % 7 - 2) // 4 == (j % 7 - 2) // 4,
    ),
    (GridStride(GRID, 2), lambda i, j: (i // 7 - j // 7) % 2 == 0 and (i % 7 - j % 7) % 2 == 0),
    (Axial(GRID), lambda i, j: i // 7 == j // 7 or i % 7 == j % 7),
]


@pytest.mark.parametrize(("pattern", "rule"), DEFINITIONS, ids=lambda case: str(case) if not callable(case) else "")
def test_a_pattern_is_its_definition(pattern, rule):
    expected = torch.tensor([[bool(rule(i, j)) for j in range(TOKENS)] for i in range(TOKENS)])
    assert torch.equal(pattern.matrix(TOKENS), expected)
    # Fewer queries are the last ones.
    assert torch.equal(pattern.matrix(6, TOKENS), expected[-6:])
    assert pattern.allows(20, 13).item() == expected[20, 13].item()


@pytest.mark.parametrize("radius", [1, 2])
@pytest.mark.parametrize("step", [1, 2])
def test_a_shifted_neighbourhood_keeps_the_nearest_keys_of_its_own_residue(radius, step):
    rows, columns = 11, 13
    mask = Neighborhood((rows, columns), radius, step=step, edges="shift").matrix(rows * columns)
    assert (mask.sum(1) == (2 * radius + 1) ** 2).all()
    for size, axis in ((rows, 0), (columns, 1)):
        for at in range(size):
            # The keys along one axis: those of the same residue that lie nearest, ties towards the inside.
            mine = [key for key in range(size) if key % step == at % step]
            first = min(max(mine.index(at) - radius, 0), len(mine) - 2 * radius - 1)
            expected = mine[first : first + 2 * radius + 1]
            query = at * columns + columns // 2 if axis == 0 else (rows // 2) * columns + at
            visible = mask[query].reshape(rows, columns)
            found = visible.any(1 - axis).nonzero().flatten().tolist()
            assert found == expected


def test_a_dilated_neighbourhood_steps_over_rows_and_columns():
    grid = (7, 9)
    mask = Neighborhood(grid, (1, 2), step=2).matrix(63)
    for i in range(63):
        for j in range(63):
            (a, b), (c, d) = rc(i, grid), rc(j, grid)
            near = abs(a - c) in (0, 2) and abs(b - d) in (0, 2, 4)
            assert mask[i, j].item() == near


def test_padding_hides_keys_on_its_side_for_each_row():
    right, left = Padding([2, 5]).matrix(3, 5), Padding([2, 5], side="left").matrix(3, 5)
    assert right[0].tolist() == [[True, True, False, False, False]] * 3
    assert left[0].tolist() == [[False, False, False, True, True]] * 3
    assert right[1].all()
    assert left[1].all()


def test_segments_do_not_attend_to_each_other_and_negative_ids_to_nothing():
    mask = Segments([[0, 0, 1, -1]]).matrix(4)[0]
    assert mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]


def test_random_draws_count_distinct_blocks_for_each_block_and_never_changes():
    pattern = Random(3, 7, block=4)
    mask = pattern.matrix(40)
    blocks = mask.reshape(10, 4, 10, 4)
    assert (blocks.any(3).any(1).sum(1) == 3).all()
    assert (blocks.all(3).all(1).sum(1) == 3).all()
    # Pinned once: the draw is part of what a saved model means.
    assert Random(2, 0).draw_key_blocks(np.arange(4), 10).tolist() == DRAWN
    assert not torch.equal(mask, Random(3, 8, block=4).matrix(40))


DRAWN = [[6, 9], [4, 7], [8, 9], [3, 9]]


def test_random_blocks_are_drawn_evenly():
    # Each of 50 blocks is drawn by each of 4000 queries with probability 5/50: mean 400, deviation sqrt(4000 .1 .9) =
    # 19.
    counts = Random(5, 1, tokens=50).matrix(4000, 50).sum(0)
    assert counts.sum() == 20000
    assert (counts - 400).abs().max() < 5 * math.sqrt(4000 * 0.1 * 0.9)


def test_random_with_a_fixed_universe_does_not_change_as_keys_arrive():
    pattern = Random(3, 2, block=2, tokens=64)
    assert torch.equal(pattern.matrix(20), pattern.matrix(31)[:20, :20])
    growing = Random(3, 2, block=2)
    assert not torch.equal(growing.matrix(20), growing.matrix(31)[:20, :20])


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_number_of_pairs_is_exact(pattern):
    for lengths in [*LENGTHS, (0, TOKENS), (3, 0), (TOKENS, 20)]:
        if fits(pattern, lengths):
            assert pattern.pairs(*lengths) == int(pattern.matrix(*lengths).sum()), lengths


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_allows_equals_the_matrix(pattern):
    i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    assert torch.equal(pattern.allows(i, j, keys=TOKENS), pattern.matrix(TOKENS))


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if "Where" not in repr(p) and "Mask" not in repr(p)], ids=str)
def test_a_pattern_prints_as_the_expression_that_builds_it(pattern):
    names = {kind.__name__: kind for kind in EVERY}
    assert eval(repr(pattern), {"__builtins__": {}}, names) == pattern
    assert read_pattern(repr(pattern)) == pattern
    assert hash(read_pattern(repr(pattern))) == hash(pattern)


def test_patterns_that_differ_are_not_equal():
    assert len(set(map(repr, PATTERNS))) == len(PATTERNS)
    assert len(set(PATTERNS)) == len(PATTERNS)
    assert Window(1, 2) != Window(2, 1)


def test_a_predicate_may_return_one_value_for_all():
    assert Where(lambda i, j: True).pairs(5) == 25
    assert Where(lambda i, j: j < 2).pairs(5) == 10


def test_composition_is_logic():
    a, b = Window(3, 1), Strided(2)
    left, right = a.matrix(11), b.matrix(11)
    assert torch.equal((a & b).matrix(11), left & right)
    assert torch.equal((a | b).matrix(11), left | right)
    assert torch.equal((~a).matrix(11), ~left)
    assert ~~a == a


@pytest.mark.parametrize("kind", EVERY)
def test_every_kind_of_pattern_is_in_the_catalog_that_all_tests_run_over(kind):
    assert any(isinstance(pattern, kind) for pattern in LEAVES)


def test_every_operator_is_in_the_catalog_too():
    text = " ".join(map(repr, EXPRESSIONS))
    assert {"&", "|", "~"} <= set(text)


# Counts of Prince, figure 12.15, and of sixteen by sixteen patches


@pytest.mark.parametrize(
    ("pattern", "counts"),
    [
        (Full(), (144, 256, 4096, 65536, 1048576)),
        (Causal(), (78, 136, 2080, 32896, 524800)),
        (Window(1, 1), (34, 46, 190, 766, 3070)),
        (Window(2, 0), (33, 45, 189, 765, 3069)),
        (Window(2, 0, step=2), (30, 42, 186, 762, 3066)),
        (Window(2, 0, step=3), (27, 39, 183, 759, 3063)),
        (First(2) | Window(1, 1), (72, 100, 436, 1780, 7156)),
    ],
    ids=str,
)
def test_the_panels_of_figure_12_15_have_their_closed_forms(pattern, counts):
    assert tuple(pattern.pairs(tokens) for tokens in (12, 16, 64, 256, 1024)) == counts


def test_a_window_wider_than_everything_is_counted_at_once():
    assert Window(10**12, 0).pairs(1000) == Causal().pairs(1000)
    assert Window(10**12, 10**12, step=3).pairs(50, 20) == Strided(3).pairs(50, 20)


# Each pattern at the largest number that it takes, the pattern that it then is, and the same one beyond that.
EXTREMES = [
    (lambda more: Window(0, 2**62 + more), ~Causal() | Window(0, 0)),
    (lambda more: Window(2**62 + more, 0), Causal()),
    (lambda more: Window(1, 1, step=2**62 + more), Window(0, 0)),
    (lambda more: Window(2**31, 3, step=2**31 + more), Window(0, 0)),
    (lambda more: Strided(2**62 + more), Window(0, 0)),
    (lambda more: First(2**62 + more), Full()),
    (lambda more: Blocks(2**62 + more), Full()),
    (lambda more: Random(2**62 + more, seed=1), Full()),
    (lambda more: Random(2, seed=1, block=2**62 + more), Full()),
    (lambda more: Selected([3, 2**31 + more]) & Full() if more else Selected([3]), Selected([3])),
    (lambda more: Neighborhood((2, 7), 2**31 + more), Full()),
    (lambda more: Neighborhood((2, 7), 1, step=2**31 + more), Window(0, 0)),
    (lambda more: Neighborhood((2, 7), 2**31, step=2**31 + more), Window(0, 0)),
    (lambda more: GridWindow((2, 7), 2**31 + more), Full()),
    (lambda more: GridStride((2, 7), 2**31 + more), Window(0, 0)),
    (lambda more: Axial((2**31 + more, 1)), Full()),
    (lambda more: Axial((1, 2**31 + more)), Full()),
]


@pytest.mark.parametrize(("make", "same"), EXTREMES)
def test_the_largest_numbers_reach_as_far_as_they_say_and_larger_ones_are_refused(make, same):
    pattern = make(0)
    assert torch.equal(pattern.matrix(14), same.matrix(14))
    assert torch.equal(plan(pattern, 14).matrix()[0], same.matrix(14).long())
    assert pattern.pairs(14) == same.pairs(14)
    for more in (1, 2**62, 10**30):
        with pytest.raises(PatternError, match="64-bit integers"):
            make(more)


def test_panel_g_with_every_fourth_row_full():
    counts = []
    for tokens in (12, 16, 64, 256, 1024):
        fourth = Where(lambda i, j: i % 4 == 0)
        counts.append((Causal() & (fourth | Window(2, 0))).pairs(tokens))
    assert counts == [41, 63, 639, 8703, 133119]


VIT = (16, 16)


@pytest.mark.parametrize(
    ("pattern", "tokens", "pairs", "macs", "layers"),
    [
        (Full(), 256, 65536, 67108864, 1),
        (Neighborhood(VIT, 1), 256, 2116, 2166784, 15),
        (Neighborhood(VIT, 2), 256, 5476, 5607424, 8),
        (Neighborhood(VIT, 3), 256, 10000, 10240000, 5),
        (Axial(VIT), 256, 7936, 8126464, 2),
        (GridWindow(VIT, 4), 256, 4096, 4194304, None),
        (GridWindow(VIT, 8), 256, 16384, 16777216, None),
        (GridStride(VIT, 4), 256, 4096, 4194304, None),
        (First(2) | Neighborhood(VIT, 1, start=2), 258, 3144, 3219456, 2),
    ],
    ids=str,
)
def test_patterns_on_sixteen_by_sixteen_patches(pattern, tokens, pairs, macs, layers):
    assert pattern.pairs(tokens) == pairs
    assert 2 * pattern.pairs(tokens) * 512 == macs
    assert layers_to_connect(pattern, tokens=tokens) == layers


def test_a_window_then_a_stride_connect_everything_in_two_layers():
    assert layers_to_connect(GridWindow(VIT, 4), GridStride(VIT, 4), tokens=256) == 2


# Refusals


@pytest.mark.parametrize(
    "impossible",
    [
        lambda: Window(-1, 0),
        lambda: Window(1.5, 0),
        lambda: Window(1, 0, step=0),
        lambda: Strided(0),
        lambda: First(-2),
        lambda: Selected([1, "a"]),
        lambda: Selected([-1]),
        lambda: Segments([[0, 1], [0]]),
        lambda: Where(lambda i, j: i + j).matrix(3),
        lambda: Where(lambda i, j: (i < 2).flatten()[:2]).matrix(3),
        lambda: Full().matrix(2.5),
        lambda: plan(Full(), 5, block=0),
        lambda: Random(-1, 0),
        lambda: Random(1, 0).allows(0, 0),
        lambda: Random(1, 0, tokens=4).pairs(9),
        lambda: Blocks(0),
        lambda: Segments([[0.5, 1.0]]),
        lambda: Segments([[0, 1]]).matrix(3),
        lambda: Padding([]),
        lambda: Padding([-1]),
        lambda: Padding([1], side="top"),
        lambda: Padding([9]).matrix(4),
        lambda: Padding(torch.ones(2, 4, dtype=torch.bool)),  # a mask, not lengths
        lambda: Neighborhood((0, 3), 1),
        lambda: Neighborhood((5, 5), 3, edges="shift"),
        lambda: Neighborhood((5, 5), 1, edges="wrap"),
        lambda: Neighborhood((5, 5, 5), 1),
        lambda: Neighborhood((5, 5), 1).matrix(26),
        lambda: GridWindow((4, 4), 0),
        lambda: GridStride((4, 4), (1, 2, 3)),
        lambda: Axial(3).matrix(10),
        lambda: Where(3),
        lambda: Full().matrix(-1),
        lambda: Padding([1, 2]) & Padding([1, 2, 3]),
        lambda: read_pattern("__import__('os').system('true')"),
        lambda: read_pattern("Window(3"),
        lambda: read_pattern("Window(lambda: 3, 0)"),
        lambda: read_pattern("Window(1, 0) + Causal()"),
    ],
)
def test_impossible_arguments_are_refused_in_four_parts(impossible):
    with pytest.raises(PatternError) as refusal:
        impossible()
    error = refusal.value
    assert error.headline
    assert error.because
    assert error.instead
    assert error.asked


def test_a_pattern_composes_with_patterns_only():
    with pytest.raises(TypeError):
        Causal() & 3


def test_a_drawing_is_text_and_svg_and_a_file(tmp_path):
    drawing = Causal().draw(3)
    assert str(drawing) == "█··\n██·\n███"
    assert drawing.svg().startswith("<svg")
    assert drawing.save(tmp_path / "causal.svg").read_text(encoding="utf-8") == drawing.svg()


@pytest.mark.parametrize("ask", [bool, lambda pattern: pattern and Full(), lambda pattern: pattern or Full()])
@pytest.mark.parametrize("pattern", [Causal(), Causal() & Window(2, 2), ~Causal()], ids=str)
def test_the_truth_of_a_pattern_is_refused(pattern, ask):
    """`Causal() and Window(2, 2)` would be `Window(2, 2)`."""
    with pytest.raises(PatternError, match="a & b"):
        ask(pattern)


@pytest.mark.parametrize("compose", [lambda a, b: a | b, lambda a, b: a & b, lambda a, b: First(2) | (a & ~b)])
def test_grids_that_lay_the_same_tokens_differently_are_refused(compose):
    with pytest.raises(PatternError, match="as 4 x 4 and as 2 x 8"):
        compose(Neighborhood((4, 4), 1), GridWindow((2, 8), 2))
    compose(Neighborhood((4, 4), 1), GridWindow((4, 4), 2))
    compose(Neighborhood((4, 4), 1), GridWindow((2, 8), 2, start=16))  # two images in one sequence
