"""Alibi's slopes are the published ones."""

from __future__ import annotations

import pytest
import torch

from regard.biases import Alibi


def test_eight_heads_have_the_slopes_printed_in_the_paper():
    assert Alibi(8).slopes.tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def test_sixteen_heads_start_and_continue_with_one_over_root_two():
    slopes = Alibi(16, dtype=torch.float64).slopes
    assert slopes[0].item() == pytest.approx(2**-0.5, rel=1e-15)
    torch.testing.assert_close(slopes[1:] / slopes[:-1], slopes[:1].expand(15), rtol=1e-14, atol=0)


def test_twelve_heads_take_every_second_slope_of_sixteen_after_those_of_eight():
    slopes = Alibi(12, dtype=torch.float64).slopes.tolist()
    assert slopes[:8] == [2.0**-h for h in range(1, 9)]
    assert slopes[8:] == pytest.approx([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5], rel=1e-15)


def published(heads: int) -> list[float]:
    """The rule as the authors wrote it, by recursion."""
    power = 1
    while power * 2 <= heads:
        power *= 2
    if power == heads:
        start = 2 ** (-8 / heads)
        return [start * start**h for h in range(heads)]
    return published(power) + published(2 * power)[0::2][: heads - power]


@pytest.mark.parametrize("heads", range(1, 41))
def test_slopes_follow_the_authors_recursion(heads):
    assert Alibi(heads, dtype=torch.float64).slopes.tolist() == pytest.approx(published(heads), rel=1e-13)


def test_nothing_is_learned_and_checkpoints_stay_empty():
    bias = Alibi(3)
    assert list(bias.parameters()) == []
    assert bias.state_dict() == {}


def test_repr_shows_slopes_only_when_they_were_given():
    assert repr(Alibi(12)) == "Alibi(heads=12)"
    assert repr(Alibi(2, slopes=[0.5, 0.25])) == "Alibi(heads=2, slopes=[0.5, 0.25])"
