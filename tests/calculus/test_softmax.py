"""Softmax at every inverse temperature."""

import math

import hypothesis.strategies as st
import mpmath
import pytest
import torch
from hypothesis import given, settings

from regard.calculus import logsumexp, softmax
from regard.errors import CalculusError

INF = math.inf
Z = [1.0, 2.0, 3.0]
TABLE = {
    0.0: [1 / 3, 1 / 3, 1 / 3],
    1.0: [0.090030573170380458, 0.244728471054797652, 0.66524095577482189],
    -1.0: [0.66524095577482189, 0.244728471054797652, 0.090030573170380458],
    10.0: [2.06106004620906229e-9, 0.0000453978686088666611, 0.999954600070331087],
    50.0: [3.72007597602083596e-44, 1.92874984796391778e-22, 1.0],
}


def double(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("beta", TABLE)
def test_the_table_of_betas_is_reproduced_to_fifteen_digits(beta):
    torch.testing.assert_close(softmax(double(*Z), beta), double(*TABLE[beta]), rtol=4e-15, atol=0)


def test_a_minus_sign_in_the_exponent_is_not_argmin():
    assert softmax(double(*Z), -1.0)[0] < 0.67
    assert softmax(double(*Z), -INF).tolist() == [1, 0, 0]


@pytest.mark.parametrize("beta", [1.0, 3.0, 7.0, 31.0])
def test_what_the_winner_lacks_is_bounded_by_the_gap(beta):
    assert 1 - softmax(double(*Z), beta).max() <= 2 * math.exp(-beta)


def test_zero_beta_is_exactly_uniform_over_the_visible():
    scores = torch.tensor([3.0, -INF, 7e8, INF, -2.0])
    assert softmax(scores, 0.0).tolist() == [0.25, 0, 0.25, 0.25, 0.25]


def test_infinite_beta_is_hard_and_ties_share_equally():
    scores = torch.tensor([[2.0, 5.0, 5.0, -1.0], [0.0, 0.0, 0.0, 1.0]])
    assert softmax(scores, INF).tolist() == [[0, 0.5, 0.5, 0], [0, 0, 0, 1]]
    third = pytest.approx(1 / 3, rel=1e-6)
    assert softmax(scores, -INF).tolist() == [[0, 0, 0, 1], [third, third, third, 0]]


def test_random_rows_are_probabilities():
    tokens = torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weights = softmax(tokens @ tokens.mT)
    assert weights.min() >= 0
    assert (weights.sum(-1) - 1).abs().max() <= 4e-16 * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_scores_neither_overflow_nor_make_nans(dtype):
    assert softmax(torch.tensor([1000.0, 0.0, -1000.0], dtype=dtype)).tolist() == [1, 0, 0]
    assert softmax(torch.tensor([1000.0, 0.0, -1000.0], dtype=dtype), -1.0).tolist() == [0, 0, 1]
    biggest = torch.finfo(dtype).max
    assert softmax(torch.tensor([biggest, 0.0, -biggest], dtype=dtype), 13.0).tolist() == [1, 0, 0]


def test_naive_exponentials_do_overflow():
    assert torch.tensor(100.0).exp() == INF


@pytest.mark.parametrize(
    ("scores", "beta", "expected"),
    [
        ([INF, 0.0, INF], 1.0, [0.5, 0, 0.5]),
        ([INF, 0.0, 0.0], -1.0, [0, 0.5, 0.5]),
        ([INF, INF], -2.0, [0.5, 0.5]),
        ([-INF, 0.0, 0.0], -1.0, [0, 0.5, 0.5]),
        ([-INF, 0.0, 1.0], -INF, [0, 1, 0]),
        ([-INF, -INF], INF, [0, 0]),
        ([-INF, -INF], 0.0, [0, 0]),
    ],
)
def test_infinite_scores_have_a_meaning(scores, beta, expected):
    assert softmax(torch.tensor(scores), beta).tolist() == expected


def test_float32_weights_vanish_150_ln_2_below_the_winner():
    assert 103.972 < 150 * math.log(2) < 103.973
    assert softmax(torch.tensor([0.0, -103.97]))[1] == 2.0**-149
    assert softmax(torch.tensor([0.0, -103.98]))[1] == 0


def test_float64_weights_vanish_745_13_below_the_winner():
    assert softmax(double(0.0, -745.13))[1] == 2.0**-1074
    assert softmax(double(0.0, -745.14))[1] == 0


def test_with_flushed_denormals_float32_weights_vanish_at_87_34():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        kept, gone = softmax(torch.tensor([0.0, -87.33]))[1], softmax(torch.tensor([0.0, -87.35]))[1]
        assert kept > 0
        assert gone == 0
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("beta", [1.0, 0.0, -3.0, INF, -INF])
def test_a_row_with_nothing_visible_is_zero_with_zero_gradient(beta):
    scores = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    where = torch.tensor([[True] * 5, [False] * 5, [False, True, True, False, True]])
    weights = softmax(scores, beta, where=where)
    assert weights[1].tolist() == [0] * 5
    assert (weights[~where] == 0).all()
    weights.square().sum().backward()
    assert scores.grad.isfinite().all()
    assert (scores.grad[~where] == 0).all()


@pytest.mark.parametrize("bad", [math.nan, INF, 1e308])
def test_a_hidden_score_never_touches_the_result_or_the_gradient(bad):
    scores = double(1.0, bad, 3.0).requires_grad_()
    weights = softmax(scores, where=torch.tensor([True, False, True]))
    torch.testing.assert_close(weights[[0, 2]], softmax(double(1.0, 3.0)))
    weights[2].backward()
    assert scores.grad.isfinite().all()


def test_a_visible_nan_poisons_its_row_and_no_other():
    weights = softmax(torch.tensor([[math.nan, 1.0, 2.0], [0.0, 1.0, 2.0]]))
    assert weights[0].isnan().all()
    assert weights[1].isfinite().all()


def test_the_mask_broadcasts_over_batch_and_head():
    scores = torch.randn(2, 3, 5, 7)
    where = torch.rand(5, 7, generator=torch.Generator().manual_seed(3)) > 0.3
    torch.testing.assert_close(softmax(scores, where=where)[1, 2], softmax(scores[1, 2], where=where))
    assert softmax(scores[:1, :1], where=where.expand(2, 3, 5, 7)).shape == (2, 3, 5, 7)


def test_any_axis_can_be_normalised():
    scores = torch.randn(3, 5, 7)
    torch.testing.assert_close(softmax(scores, dim=1), softmax(scores.mT).mT)
    torch.testing.assert_close(softmax(scores, 2.0, dim=0), torch.softmax(2 * scores, 0))


def test_no_keys_give_no_weights():
    assert softmax(torch.zeros(3, 0)).shape == (3, 0)
    assert logsumexp(torch.zeros(3, 0)).tolist() == [-INF] * 3


@pytest.mark.parametrize("beta", [1.0, 0.0, -1.7, 0.3])
def test_gradients_agree_with_finite_differences_also_under_a_mask(beta):
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(3, 5, dtype=torch.float64, generator=generator).requires_grad_()
    where = torch.rand(3, 5, generator=generator) > 0.3
    where[1] = False
    slope = double(beta).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: softmax(z, beta, where=where), scores)
    assert torch.autograd.gradgradcheck(lambda z: softmax(z, beta, where=where), scores)
    assert torch.autograd.gradcheck(lambda z: logsumexp(z, beta, where=where)[[0, 2]], scores)
    assert torch.autograd.gradcheck(lambda z, b: softmax(z, b, where=where), (scores, slope))
    assert torch.autograd.gradcheck(lambda z, b: logsumexp(z, b), (scores, slope))


