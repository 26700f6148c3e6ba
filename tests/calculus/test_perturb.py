"""The effect on attention of moving one key."""

import decimal
import math
import operator

import pytest
import torch

from regard.calculus import perturb_attention, perturb_key, perturb_key_first_order, score_change, softmax
from regard.errors import CalculusError

BETA = 1 / math.sqrt(2)


def double(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


QUERY = double([1, 2])
KEY = double([1, 0], [0, 1], [-1, 0.5])
VALUE = double([1, 0], [0, 3], [2, -1])
SHIFT = double(0.01, -0.02)
WEIGHTS = double(0.283995409741260015, 0.575975345215361975, 0.14002924504337801)
OUTPUT = double(0.564053899828016035, 1.58789679060270791)
SHIFTED = [
    (
        [0.279701709555824959, 0.579429325092311559, 0.140868965351863482],
        [0.561439640259551923, 1.5974190099250712],
    ),
    (
        [0.287470816711715364, 0.570786323877918313, 0.141742859410366323],
        [0.570956535532448011, 1.57061611222338861],
    ),
    (
        [0.284832585086855655, 0.577673233076030392, 0.137494181837113953],
        [0.559820948761083561, 1.59552551739097722],
    ),
]
STRETCHED = {
    1.5: [
        (
            [0.360965718087910421, 0.514058144509603414, 0.124976137402486165],
            [0.610917992892882751, 1.41719829612632408],
        ),
        (
            [0.17837015472760459, 0.733681106496888971, 0.087948738775506439],
            [0.354267632278617468, 2.11309458071516047],
        ),
        (WEIGHTS.tolist(), OUTPUT.tolist()),
    ],
    2.0: [
        (
            [0.445808274107603226, 0.445808274107603226, 0.108383451784793549],
            [0.662575177677190323, 1.22904137053801613],
        ),
        (
            [0.101675475511248897, 0.84819153083143086, 0.0501329936573202428],
            [0.201941462825889383, 2.49444159883697234],
        ),
        (WEIGHTS.tolist(), OUTPUT.tolist()),
    ],
    10.0: [
        (
            [0.995675963509087335, 0.00347838330153337135, 0.000845653189379293896],
            [0.997367269887845923, 0.00958949671522082017],
        ),
        (
            [1.46298596849420171e-6, 0.999997815661454491, 7.21352577015033543e-7],
            [2.9056911225242688e-6, 2.99999272563178646],
        ),
        (WEIGHTS.tolist(), OUTPUT.tolist()),
    ],
}


def by_law(index, **move):
    change = score_change(QUERY, KEY[index], **move)
    return perturb_key(WEIGHTS[index : index + 1], OUTPUT[None], VALUE[index], change)


def test_the_golden_attention_before_anything_moves():
    weights = softmax(QUERY @ KEY.mT, BETA)
    torch.testing.assert_close(weights[0], WEIGHTS, rtol=1e-15, atol=0)
    torch.testing.assert_close((weights @ VALUE)[0], OUTPUT, rtol=1e-15, atol=0)


@pytest.mark.parametrize("index", range(3))
def test_a_shifted_key_follows_the_law_to_the_last_digit(index):
    weights, output = (double(*row) for row in SHIFTED[index])
    result = by_law(index, shift=SHIFT)
    assert abs(result.weight[0] - weights[index]) <= 1e-15
    assert (result.output[0] - output).abs().max() <= 1e-15
    found = perturb_attention(QUERY, KEY, VALUE, index, shift=SHIFT)
    torch.testing.assert_close(found[0][0], weights, rtol=0, atol=1e-15)
    torch.testing.assert_close(found[1][0], output, rtol=0, atol=1e-15)


@pytest.mark.parametrize("stretch", STRETCHED)
@pytest.mark.parametrize("index", range(3))
def test_a_stretched_key_follows_the_law_to_the_last_digit(index, stretch):
    weights, output = (double(*row) for row in STRETCHED[stretch][index])
    result = by_law(index, stretch=stretch)
    assert abs(result.weight[0] - weights[index]) <= 1e-15
    assert (result.output[0] - output).abs().max() <= 2e-15
    found = perturb_attention(QUERY, KEY, VALUE, index, stretch=stretch)
    torch.testing.assert_close(found[0][0], weights, rtol=4e-15, atol=0)
    torch.testing.assert_close(found[1][0], output, rtol=4e-15, atol=0)


def test_all_other_weights_share_one_factor():
    assert by_law(0, stretch=2.0).factor.item() == pytest.approx(0.774005828219803, rel=1e-14, abs=0)
    assert by_law(1, stretch=2.0).factor.item() == pytest.approx(0.358018024319064, rel=1e-14, abs=0)
    orthogonal = by_law(2, stretch=2.0)
    assert orthogonal.factor.item() == 1
    assert orthogonal.weight.item() == WEIGHTS[2].item()
    assert (orthogonal.output[0] == OUTPUT).all()


def test_a_stretched_key_that_points_away_loses_weight():
    key = KEY.clone()
    key[2] = double(-1, -0.5)  # k . q = -2
    old = softmax(QUERY @ key.mT, BETA)[0, 2].item()
    assert old == pytest.approx(0.0380793196412542544, rel=1e-14, abs=0)
    twice = perturb_attention(QUERY, key, VALUE, 2, stretch=2.0)[0][0, 2].item()
    tenfold = perturb_attention(QUERY, key, VALUE, 2, stretch=10.0)[0][0, 2].item()
    assert twice == pytest.approx(0.00953246060534043578, rel=1e-14, abs=0)
    assert tenfold == pytest.approx(1.17458256532902171e-7, rel=1e-14, abs=0)


def test_the_first_order_error_is_small_and_shrinks_by_four():
    expected = [4.4e-5, 2.7e-5, 5.9e-5]
    for index in range(3):
        errors = []
        for part in (1.0, 0.5, 0.25):
            change = score_change(QUERY, KEY[index], shift=part * SHIFT)
            known = (WEIGHTS[index : index + 1], OUTPUT[None], VALUE[index], change)
            exact, linear = perturb_key(*known), perturb_key_first_order(*known)
            errors.append((exact.output - linear.output).abs().max().item())
        assert max(errors) == pytest.approx(expected[index], rel=0.05)
        assert errors[0] / errors[1] == pytest.approx(4, rel=0.05)
        assert errors[1] / errors[2] == pytest.approx(4, rel=0.03)


def test_gaussian_shifts_have_the_mean_that_quadrature_finds():
    # Golub and Welsch: nodes and weights of Gauss-Hermite quadrature from the recurrence's Jacobi matrix.
    order = torch.arange(1, 61, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(order.diag(1) + order.diag(-1))
    mass = vectors[0].square()
    deviation = BETA * 0.1 * QUERY.norm().item()
    exact = []
    for a, value in zip(WEIGHTS, VALUE, strict=True):
        moved = perturb_key(a.expand(61), OUTPUT.expand(61, 2), value, deviation * nodes)
        exact.append((mass * (moved.weight - a)).sum())
    torch.testing.assert_close(
        torch.stack(exact), double(0.001088291233, -0.0004583769673, 0.001080659445), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("index", range(3))
def test_the_curvature_at_no_change_is_that_of_attention_itself(index):
    """Half the second derivative times the variance is the mean shift to second order: a (1 - a) (1 - 2 a) / 2."""
    known = (WEIGHTS[index : index + 1], OUTPUT[None], VALUE[index])

    def by_law(change):
        moved = perturb_key(*known, change)
        return torch.cat((moved.weight, moved.output[0]))

    curvature = torch.func.jacrev(torch.func.jacrev(by_law))(double(0.0)).flatten()
    torch.testing.assert_close(curvature, _curvature_by_differences(index), rtol=1e-12, atol=1e-15)
    variance = (BETA * 0.1) ** 2 * QUERY.square().sum()
    second = (0.001098070, -0.000463882, 0.001083701)[index]
    assert (0.5 * variance * curvature[0]).item() == pytest.approx(second, rel=1e-6, abs=5e-10)


def _curvature_by_differences(index):
    """Second differences of softmax(beta q k^T) and of what it makes of the values, with 60 digits."""
    with decimal.localcontext() as digits:
        digits.prec = 60
        beta, step = 1 / decimal.Decimal(2).sqrt(), decimal.Decimal(10) ** -12
        query, keys, values = (
            [[decimal.Decimal(number) for number in row] for row in table.tolist()] for table in (QUERY, KEY, VALUE)
        )

        def attend(change):
            scores = [beta * sum(map(operator.mul, query[0], key)) for key in keys]
            scores[index] += change
            total = sum(score.exp() for score in scores)
            weights = [score.exp() / total for score in scores]
            columns = zip(*values, strict=True)
            return [weights[index], *(sum(map(operator.mul, weights, column)) for column in columns)]

        ahead, here, behind = attend(step), attend(decimal.Decimal(0)), attend(-step)
        triples = zip(ahead, here, behind, strict=True)
        return double(*(float((up - 2 * middle + down) / step**2) for up, middle, down in triples))


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0])
def test_the_law_equals_attending_again(size):
    generator = torch.Generator().manual_seed(3)
    query, key, value, shift = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((2, 3, 5, 7), (2, 3, 11, 7), (2, 3, 11, 13), (2, 3, 7))
    )
    moved = key.clone()
    moved[..., 4, :] += size * shift
    expected = softmax(query @ moved.mT, 7**-0.5)
    weights, output = perturb_attention(query, key, value, 4, shift=size * shift)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(output, expected @ value, rtol=0, atol=1e-13)
    old = softmax(query @ key.mT, 7**-0.5)
    change = score_change(query, key[..., 4, :], shift=size * shift)
    law = perturb_key(old[..., 4], old @ value, value[..., 4, :], change)
    torch.testing.assert_close(law.output, expected @ value, rtol=0, atol=1e-13)
    assert ((law.weight - old[..., 4]).abs() <= change.abs() / 4 + 1e-16).all()


