"""Tokens are drawn from the right tokens with the right probabilities, and the same ones again."""

from __future__ import annotations

import math

import pytest
import torch
from twins import library

from regard.errors import InputError
from regard.models.generation import Sampler
from regard.models.generation.sampling import RowGenerators, find_top_logits

INF = math.inf


def noise(*shape, seed=3, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# Probabilities


def test_the_formula_by_hand():
    logits = torch.tensor([[0.5, 0.125, 0.25, 0.125]], dtype=torch.float64).log()
    close = dict(rtol=1e-15, atol=0)
    torch.testing.assert_close(Sampler().probabilities(logits), logits.exp(), **close)
    cold = torch.tensor([[16, 1, 4, 1]], dtype=torch.float64) / 22
    torch.testing.assert_close(Sampler(0.5).probabilities(logits), cold, **close)
    # after top_k=3 the probabilities are 4/7, 1/7, 2/7: the nucleus is found among these
    both = torch.tensor([[2, 0, 1, 0]], dtype=torch.float64) / 3
    torch.testing.assert_close(Sampler(top_k=3, top_p=0.8).probabilities(logits), both, **close)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, 1), (0.5, 1), (0.5001, 2), (0.75, 2), (0.7501, 3), (0.875, 3), (1, 4)]
)
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p, kept):
    # exact in binary, so that "reaches" is tested at equality; of the equal last two the lower number is kept
    logits = torch.tensor([[2.0, 1.0, 0.0, 0.0]], dtype=torch.float64) * math.log(2) + math.log(1 / 8)
    weights = torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    sampler = Sampler(top_p=top_p)
    expected = weights.clone()
    expected[kept:] = 0
    weights_found = sampler._cut_to_nucleus(weights[None], None)[0]
    torch.testing.assert_close(weights_found, expected, rtol=0, atol=0)
    if top_p not in (0.5, 0.75, 0.875):  # at equality the rounding of exp decides
        assert (sampler.probabilities(logits)[0] > 0).sum() == kept


@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, None), (7, None), (None, 0.3), (None, 0.97), (13, 0.6), (613, 0.9999)]
)
def test_the_cuts_equal_hugging_faces(spread, top_k, top_p):
    # 601 tokens: flat logits need three rounds of the search for the nucleus
    warpers = library("transformers.generation.logits_process")
    logits = noise(5, 601) * spread
    expected = warpers.TemperatureLogitsWarper(0.7)(None, logits)
    if top_k is not None:
        expected = warpers.TopKLogitsWarper(top_k)(None, expected)
    if top_p is not None:
        expected = warpers.TopPLogitsWarper(top_p)(None, expected)
    found = Sampler(0.7, top_k, top_p).probabilities(logits)
    # a sum of 601 terms in another order
    torch.testing.assert_close(found, expected.softmax(-1), rtol=601 * 2**-52, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 17, 63, 97])
def test_of_equal_logits_the_lower_token_comes_first(dtype, count):
    logits = (noise(5, 97) * 3).round().to(dtype)  # few different numbers, many equals
    values, tokens = find_top_logits(logits, count)
    for row in range(5):
        expected = sorted(range(97), key=lambda token: (-logits[row, token].item(), token))[:count]
        assert tokens[row].tolist() == expected
        assert values[row].tolist() == [logits[row, token].item() for token in expected]
    assert Sampler(temperature=0)(logits).tolist() == find_top_logits(logits, 1)[1][:, 0].tolist()
    kept = Sampler(top_k=count).probabilities(logits) > 0
    assert kept.sum(-1).tolist() == [count] * 5


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-9])
def test_a_low_temperature_is_greedy_without_overflow(temperature):
    logits = noise(3, 13) * 100
    assert torch.equal(Sampler(temperature).probabilities(logits), Sampler(0).probabilities(logits))
    assert torch.equal(Sampler(temperature)(logits), logits.argmax(-1))