def test_a_tensor_of_betas_gives_each_head_its_own():
    scores = torch.randn(5, 7, 11)
    betas = torch.tensor([0.0, INF, -INF, -2.0, 3.0])
    together = softmax(scores, betas[:, None, None])
    for head, beta in enumerate(betas.tolist()):
        torch.testing.assert_close(together[head], softmax(scores[head], beta), rtol=0, atol=0)


def test_infinite_betas_and_scores_have_finite_gradients():
    betas = torch.tensor([0.0, INF, -INF, -2.0, 3.0]).requires_grad_()
    scores = torch.tensor([1.0, -INF, 2.0, INF, -3.0, 2.0]).repeat(5, 1).requires_grad_()
    softmax(scores, betas[:, None]).square().sum().backward()
    # Limits do not move with their scores; in the row of -2 the finite scores are an ordinary softmax.
    finite = torch.tensor([1.0, 2.0, -3.0, 2.0]).requires_grad_()
    (-2 * finite).softmax(-1).square().sum().backward()
    expected = torch.zeros(5, 6)
    expected[3, [0, 2, 4, 5]] = finite.grad
    torch.testing.assert_close(scores.grad, expected)
    torch.testing.assert_close(
        betas.grad, torch.tensor([0.0, 0.0, 0.0, float(finite.grad @ finite.detach()) / -2, 0.0])
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_finite(dtype):
    scores = torch.tensor([6e4, -6e4, 5.0, -INF], dtype=dtype)
    assert softmax(scores, 7.0).tolist() == [1, 0, 0, 0]
    assert softmax(scores, 0.0).sum() == 1


def test_logsumexp_of_an_empty_row_is_minus_infinity_with_zero_gradient():
    scores = torch.full((2, 3), -INF, requires_grad=True)
    lse = logsumexp(scores)
    assert lse.tolist() == [-INF, -INF]
    lse.sum().backward()
    assert (scores.grad == 0).all()
    torch.testing.assert_close(logsumexp(double(1, 2, 3), -2.0), torch.logsumexp(double(-2, -4, -6), 0))


@settings(max_examples=53, deadline=None)
@given(
    st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=7),
    st.floats(-100, 100),
)
def test_softmax_agrees_with_forty_digits(numbers, beta):
    with mpmath.workdps(40):
        powers = [mpmath.exp(mpmath.mpf(beta) * mpmath.mpf(z)) for z in numbers]
        exact = [float(power / mpmath.fsum(powers)) for power in powers]
        lse = float(mpmath.log(mpmath.fsum(powers)))
    spread = max(abs(beta) * (max(numbers) - min(numbers)), 1.0)
    # One rounding of the gap and one of its product with beta are relative errors of an exponent <= 745.
    bound = 4 * 2.2e-16 * (min(spread, 745.0) + len(numbers))
    torch.testing.assert_close(softmax(double(*numbers), beta), double(*exact), rtol=bound, atol=1e-307)
    torch.testing.assert_close(logsumexp(double(*numbers), beta), double(lse).squeeze(), rtol=1e-14, atol=1e-14)


def test_softmax_can_be_mapped_and_compiled():
    scores, where = torch.randn(5, 7), torch.rand(5, 7) > 0.4
    mapped = torch.func.vmap(lambda z, w: softmax(z, 0.7, where=w))(scores, where)
    compiled = torch.compile(lambda z, w: softmax(z, 0.7, where=w), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(mapped, softmax(scores, 0.7, where=where))
    torch.testing.assert_close(compiled(scores, where), softmax(scores, 0.7, where=where))


def test_arguments_without_a_meaning_are_refused_in_four_parts():
    with pytest.raises(CalculusError, match=r"(?s)asked.*nan.*because.*instead"):
        softmax(torch.zeros(3), math.nan)
    with pytest.raises(CalculusError, match=r"int64.*\n.*because"):
        softmax(torch.tensor([1, 2, 3]))
    with pytest.raises(CalculusError, match="infinite beta"):
        logsumexp(torch.zeros(3), INF)