def test_the_convenience_keeps_its_digits_when_a_winner_loses_everything():
    query, key, value = double([1.0]), double([50.0], [1.0], [0.0]), double([5.0], [7.0], [11.0])
    weights, output = perturb_attention(query, key, value, 0, shift=double(-200.0), beta=1.0)
    expected = softmax(double(-150.0, 1.0, 0.0))
    torch.testing.assert_close(weights[0], expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(output[0], expected @ value, rtol=1e-14, atol=0)


def test_an_only_key_changes_nothing_however_it_moves():
    output = double([3.0, 1 / 3])
    for change in (-1e3, -1.0, 0.0, 2.0, 1e3, math.inf):
        result = perturb_key(double(1.0), output, double(3.0, 0.333), double(change))
        assert (result.output == output).all()
        assert result.weight.item() == 1
    removed = perturb_key(double(1.0), output, output[0], double(-math.inf))
    assert removed.output.tolist() == [[0, 0]]
    assert removed.weight.item() == 0


def test_a_vanished_weight_stays_vanished_and_infinite_changes_are_limits():
    output, value = double([1.0]), double(5.0)
    for change in (-math.inf, -3.0, 3.0, math.inf):
        result = perturb_key(double(0.0), output, value, double(change))
        assert (result.weight.item(), result.output.item(), result.factor.item()) == (0, 1, 1)
    # Weight 1/4 on 5 and 3/4 on r = -1/3: all on the key, or none.
    rest = perturb_key(double(0.25), output, value, double(-math.inf))
    assert (rest.weight.item(), rest.output.item()) == (0, pytest.approx(-1 / 3))
    every = perturb_key(double(0.25), output, value, double(math.inf))
    assert (every.weight.item(), every.output.item(), every.factor.item()) == (1, 5, 0)


def test_gradients_agree_with_finite_differences_also_at_no_change():
    generator = torch.Generator().manual_seed(7)
    weight = torch.rand(5, dtype=torch.float64, generator=generator).requires_grad_()
    output = torch.randn(5, 3, dtype=torch.float64, generator=generator).requires_grad_()
    value = torch.randn(3, dtype=torch.float64, generator=generator).requires_grad_()
    change = double(-2.0, -0.1, 0.0, 0.3, 4.0).requires_grad_()
    assert torch.autograd.gradcheck(perturb_key, (weight, output, value, change))
    assert torch.autograd.gradcheck(perturb_key_first_order, (weight, output, value, change))


def test_the_slope_at_no_change_is_the_first_order_law():
    known = (WEIGHTS[:1], OUTPUT[None], VALUE[0])
    slope = torch.func.jacrev(lambda s: perturb_key(*known, s).output)(double(0.0))
    linear = perturb_key_first_order(*known, double(1.0)).output - OUTPUT
    torch.testing.assert_close(slope.flatten(), linear.flatten(), rtol=1e-14, atol=1e-16)


def test_the_law_can_be_mapped_and_compiled():
    weight, output, value, change = (
        torch.rand(3, 5),
        torch.randn(3, 5, 2),
        torch.randn(3, 2),
        torch.randn(3, 5),
    )
    expected = perturb_key(weight, output, value, change)
    compiled = torch.compile(perturb_key, backend="aot_eager", fullgraph=True)
    for found in (
        torch.func.vmap(perturb_key)(weight, output, value, change),
        compiled(weight, output, value, change),
    ):
        for mine, yours in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, yours)


def test_undefined_perturbations_are_refused():
    with pytest.raises(CalculusError, match="neither shift nor stretch"):
        score_change(QUERY, KEY[0])
    with pytest.raises(CalculusError, match="shift and stretch together"):
        score_change(QUERY, KEY[0], shift=SHIFT, stretch=2.0)
    with pytest.raises(CalculusError, match="an index from -3 to 2"):
        perturb_attention(QUERY, KEY, VALUE, 3, stretch=2.0)
    with pytest.raises(CalculusError, match="infinite beta"):
        perturb_attention(QUERY, KEY, VALUE, 1, stretch=2.0, beta=math.inf)
