"""Feature maps for linear attention."""

import doctest
import math

import pytest
import torch

import regard.features
from regard.errors import CalculusError
from regard.features import Elu1, FavorPlus, FeatureMap, FromCallable, Relu, Taylor2, feature_map

ALL = [Elu1(), Relu(), Taylor2(), FavorPlus(features=13), FromCallable(torch.sigmoid)]


def rows(count, dim, seed=3, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, dim, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("phi", ALL, ids=lambda phi: type(phi).__name__)
def test_the_width_is_the_number_of_features(phi):
    x = torch.randn(2, 3, 7, 5)
    assert phi(x).shape == (2, 3, 7, phi.width(5))
    assert phi(x.double()).dtype == torch.float64


@pytest.mark.parametrize("phi", ALL, ids=lambda phi: type(phi).__name__)
def test_features_make_non_negative_kernels(phi):
    x = rows(101, 5)
    assert (phi(x) @ phi(x).mT >= 0).all()


@pytest.mark.parametrize("phi", ALL, ids=lambda phi: type(phi).__name__)
def test_gradients_agree_with_finite_differences(phi):
    assert torch.autograd.gradcheck(phi, rows(3, 5).requires_grad_())


@pytest.mark.parametrize("phi", ALL, ids=lambda phi: type(phi).__name__)
def test_a_feature_map_can_be_mapped_and_compiled(phi):
    x = torch.randn(3, 5)
    torch.testing.assert_close(torch.func.vmap(phi)(x), phi(x))
    compiled = torch.compile(lambda y: phi(y), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), phi(x))


def test_elu1_by_hand_and_positive_far_below_zero():
    x = torch.tensor([-80.0, -1.0, 0.0, 2.0], requires_grad=True)
    y = Elu1()(x)
    torch.testing.assert_close(y, torch.tensor([math.exp(-80), math.exp(-1), 1.0, 3.0]), rtol=1e-6, atol=0)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([math.exp(-80), math.exp(-1), 1.0, 1.0]), rtol=1e-6, atol=0)
    assert torch.nn.functional.elu(torch.tensor(-80.0)) + 1 == 0


def test_elu1_has_no_infinite_gradient_for_huge_inputs():
    x = torch.tensor([1e4, -1e4], requires_grad=True)
    Elu1()(x).sum().backward()
    assert x.grad.tolist() == [1, 0]


def test_taylor2_has_21_features_in_five_dimensions():
    assert Taylor2().width(5) == 21
    assert Taylor2()(torch.zeros(5)).tolist() == [1] + [0] * 20


def test_taylor2_by_hand():
    phi = Taylor2()(torch.tensor([2.0, 3.0], dtype=torch.float64))
    expected = torch.tensor([1, 2, 3, 4 / math.sqrt(2), 9 / math.sqrt(2), 6], dtype=torch.float64)
    torch.testing.assert_close(phi, expected)


def test_taylor2_is_the_series_to_1e_14_and_bounded_below_by_a_half():
    q, k = rows(31, 5, seed=5), rows(37, 5, seed=7)
    x = q @ k.mT
    series = 1 + x + x.square() / 2
    kernel = Taylor2()(q) @ Taylor2()(k).mT
    # The terms that are summed may be larger than their sum: the bound is relative to them.
    size = 1 + q.abs() @ k.abs().mT + (q.abs() @ k.abs().mT).square() / 2
    assert ((kernel - series).abs() <= 1e-14 * size.clamp(min=1)).all()
    assert kernel.min() >= 0.5 - 1e-13
    small = 0.3
    exact = 1 + small**2 * x + (small**2 * x).square() / 2
    assert ((Taylor2()(small * q) @ Taylor2()(small * k).mT) - exact).abs().max() <= 1e-14


def test_taylor2_attention_is_close_to_softmax_for_small_scores():
    q, k = rows(31, 5, seed=5), rows(37, 5, seed=7)
    scale = math.sqrt(0.74 / (q @ k.mT).abs().max().item())
    q, k = scale * q, scale * k
    x = q @ k.mT
    kernel = Taylor2()(q) @ Taylor2()(k).mT
    assert ((kernel / x.exp() - 1).abs() <= x.abs() ** 3 * x.abs().exp() / 6 + 1e-15).all()
    error = (kernel / kernel.sum(-1, keepdim=True) - torch.softmax(x, -1)).abs().max().item()
    assert error <= 4.9e-3


def test_favor_plus_estimates_exp_without_bias():
    q, k = rows(2, 5, seed=11, scale=0.5)
    exact = (q @ k).exp().item()
    features, seeds = 7, 499
    samples = torch.stack([FavorPlus(features, seed)(q) @ FavorPlus(features, seed)(k) for seed in range(seeds)])
    # The variance of independent features bounds that of orthogonal ones from above.
    deviation = exact * math.sqrt(math.expm1((q + k).square().sum().item()) / (features * seeds))
    assert abs(samples.mean().item() - exact) <= 4 * deviation
    assert samples.std().item() / math.sqrt(seeds) <= 1.2 * deviation
    biased = samples * (q.square().sum() / 2).exp()  # as if one norm were missing
    assert abs(biased.mean().item() - exact) > 4 * deviation