def test_half_precision_is_computed_in_float32():
    logits = noise(3, 13).bfloat16()
    found = Sampler(0.9, top_p=0.8).probabilities(logits)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, Sampler(0.9, top_p=0.8).probabilities(logits.float()), rtol=0, atol=0)


# Draws


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    return ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()


@pytest.mark.parametrize(
    "sampler", [Sampler(), Sampler(0.6), Sampler(1.7, top_k=4), Sampler(top_p=0.8), Sampler(2.0, 6, 0.9)]
)
def test_many_draws_have_the_distribution(sampler):
    logits = noise(1, 7)
    logits[0, 2] = -INF
    draws = sampler(logits.expand(30011, 7), torch.Generator().manual_seed(5))
    counts = torch.bincount(draws, minlength=7).double()
    exact = sampler.probabilities(logits)[0]
    # at most 5 degrees of freedom: a right sampler exceeds 30 once in 70,000 seeds
    assert chi_square(counts, exact) < 30
    # the twin: the same draws are not from a distribution of the same tokens that is half as warm again
    warmer = exact ** (1 / 1.5)
    assert chi_square(counts, warmer / warmer.sum()) > 30


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(top_k=3), Sampler(top_p=0.99)])
def test_the_ends_of_chance_never_leave_the_possible_tokens(sampler):
    logits = noise(101, 7)
    logits[:, [0, 6]] = -INF
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for chance in ends:
        tokens = sampler.sample(logits, chance.expand(101))
        assert (sampler.probabilities(logits).gather(-1, tokens[:, None]) > 0).all()


def test_a_generator_repeats_its_draws():
    logits = noise(5, 97)
    first, again, other = (Sampler()(logits, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(4)
    free = Sampler()(logits)
    torch.manual_seed(4)
    assert torch.equal(free, Sampler()(logits))


def test_dice_of_a_row_depend_on_the_seed_and_the_row_alone():
    rolls = RowGenerators.BLOCK + 3  # across the end of a block
    many, one = RowGenerators(17, 5), RowGenerators(17, 2)
    together = torch.stack(
        [many.draw([0, 1, 2, 3, 4])[1] if step < 7 else many.draw([1, 4])[0] for step in range(rolls)]
    )
    alone = torch.stack([one.draw([1])[0] for _ in range(rolls)])
    assert torch.equal(together, alone)
    assert ((alone >= 0) & (alone < 1)).all()
    assert len(set(alone.tolist())) == rolls
    assert not torch.equal(alone, torch.stack([RowGenerators(18, 2).draw([1])[0] for _ in range(rolls)]))


def test_rows_of_dice_are_not_alike():
    first = RowGenerators(0, 101).draw(list(range(101)))
    assert len(set(first.tolist())) == 101
    second = RowGenerators(1, 101).draw(list(range(101)))
    assert not set(first.tolist()) & set(second.tolist())


# Refusals


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": INF}, "temperature=inf"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 2.5}, "top_k=2.5"),
        ({"top_k": True}, "top_k=True"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_p": math.nan}, "top_p=nan"),
    ],
)
def test_what_cannot_be_is_refused(arguments, word):
    with pytest.raises(InputError) as caught:
        Sampler(**arguments)
    assert word in caught.value.asked
    assert caught.value.because
    assert caught.value.instead


@pytest.mark.parametrize(("bad", "word"), [(math.nan, "NaN"), (INF, "infinite"), (-INF, "only -inf")])
@pytest.mark.parametrize("sampler", [Sampler(0), Sampler(), Sampler(top_k=2), Sampler(top_p=0.5)])
def test_logits_that_are_no_distribution_are_refused(sampler, bad, word):
    logits = noise(3, 5, dtype=torch.float32)
    logits[2, 1 if bad != -INF else slice(None)] = bad
    with pytest.raises(InputError) as caught:
        sampler(logits)
    assert word in caught.value.found
    assert "row 2" in caught.value.found
    logits[2] = -INF
    logits[2, 3] = -1e30  # one possible token is enough
    assert sampler(logits)[2] == 3
