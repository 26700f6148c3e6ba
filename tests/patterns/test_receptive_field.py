"""How many layers a receptive field needs to cover the sequence, against matrix powers and graphs of SciPy."""

import math

import numpy as np
import pytest
import torch
from agreement import refused
from catalog import GRID, PATTERNS, fits
from scipy.sparse.csgraph import shortest_path

from regard import (
    Blocks,
    Causal,
    First,
    Full,
    GridStride,
    GridWindow,
    Padding,
    PatternError,
    Segments,
    Strided,
    Where,
    Window,
    layers_to_connect,
)


def find_layers(masks: list[np.ndarray]) -> int | None:
    """Layer by layer, with boolean matrices (query, key), until a whole round of layers adds nothing."""
    count = len(masks[0])
    union = np.logical_or.reduce(masks)
    wanted = np.ones((count, count), bool)
    if not np.triu(union, 1).any():
        wanted = np.tril(wanted)
    elif not np.tril(union, -1).any():
        wanted = np.triu(wanted)
    field, depth = np.eye(count, dtype=bool), 0
    while True:
        before = field
        for mask in masks:
            field = field | (mask.astype(int) @ field.astype(int) > 0)
            depth += 1
            if (field | ~wanted).all():
                return depth
        if (before == field).all():
            return None


SIZES = (1, 2, 7, 13, 23, 35)
SEQUENCES = [pattern for pattern in PATTERNS if pattern.rows is None]


@pytest.mark.parametrize("pattern", SEQUENCES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_layers_are_those_of_boolean_matrix_powers(pattern, causal):
    pattern = pattern & Causal() if causal else pattern
    for tokens in SIZES:
        if fits(pattern, (tokens, tokens)):
            expected = find_layers([pattern.matrix(tokens).numpy()])
            assert layers_to_connect(pattern, tokens=tokens) == expected, tokens


def test_any_layers_in_turn_are_those_of_boolean_matrix_powers():
    draw = np.random.default_rng(0)
    answers = set()
    for case in range(150):
        tokens, count = int(draw.integers(1, 14)), int(draw.integers(1, 5))
        masks = [draw.random((tokens, tokens)) < draw.choice([0.02, 0.1, 0.4]) for _ in range(count)]
        masks = [(np.tril, np.triu, np.asarray)[case % 3](mask) for mask in masks]
        tables = [torch.tensor(mask) for mask in masks]
        patterns = [Where(lambda i, j, table=table: table[i, j]) for table in tables]
        expected = find_layers(masks)
        assert layers_to_connect(*patterns, tokens=tokens) == expected, (case, tokens, count)
        answers.add(expected)
    assert {None, 1, 2, 3, 5} <= answers


@pytest.mark.parametrize("tokens", [2, 16, 101])
def test_a_decoder_covers_all_that_it_could_ever_see(tokens):
    assert layers_to_connect(Causal(), tokens=tokens) == 1
    for width in (1, 2, 5):
        assert layers_to_connect(Window(width, 0), tokens=tokens) == math.ceil((tokens - 1) / width)
        assert layers_to_connect(Window(0, width), tokens=tokens) == math.ceil((tokens - 1) / width)
        assert layers_to_connect(Window(width, width), tokens=tokens) == math.ceil((tokens - 1) / width)


def test_one_pattern_needs_as_many_layers_as_its_longest_shortest_path():
    pattern = Window(1, 1) | Where(lambda i, j: (i * i + 1) % 61 == j)
    lengths = shortest_path(pattern.matrix(61).numpy(), unweighted=True)
    assert layers_to_connect(pattern, tokens=61) == int(lengths.max())


def test_what_stays_within_its_block_never_covers_the_sequence():
    for pattern in (Blocks(4), Blocks(1), Causal() & Blocks(4), Strided(3), Causal() & Strided(3)):
        assert layers_to_connect(pattern, tokens=16) is None
    assert layers_to_connect(Blocks(4), tokens=4) == 1


def test_a_causal_stride_needs_windows_that_slide():
    stride = Causal() & Strided(4)
    assert layers_to_connect(Window(3, 0), stride, tokens=16) == 2
    assert layers_to_connect(Causal() & Blocks(4), stride, tokens=16) is None  # token 4 never reaches token 3


def test_layers_of_both_directions_have_none_together():
    assert layers_to_connect(Causal(), Where(lambda i, j: j >= i), tokens=11) == 2
    assert layers_to_connect(Window(1, 0), Full(), tokens=11) == 2
    assert layers_to_connect(First(1), tokens=11) == 2


def test_every_batch_row_has_to_be_covered():
    whole, cut = [0] * 7, [0, 0, 0, 1, 1, 1, 1]
    assert layers_to_connect(Segments([whole]), tokens=7) == 1
    assert layers_to_connect(Segments([whole, cut]), tokens=7) is None
    assert layers_to_connect(Segments([cut, whole]), tokens=7) is None
    assert layers_to_connect(Padding([7, 3]), tokens=7) is None
    window = Window(3, 3)
    alone = [find_layers([window.matrix(7).numpy(), Segments([ids]).matrix(7)[0].numpy()]) for ids in (whole, cut)]
    assert alone == [2, 3]
    assert layers_to_connect(window, Segments([whole, cut]), tokens=7) == 3


def test_long_sequences_are_covered_without_a_product_for_every_layer():
    assert layers_to_connect(Window(1, 0), tokens=509) == 508


def test_grids_of_windows_match_the_textbook():
    assert layers_to_connect(GridWindow(GRID, 2), tokens=GRID[0] * GRID[1]) is None
    assert layers_to_connect(GridWindow((16, 16), 4), GridStride((16, 16), 4), tokens=256) == 2


def test_what_is_no_pattern_or_no_length_is_refused():
    with refused(PatternError, "patterns of its layers"):
        layers_to_connect(tokens=7)
    with refused(PatternError, "patterns of its layers", "'causal'"):
        layers_to_connect(Causal(), "causal", tokens=7)
    for tokens in (0, -3, 2.5, "7", True):
        with refused(PatternError, "tokens="):
            layers_to_connect(Causal(), tokens=tokens)


def test_the_catalog_has_patterns_with_and_without_a_full_receptive_field():
    found = {find_layers([pattern.matrix(13).numpy()]) for pattern in SEQUENCES if fits(pattern, (13, 13))}
    assert None in found
    assert len(found) > 3
