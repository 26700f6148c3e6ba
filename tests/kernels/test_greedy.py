"""The largest logit and its log-probability in one pass, against torch in float64."""

import pytest
import torch

from regard.kernels import library
from regard.kernels.greedy import find_greedy


@pytest.fixture(params=["best", "plain", "scalar"])
def chosen(request, using):
    with using(library.name() if request.param == "best" else request.param) as name:
        yield name


@pytest.mark.parametrize("count", [1, 7, 16, 65, 131, 1031])
def test_kernels_find_the_largest_logit_and_its_log_probability(chosen, count):
    logits = 5 * torch.randn(3, count, generator=torch.Generator().manual_seed(count))
    tokens, scores = find_greedy(logits)
    assert torch.equal(tokens, logits.argmax(-1))
    exact = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-5)


def test_kernels_take_the_lowest_of_equal_logits(chosen):
    logits = torch.zeros(1, 131)
    logits[0, [29, 97]] = 3.0
    assert find_greedy(logits)[0].tolist() == [29]


@pytest.mark.parametrize("place", [0, 100, 130])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_kernels_leave_logits_that_are_no_distribution_to_the_caller(chosen, place, value):
    logits = torch.zeros(2, 131)
    logits[1, place] = value
    assert find_greedy(logits) is None
    assert find_greedy(torch.full((1, 131), -torch.inf)) is None
