"""The answers about head positions, on heads whose answer is known."""

import dataclasses
import json
import math

import pytest
import torch
from scipy import stats

from regard import Quadratic
from regard.layers import head_profile
from regard.train import head_analysis
from regard.train.head_analysis import CENTRES, DEPTH, GRID, TRAINING, analyze_heads

SHIFTS = torch.tensor([[row, column] for row in (-1.0, 0.0, 1.0) for column in (-1.0, 0.0, 1.0)])
BETWEEN = SHIFTS + torch.tensor([0.5, 0.45])
NEAR = 0.05 * torch.tensor([[1.0, 0.3], [-0.2, 0.9], [0.5, -0.6]]).repeat(3, 1)


def profiles(centres, widths):
    """Head profiles of layers with these centres and widths; alpha = 1 / (2 width^2)."""
    return {
        f"blocks.{number}.attention": head_profile(
            Quadratic(len(centre), grid=(23, 29), centre=centre.double(), alpha=0.5 / width.double() ** 2).double()
        )
        for number, (centre, width) in enumerate(zip(centres, widths, strict=True))
    }


def spread(width):
    return width * torch.linspace(0.95, 1.05, 9)


INITIAL = profiles([0.5 * BETWEEN] * 3, [spread(1.0)] * 3)


def verdicts(answers, layer="all"):
    return {answer.question: answer.verdict for answer in answers if answer.layer == layer}


def test_widening_layers_of_heads_that_move_to_a_grid_are_four_times_yes():
    last = profiles([2 * SHIFTS + NEAR] * 3, [spread(width) for width in (1.2, 1.5, 1.9)])
    # The centre head of a layer cannot leave the query: with it the others do all the same.
    answers = analyze_heads(INITIAL, last)
    assert verdicts(answers) == dict.fromkeys((DEPTH, TRAINING, CENTRES, GRID), "yes")
    for layer in last:
        assert verdicts(answers, layer) == dict.fromkeys((TRAINING, CENTRES, GRID), "yes")
    depth = answers[0]
    assert depth.details["Spearman's correlation"] == pytest.approx(
        stats.spearmanr([0] * 9 + [1] * 9 + [2] * 9, torch.cat([spread(w) for w in (1.2, 1.5, 1.9)])).statistic
    )
    assert depth.value == pytest.approx(1.9 / 1.2, rel=0.02)
    assert depth.low < depth.value < depth.high
    grid = next(answer for answer in answers if answer.question == GRID and answer.layer != "all")
    assert grid.value == pytest.approx(NEAR.norm(dim=-1).mean().item(), abs=1e-6)
    assert grid.details["distinct shifts"] == 9


def test_heads_that_stay_between_the_pixels_are_four_times_no():
    same = profiles([BETWEEN] * 3, [spread(1.0)] * 3)
    answers = analyze_heads(same, same)
    assert verdicts(answers) == dict.fromkeys((DEPTH, TRAINING, CENTRES, GRID), "no")
    for layer in same:
        assert verdicts(answers, layer) == dict.fromkeys((TRAINING, CENTRES, GRID), "no")


def test_heads_that_shrink_and_return_are_no():
    last = profiles([0.3 * BETWEEN] * 3, [spread(width) for width in (1.2, 0.9, 0.7)])
    found = verdicts(analyze_heads(profiles([BETWEEN] * 3, [spread(1.5)] * 3), last))
    assert (found[DEPTH], found[TRAINING], found[CENTRES]) == ("no", "no", "no")


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_few_heads_are_undecided_however_clear_they_are(heads):
    first = profiles([BETWEEN[:heads]], [torch.ones(heads)])
    last = profiles([4 * SHIFTS[:heads]], [torch.full((heads,), 1.9)])
    answers = analyze_heads(first, last)
    assert verdicts(answers) == dict.fromkeys((DEPTH, TRAINING, CENTRES, GRID), "undecided")
    assert all(answer.heads == heads for answer in answers)
    # Two layers of two heads: 6 arrangements, of which one has p = 1/6.
    two = [profiles([BETWEEN[:2]] * 2, [torch.ones(2), torch.full((2,), width)]) for width in (1.0, 1.9)]
    depth = analyze_heads(*two)[0]
    assert depth.verdict == "undecided"
    assert "0.17" in depth.reason


def test_a_noisy_change_is_undecided():
    width = torch.tensor([0.6, 1.7, 0.8, 1.5, 0.7, 1.6, 0.9, 1.8, 1.0])
    last = profiles([BETWEEN] * 2, [width, width.flip(0)])
    found = verdicts(analyze_heads(profiles([BETWEEN] * 2, [torch.ones(9)] * 2), last))
    assert (found[DEPTH], found[TRAINING]) == ("undecided", "undecided")