def test_favor_plus_directions_are_orthogonal_in_blocks_with_gaussian_lengths():
    dim, features = 7, 3 * 7 + 2
    w = FavorPlus(features).projection(dim, torch.float64, "cpu")
    for start in range(0, features, dim):
        gram = w[start : start + dim] @ w[start : start + dim].mT
        assert (gram - gram.diag().diag()).abs().max() < 1e-13
    lengths = torch.cat([FavorPlus(101, seed).projection(dim, torch.float64, "cpu") for seed in range(11)])
    squares = lengths.square().sum(-1)  # chi-square with dim degrees of freedom: mean dim, variance 2 dim
    assert abs(squares.mean().item() - dim) <= 4 * math.sqrt(2 * dim / len(squares))
    # The fourth central moment is 12 dim^2 + 48 dim, which gives the variance its own standard error.
    error = math.sqrt((8 * dim**2 + 48 * dim) / len(squares))
    assert abs(squares.var().item() - 2 * dim) <= 4 * error
    assert abs(lengths.mean().item()) <= 4 / math.sqrt(lengths.numel())


def test_favor_plus_depends_on_its_seed_and_not_on_torch():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = FavorPlus(5, seed=1009).projection(3, torch.float64, "cpu")
    assert (torch.get_rng_state() == state).all()
    regard.clear_cache()
    torch.manual_seed(99)
    assert (FavorPlus(5, seed=1009).projection(3, torch.float64, "cpu") == first).all()
    assert (FavorPlus(5, seed=1013).projection(3, torch.float64, "cpu") != first).any()


def test_favor_plus_draws_the_same_directions_on_every_machine():
    w = FavorPlus(features=2, seed=0).projection(2, torch.float64, "cpu")
    expected = [[1.5533857543767018, -0.3237891267108361], [0.3324086921815415, 1.594738317222547]]
    torch.testing.assert_close(w, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0)


def test_favor_plus_directions_are_kept_and_free_of_the_mode_they_were_made_in():
    phi = FavorPlus(features=17, seed=1021)
    with torch.inference_mode():
        phi(torch.zeros(3))
    kept = phi.projection(3, torch.float32, "cpu")
    assert not kept.is_inference()
    assert phi.projection(3, torch.float32, torch.device("cpu")) is kept
    phi(torch.zeros(3, requires_grad=True)).sum().backward()
    traced = FavorPlus(features=17, seed=1031)
    assert torch.func.grad(lambda x: traced(x).sum())(torch.zeros(3)).shape == (3,)
    assert traced(torch.zeros(3)).shape == (17,)
    assert phi.projection(3, torch.float64, "cpu").dtype == torch.float64


def test_feature_maps_are_values():
    assert FavorPlus(5, 7) == FavorPlus(5, 7) != FavorPlus(5, 11)
    assert Elu1() == Elu1() != Relu()
    assert len({Taylor2(), Taylor2(), FavorPlus(), FavorPlus(256, 0), FromCallable(torch.exp)}) == 3
    with pytest.raises(AttributeError):
        FavorPlus().features = 3
    assert repr(FavorPlus(3)) == "FavorPlus(features=3, seed=0)"
    assert FavorPlus().describe() == "FavorPlus(features=256, seed=0): approximates exp"


def test_only_maps_that_stand_in_for_exp_say_so():
    assert [phi.approximates_exp for phi in ALL] == [False, False, True, True, False]


def test_names_classes_maps_and_functions_are_resolved():
    names = {"elu1": Elu1(), "relu": Relu(), "taylor2": Taylor2(), "favor+": FavorPlus()}
    for name, expected in names.items():
        assert feature_map(name) == expected
        assert feature_map(expected) is expected
    assert feature_map(Taylor2) == Taylor2()
    wrapped = feature_map(lambda x: torch.cat((x, -x), -1).relu())
    assert isinstance(wrapped, FeatureMap)
    assert wrapped.width(5) == 10


@pytest.mark.parametrize("spec", ["favour", None, 3])
def test_an_unknown_name_is_refused_with_the_names_that_exist(spec):
    with pytest.raises(
        CalculusError, match=r'(?s)asked.*found.*"elu1", "relu", "taylor2", "favor\+".*because.*instead'
    ):
        feature_map(spec)


def test_no_features_are_refused():
    with pytest.raises(CalculusError, match="features = 0"):
        FavorPlus(features=0)


def test_the_examples_in_the_docstrings_run():
    found = doctest.testmod(regard.features)
    assert found.attempted >= 6
    assert found.failed == 0
