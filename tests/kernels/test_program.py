"""The words of a program name every allowed pair once; `csrc/plan.h` has their format."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from catalog import LENGTHS, PATTERNS, TOKENS, fits

from regard import Causal, First, Full, Padding, Random, Window
from regard.kernels.program import VECTORS, program
from regard.patterns import Lengths

LANES = [4, 8]


def parts_of(words):
    """Every part as its lists, every list as its segments and tiles, every tile as its queries and runs."""
    for part in range(words[0]):
        at = words[6 + part]
        yield [_list(words, place) for place in words[at + 1 : at + 1 + words[at]]]


def _list(words, at):
    segments, tiles, table = words[at : at + 3]
    return (
        [tuple(words[at + 3 + 4 * n : at + 7 + 4 * n]) for n in range(segments)],
        [_tile(words, place) for place in words[table : table + tiles]],
    )


def _tile(words, at):
    queries, runs = words[at : at + 2]
    first = at + 2 + queries
    return words[at + 2 : first], [tuple(words[first + 4 * n : first + 4 * n + 4]) for n in range(runs)]


def assert_rebuilds(made, pattern, lengths, lanes):
    """Count every pair that the words allow, and look at everything that the kernels rely on."""
    words, masks = made.words.tolist(), made.masks.numpy().view(np.uint64)
    matrix = pattern.matrix(*lengths).long().numpy()
    expected = matrix if matrix.ndim == 3 else matrix[None]
    parts, tallest, resumes, rows, low, high = words[:6]
    assert (high << 31) + low == matrix.sum()
    assert rows == (pattern.rows or 1)
    assert resumes == (parts != 1)
    assert tallest <= max(VECTORS) * lanes
    counted = np.zeros_like(expected)
    for lists in parts_of(words):
        assert len(lists) in (1, rows)
        for row in range(rows):
            segments, tiles = lists[row % len(lists)]
            assert_segments_cover(segments, tiles)
            held = np.zeros(lengths[0], dtype=int)
            for queries, runs in tiles:
                assert 0 < len(queries) <= tallest
                held[queries] += 1
                assert [mask >= 0 for *_, mask in runs] == sorted(mask >= 0 for *_, mask in runs)  # whole ones first
                for start, count, step, mask in runs:
                    assert count > 0
                    keys = start + step * np.arange(count)
                    assert 0 <= keys.min() <= keys.max() < lengths[1]
                    bitmask = np.full(count, ~np.uint64(0)) if mask < 0 else masks[mask : mask + count]
                    bits = bitmask >> np.arange(len(queries), dtype=np.uint64)[:, None] & np.uint64(1)
                    counted[row][np.ix_(queries, keys)] += bits.astype(int)
                    if mask >= 0:
                        assert not (bitmask >> np.uint64(len(queries))).any()  # the other lanes are unused
            # Alone, a part writes every query, also those that see nothing; else what is not written is zero before.
            assert (held == 1).all() if parts == 1 else (held <= 1).all()
    assert np.array_equal(counted, expected), (pattern, lengths, lanes)


def assert_segments_cover(segments, tiles):
    """In order, without gaps, with room for exactly the keys that their tiles touch."""
    assert segments[0][0] == 0
    assert segments[-1][1] == len(tiles)
    assert all(before[1] == after[0] for before, after in pairwise(segments))
    for first, last, low, high in segments:
        keys = [
            start + step * n for _, runs in tiles[first:last] for start, count, step, _ in runs for n in (0, count - 1)
        ]
        assert (low, high) == ((min(keys), max(keys) + 1) if keys else (0, 0))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_words_rebuild_their_pattern(pattern):
    for lengths in [*LENGTHS, (2, 1), (1, 1), (7, 0)]:
        for lanes in LANES:
            if fits(pattern, lengths):
                assert_rebuilds(program(pattern, Lengths(*lengths), lanes), pattern, lengths, lanes)


MANY = [Causal(), Window(9, 3), Window(2, 2, step=3) | First(2), Random(2, 1, block=4), Padding([300, 120])]


@pytest.mark.parametrize("pattern", MANY, ids=str)
def test_words_rebuild_their_pattern_in_many_segments(small_segments, pattern):
    with small_segments():
        for lanes in LANES:
            made = program(pattern, Lengths(300, 300), lanes)
            assert_rebuilds(made, pattern, (300, 300), lanes)
            counts = [len(segments) for lists in parts_of(made.words.tolist()) for segments, _ in lists]
            assert max(counts) > 5


def test_a_segment_ends_once_it_is_worth_its_sum(monkeypatch):
    """Far keys do not split a head: a segment must have work for every key that has to be added up."""
    monkeypatch.setattr("regard.kernels.program.SEGMENT_AREA", 1)
    program.cache_clear()
    try:
        made = program(Window(2, 2), Lengths(2000, 2000), 8)
        (lists,) = parts_of(made.words.tolist())
        assert len(lists[0][0]) == 1  # a window of 5 keys never has 128 pairs for each
        assert_rebuilds(made, Window(2, 2), (2000, 2000), 8)
    finally:
        program.cache_clear()


def test_the_number_of_pairs_may_exceed_31_bits():
    made = program(Full(), Lengths(70_000, 70_000), 8)
    _, _, _, rows, low, high = made.words[:6].tolist()
    assert (rows, (high << 31) + low) == (1, 70_000**2)


def test_equal_tiles_share_their_masks():
    short, long = (program(Window(9, 3), Lengths(n, n), 8) for n in (1000, 4000))
    assert long.masks.numel() == short.masks.numel()


def spoiled(made, at, change):
    words = made.words.clone()
    words[at] = change(int(words[at]))
    return replace(made, words=words)


def test_the_check_of_the_words_can_fail():
    pattern, lengths = Window(3, 2), (TOKENS, TOKENS)
    made = program(pattern, Lengths(*lengths), 4)
    assert_rebuilds(made, pattern, lengths, 4)
    masks = made.masks.clone()
    masks[1] ^= 2
    crooked = [replace(made, masks=masks), spoiled(made, 4, lambda pairs: pairs + 1), spoiled(made, 3, lambda _: 2)]
    words = made.words.tolist()
    place = words[words[6] + 1]
    tile = words[words[place + 2]]
    run = tile + 2 + words[tile]
    crooked += [spoiled(made, place + 5, lambda low: low + 1), spoiled(made, place + 6, lambda high: high + 1)]
    crooked += [spoiled(made, run, lambda start: start + 1), spoiled(made, run + 1, lambda count: count - 1)]
    for one in crooked:
        with pytest.raises(AssertionError):
            assert_rebuilds(one, pattern, lengths, 4)