def test_the_border_of_a_small_image_does_not_narrow_the_heads():
    """Heads that move out of a 4 x 5 image keep their width; that of their weights shrinks."""
    first, last = (
        {"layer": head_profile(Quadratic(9, grid=(4, 5), centre=factor * BETWEEN, alpha=0.5))} for factor in (1, 4)
    )
    assert (last["layer"].width < 0.8 * first["layer"].width).sum() > 3
    training = next(answer for answer in analyze_heads(first, last) if answer.question == TRAINING)
    assert training.value == pytest.approx(1)
    # Tables have weights alone.
    tables = [{"layer": dataclasses.replace(each["layer"], centre=None, precision=None)} for each in (first, last)]
    training = next(answer for answer in analyze_heads(*tables) if answer.question == TRAINING)
    assert training.value == pytest.approx(
        (last["layer"].width / first["layer"].width).log().mean().exp().item(), rel=1e-5
    )


def test_heads_that_share_their_shifts_are_no_grid():
    doubled = profiles([SHIFTS[[0, 1, 2, 3, 4, 4, 4, 7, 8]] + NEAR], [spread(1.0)])
    answer = next(answer for answer in analyze_heads(doubled, doubled) if answer.question == GRID)
    single = analyze_heads(doubled, doubled)[-1]
    assert answer.verdict == single.verdict == "no"
    assert "7 distinct" in single.reason


def test_the_distance_by_chance_is_that_of_the_unit_square():
    generator = torch.Generator().manual_seed(3)
    distances = (torch.rand(2_000_000, 2, generator=generator, dtype=torch.float64) - 0.5).norm(dim=-1)
    error = head_analysis.CHANCE_DEVIATION / math.sqrt(len(distances))
    assert abs(distances.mean().item() - head_analysis.CHANCE_DISTANCE) < 4 * error
    assert abs(distances.std().item() - head_analysis.CHANCE_DEVIATION) < 4 * error


def test_chance_says_yes_as_rarely_as_it_claims():
    """Of 200 layers with random centres, 5 % are a grid by chance: 10, and below 24 with four deviations."""
    generator = torch.Generator().manual_seed(5)
    count = 0
    for _ in range(200):
        heads = head_analysis._Heads(
            *(torch.rand(9, *size, generator=generator).double() * 6 for size in ((), (2,), (), (2,)))
        )
        grid = head_analysis._test_grid("layer", heads)
        count += grid.p < head_analysis.LEVEL
    assert count < 24


def test_degenerate_heads_are_left_out():
    first = profiles([BETWEEN], [spread(1.0)])
    flat = Quadratic(9, grid=(23, 29), centre=BETWEEN, alpha=torch.tensor([0.5] * 8 + [0.0]))
    answers = analyze_heads(first, {"blocks.0.attention": head_profile(flat)})
    assert {answer.heads for answer in answers} == {8}


def test_answers_are_repeatable_and_are_json():
    last = profiles([2 * SHIFTS + NEAR] * 3, [spread(width) for width in (1.2, 1.5, 1.9)])
    once, twice = (analyze_heads(INITIAL, last) for _ in range(2))
    assert once == twice
    lines = json.loads(json.dumps([answer.to_json() for answer in once], allow_nan=False))
    assert lines[0]["verdict"] == "yes"
    few = analyze_heads(*[profiles([BETWEEN[:1]], [torch.ones(1)])] * 2)
    assert json.dumps([answer.to_json() for answer in few], allow_nan=False)


def test_p_values_of_layers_are_adjusted_for_their_number():
    """One of five layers moved outward in all of six heads: alone p = 1/64, among five 5/64."""
    still, moved = BETWEEN[:6], BETWEEN[:6] * 1.5
    first = profiles([still] * 5, [torch.ones(6)] * 5)
    alone = analyze_heads(profiles([still], [torch.ones(6)]), profiles([moved], [torch.ones(6)]))
    among = analyze_heads(first, profiles([moved, *[still] * 4], [torch.ones(6)] * 5))
    (single,) = (answer for answer in alone if answer.question == CENTRES and answer.layer != "all")
    five = next(answer for answer in among if answer.question == CENTRES and answer.layer == "blocks.0.attention")
    assert single.p == pytest.approx(1 / 64)
    assert five.p == pytest.approx(5 / 64)
    assert (single.verdict, five.verdict) == ("yes", "undecided")


def test_a_change_that_is_certain_and_tiny_is_no():
    first, last = (profiles([factor * BETWEEN], [spread(factor)]) for factor in (1.0, 1.001))
    answers = [answer for answer in analyze_heads(first, last) if answer.question in (TRAINING, CENTRES)]
    assert all(answer.verdict == "no" and answer.p < 0.01 for answer in answers)
