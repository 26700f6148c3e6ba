"""scale=0 and scale=inf have linear cost, and tiles cache what is worth caching."""

import math

import pytest
import torch

from regard import Causal, First, Full, Random, Window, attend
from regard.backends.limits import _build_tree, _plan_means
from regard.backends.tiles import Group, group_tiles, tile_height
from regard.patterns import Lengths


def entries(pattern, tokens):
    """How many values the mean over visible keys reads, weighted sums of many included as one."""
    return sum(step.weight.numel() for step in _plan_means(pattern, Lengths(tokens, tokens)))


@pytest.mark.parametrize("pattern", [Full(), Causal(), Window(100, 100), First(3) | Window(5, 5)], ids=str)
def test_the_mean_reads_a_number_of_sums_that_grows_with_the_tokens_not_their_square(pattern):
    small, large = entries(pattern, 4096), entries(pattern, 16384)
    assert large / small < 4.6  # four times the tokens, and a logarithm
    assert large < 16384 * 400


def test_the_tree_holds_the_sum_of_every_pair_of_neighbours():
    value = torch.arange(1.0, 6.0)[:, None]
    assert _build_tree(value).flatten().tolist() == [1, 2, 3, 4, 5, 3, 7, 5, 10, 5, 15]


def test_the_mean_over_a_long_past_is_as_exact_as_a_float64_sum():
    tokens = 20_011
    value = torch.randn(1, 1, tokens, 3, generator=torch.Generator().manual_seed(0))
    zero = torch.zeros(1, 1, tokens, 1)
    found = attend(zero, zero, value, scale=0, pattern=Causal(), backend="blocked")
    truth = value.double().cumsum(2) / torch.arange(1, tokens + 1)[:, None]
    # A tree adds each value once per level, so its rounding grows with the logarithm of the length.
    bound = torch.finfo(torch.float32).eps * (math.log2(tokens) + 64) * float(value.abs().max())
    assert float((found - truth).abs().max()) <= bound


@pytest.mark.slow
def test_hard_attention_over_a_long_sequence_holds_no_square():
    query, key, value = torch.randn(3, 1, 1, 20_011, 4, generator=torch.Generator().manual_seed(1))
    found = attend(query, key, value, scale=math.inf, pattern=Causal(), backend="blocked")
    for at in (0, 7, 12_345, 20_010):
        assert torch.equal(found[0, 0, at], value[0, 0, (key[0, 0, : at + 1] @ query[0, 0, at]).argmax()])


def test_all_inner_tiles_of_a_window_share_one_mask():
    groups = group_tiles(Window(128, 128), Lengths(4096, 4096), 64)
    assert sum(len(group.masks) for group in groups if group.masks is not None) <= 5
    assert sum(group.shape[0] for group in groups) == 64


def test_tiles_are_low_where_a_pattern_is_narrow_and_tall_where_it_is_wide():
    lengths = Lengths(4096, 4096)
    assert tile_height(Window(1, 1), lengths, 1) == 16
    assert tile_height(Full(), lengths, 1) == 128
    assert tile_height(Window(1, 1), lengths, 8) == 16


def test_masks_that_would_take_too_much_memory_are_computed_at_each_run(monkeypatch):
    pattern, lengths = Random(5, 1), Lengths(301, 301)
    kept = group_tiles.__wrapped__(pattern, lengths, 32)
    monkeypatch.setattr("regard.backends.tiles.MASK_BUDGET", 100)
    thrifty = group_tiles.__wrapped__(pattern, lengths, 32)
    assert any(group.masks is not None for group in kept)
    assert all(group.masks is None for group in thrifty if group.ragged)

    def pairs(groups: tuple[Group, ...]) -> int:
        return sum(int(job.mask.sum()) for group in groups for job in group.jobs(1, torch.device("cpu")))

    monkeypatch.setattr("regard.backends.tiles.TILE_BUDGET", 1)
    assert pairs(kept) == pairs(thrifty) == pattern.pairs(301)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_a_winner_whose_share_underflows_still_counts(backend):
    # All keys tie; the bias leaves the second one e^-200, which is zero in float32. Its value is infinite all the same.
    query, key = torch.zeros(1, 1, 1, 3), torch.randn(1, 1, 4, 3)
    value = torch.randn(1, 1, 4, 2)
    value[0, 0, 1, 1] = math.inf
    bias = torch.tensor([[0.0, -200.0, 0.0, 0.0]])
    output = attend(query, key, value, scale=math.inf, bias=bias, backend=backend)
    assert output[0, 0, 0].isnan().tolist() == [False, True]
