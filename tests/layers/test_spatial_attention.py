"""Spatial attention: equal to dense attention, separable, with a null key, hard and soft."""

import itertools
import math

import pytest
import torch
from torch import nn

from regard import Quadratic, conv_to_attention
from regard.calculus import softmax
from regard.errors import ConfigError, InputError
from regard.layers import HeadProfile, Lattice, SpatialAttention, head_profile
from regard.layers.lattice import EDGES

DOUBLE = torch.float64
STEPS = [(0.0, 1.0), (-1.0, 0.0), (2.0, -3.0)]


def make(alpha=math.inf, steps=STEPS, seed=3, **options):
    torch.manual_seed(seed)
    return SpatialAttention(4, 6, steps, alpha=alpha, dtype=DOUBLE, **options)


def image_of(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def square_by_hand(layer, size):
    """The weights, pair by pair, from the definition alone; the null key comes last."""
    counts = layer.lattice.queries(size)
    strides = layer.lattice.strides(len(size))
    rows = []
    for head, query in itertools.product(range(layer.heads), itertools.product(*map(range, counts))):
        target = [stride * place + step for stride, place, step in zip(strides, query, layer.step[head], strict=True)]
        scores = []
        for key in itertools.product(*map(range, size)):
            apart = [abs(place - goal) for place, goal in zip(key, target, strict=True)]
            if layer.lattice.edges == "circular":
                apart = [min(off % length, -off % length) for off, length in zip(apart, size, strict=True)]
            scores.append(-layer.alpha[head] * sum(off**2 for off in apart))
        if layer.lattice.edges == "zeros":
            scores.append(-layer.alpha[head] / 2)
        rows.append(torch.stack(scores).softmax(0))
    return torch.stack(rows).view(layer.heads, math.prod(counts), -1)


@pytest.mark.parametrize("edges", ["zeros", "replicate", "circular"])
@pytest.mark.parametrize("lattice", [{}, {"stride": (2, 3)}, {"trim": (2, -1)}])
def test_soft_weights_are_the_softmax_of_the_scores(edges, lattice):
    layer = make(
        torch.tensor([0.4, 1.3, 3.0]), [(0.3, 1.0), (-1.2, 0.0), (2.0, -3.0)], lattice=Lattice(edges=edges, **lattice)
    )
    found = layer.weights((5, 7))
    torch.testing.assert_close(found, square_by_hand(layer, (5, 7)), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))


@pytest.mark.parametrize("edges", EDGES)
@pytest.mark.parametrize("alpha", [0.7, 40.0, math.inf])
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"head_dim": 3}, {"groups": 2, "head_dim": 1}])
def test_it_is_multi_head_attention(edges, alpha, options):
    """Output, heads' contributions and gradients, against all pairs."""
    layer = make(alpha, lattice=Lattice(stride=(1, 2), edges=edges), **options)
    image = image_of(2, 4, 5, 7).requires_grad_()
    square = layer.weights((5, 7))
    assert square.shape == (3, 20, 36 if edges == "zeros" else 35)
    torch.testing.assert_close(square.sum(-1), torch.ones(3, 20, dtype=DOUBLE), rtol=0, atol=1e-15 * 36)
    values = torch.stack([torch.block_diag(*each.chunk(layer.groups)) for each in layer.matrices()])
    pixels = nn.functional.pad(image.flatten(2), (0, square.shape[-1] - 35))
    parts = torch.einsum("hqk,bik,hoi->hboq", square, pixels, values)
    expected = (parts.sum(0) + layer.bias[:, None]).unflatten(-1, (5, 4))
    output = layer(image)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.head_contributions(image), parts.unflatten(-1, (5, 4)), rtol=1e-12, atol=1e-12)
    learned = [image, *layer.parameters()]
    upstream = image_of(*output.shape, seed=4)
    mine = torch.autograd.grad(output, learned, upstream)
    truth = torch.autograd.grad(expected, learned, upstream)
    for one, other in zip(mine, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_along_a_line_and_without_a_batch():
    for alpha in (0.7, math.inf):
        layer = SpatialAttention(4, 6, [-2, 0, 1], alpha=alpha, dtype=DOUBLE)
        image = image_of(2, 4, 11)
        square, pixels = layer.weights(11), nn.functional.pad(image, (0, 1))
        expected = torch.einsum("hqk,bik,hoi->boq", square, pixels, layer.matrices()) + layer.bias[:, None]
        torch.testing.assert_close(layer(image), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layer(image[0]), expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layer.head_contributions(image[0]).sum(0) + layer.bias[:, None], expected[0])


def test_a_mirror_is_padding_with_crop():
    layer = make(0.8, lattice=Lattice(edges="reflect"))
    image = image_of(1, 4, 5, 7)
    wide = nn.functional.pad(image, (6, 6, 4, 4), mode="reflect")
    plain = make(0.8, lattice=Lattice(edges="replicate"))
    torch.testing.assert_close(layer(image), plain(wide)[..., 4:-4, 6:-6], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("edges", EDGES)
def test_soft_heads_become_the_hard_ones(edges):
    image = image_of(2, 4, 5, 7)
    soft, hard = (make(alpha, lattice=Lattice(edges=edges)) for alpha in (80.0, math.inf))
    torch.testing.assert_close(soft(image), hard(image), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(soft.weights((5, 7)), hard.weights((5, 7)), rtol=0, atol=1e-15)


def test_the_completed_square_equals_the_open_one():
    # -alpha (|d|^2 - 2 d . step), as in the paper, differs by alpha |step|^2, which a softmax does not see.
    place = torch.arange(7, dtype=DOUBLE)
    distance = place - place[:, None]
    for step in (-1.0, 0.5, 2.0):
        opened = softmax(-1.7 * (distance.square() - 2 * distance * step))
        layer = SpatialAttention(1, 1, [(step,)], alpha=1.7, lattice=Lattice(edges="replicate"), dtype=DOUBLE)
        torch.testing.assert_close(layer.weights(7)[0], opened, rtol=1e-12, atol=1e-14)


def test_it_attends_as_the_quadratic_bias():
    layer = make(torch.tensor([0.4, 1.3, 3.0]), lattice=Lattice(edges="replicate"))
    bias = Quadratic(3, (5, 7), centre=STEPS, alpha=torch.tensor([0.4, 1.3, 3.0]), dtype=DOUBLE)
    token = torch.arange(35)
    torch.testing.assert_close(layer.weights((5, 7)), bias.scores(token[:, None], token).softmax(-1))
    mine, theirs = layer.head_profile((5, 7)), head_profile(bias)
    for name in ("scores", "centre", "precision"):
        torch.testing.assert_close(getattr(mine, name), getattr(theirs, name))


# Claims that are wrong, or half right


def test_plain_attention_keeps_a_constant_image_and_so_cannot_pad_with_zeros():
    ones = torch.ones(1, 1, 5, 7, dtype=DOUBLE)
    conv = nn.Conv2d(1, 1, 3, padding=1, bias=False, dtype=DOUBLE)
    with torch.no_grad():
        conv.weight.fill_(1)
    padded = conv(ones)[0, 0]
    assert (padded[0, 0], padded[0, 3], padded[2, 3]) == (4, 6, 9)
    null = conv_to_attention(conv)
    torch.testing.assert_close(null(ones)[0, 0], padded)
    for alpha in (0.5, 30.0, math.inf):
        plain = SpatialAttention(
            1, 1, null.steps, alpha=alpha, lattice=Lattice(edges="replicate"), bias=False, dtype=DOUBLE
        )
        with torch.no_grad():
            plain.weight.fill_(1)
        torch.testing.assert_close(plain(ones), 9 * ones, rtol=1e-12, atol=1e-12)


def test_a_step_out_of_the_image_takes_the_nearest_pixel():
    image = image_of(1, 4, 5, 7)
    layer = make(lattice=Lattice(edges="replicate"))
    conv = nn.functional.pad(image, (3, 3, 3, 3), mode="replicate")
    expected = layer.bias[:, None, None] + sum(
        torch.einsum("oi,birc->borc", matrix, conv[..., 3 + row : 8 + row, 3 + column : 10 + column])
        for matrix, (row, column) in zip(layer.matrices(), layer.steps, strict=True)
    )
    torch.testing.assert_close(layer(image), expected, rtol=1e-12, atol=1e-12)


def test_half_way_between_pixels_they_tie_at_any_steepness():
    for alpha in (0.5, 4.0, 200.0):
        layer = SpatialAttention(1, 1, [(0.0, 0.5)], alpha=alpha, lattice=Lattice(edges="replicate"), dtype=DOUBLE)
        weights = layer.weights((9, 11))[0, 4 * 11 + 5].detach().view(9, 11)
        assert weights[4, 5].item() == pytest.approx(weights[4, 6].item(), rel=1e-14)
    assert weights[4, 5].item() == pytest.approx(0.5, abs=1e-12)
    with pytest.raises(ConfigError, match="tie"):
        layer.with_alpha(math.inf)


def test_the_centre_of_mass_is_not_the_step_of_a_steep_head():
    def moments(alpha, step):
        look = SpatialAttention(1, 1, [(step,)], alpha=alpha, dtype=DOUBLE).head_profile((1, 41))
        return look.mean[0, 1].item(), look.covariance[0, 1, 1].item()

    mean, variance = moments(0.5, 0.3)
    assert mean == pytest.approx(0.3, abs=1e-6)
    assert variance == pytest.approx(1.0, abs=1e-5)
    assert moments(0.5, 0.0)[1] == pytest.approx(0.99999979, abs=1e-8)
    assert moments(2.0, 0.25)[0] == pytest.approx(0.2274, abs=5e-5)
    assert moments(50.0, 0.5) == pytest.approx((0.5, 0.25), abs=1e-12)


def test_the_gradient_of_a_step_vanishes_in_the_hard_limit():
    image = image_of(1, 4, 5, 7)
    sizes = []
    for alpha in (0.5, 8.0, 40.0):
        layer = make(alpha)
        layer(image).square().sum().backward()
        sizes.append(layer.step.grad.abs().max().item())
    assert sizes[0] > 1
    assert sizes[2] < 1e-5 * sizes[0]


# Living with it


def test_gradients_by_differences():
    layer = make(torch.tensor([0.4, 1.3, 3.0]), [(0.3, 1.0), (-1.2, 0.0), (2.0, -3.0)])
    image = image_of(1, 4, 3, 5).requires_grad_()

    def run(image, step, spread, weight):
        return torch.func.functional_call(layer, {"step": step, "spread": spread, "weight": weight}, (image,))

    given = [parameter.detach().clone().requires_grad_() for parameter in (layer.step, layer.spread, layer.weight)]
    assert torch.autograd.gradcheck(run, (image, *given))


def test_its_state_carries_the_steps():
    one, other = make(), make(steps=[(0, 0), (1, 1), (2, 2)])
    other.load_state_dict(one.state_dict())
    assert other.steps == one.steps
    image = image_of(1, 4, 5, 7)
    assert torch.equal(one(image), other(image))
    soft = make(0.5).half()
    assert soft.step.dtype == torch.float16
    assert one.half().step.dtype == torch.long


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha", [1.5, math.inf])
def test_half_precision_distinguishes_distant_pixels(dtype, alpha):
    # Place 300 has no bfloat16 of its own, and 3001 no float16.
    layer = SpatialAttention(1, 1, [1], alpha=alpha, lattice=Lattice(edges="replicate"), bias=False).to(dtype)
    with torch.no_grad():
        layer.weight.fill_(1)
    image = (torch.arange(3011) % 7 == 0).to(dtype)[None, None]
    truth = SpatialAttention(1, 1, [1], alpha=alpha, lattice=Lattice(edges="replicate"), bias=False, dtype=DOUBLE)
    with torch.no_grad():
        truth.weight.fill_(1)
        assert (layer(image).double() - truth(image.double())).abs().max() < 4 * torch.finfo(dtype).eps


def test_the_image_is_what_a_hidden_nan_stays_in():
    # A hard head multiplies nothing by zero: what it does not attend to cannot reach it.
    layer = make(steps=[(0, 1)])
    image = image_of(1, 4, 5, 7)
    image[..., 2, 3] = math.nan
    broken = layer(image).isnan().any(1)[0]
    assert broken.nonzero().tolist() == [[2, 2]]


def test_it_exports_and_maps():
    layer = make()
    image = image_of(3, 4, 5, 7)
    exported = torch.export.export(layer, (image,)).module()
    torch.testing.assert_close(exported(image), layer(image))
    torch.testing.assert_close(torch.func.vmap(layer)(image), layer(image))


def test_a_head_profile_shows_steps_and_values():
    hard = make(groups=2)
    found = head_profile(hard)
    assert isinstance(found, HeadProfile)
    assert found.grid == (3, 4)
    assert found.mean.tolist() == [list(step) for step in STEPS]
    assert found.values.shape == (3, 6, 4)
    assert found.kernel[..., 2 + 2, 3 - 3].count_nonzero() == 6 * 2  # the zeros between groups
    line = SpatialAttention(4, 6, [-2, 1], alpha=0.5)
    assert line.head_profile().grid[0] == 1
    torch.testing.assert_close(line.head_profile().mean[:, 1], torch.tensor([-2.0, 1.0]), atol=1e-5, rtol=0)


def test_with_alpha_keeps_everything_else():
    for options in ({}, {"head_dim": 2}):
        hard = make(**options)
        again = hard.with_alpha(torch.tensor([1.0, 2.0, 3.0])).eval().with_alpha(math.inf)
        image = image_of(1, 4, 5, 7)
        assert torch.equal(again(image), hard(image))
        assert not again.training


@pytest.mark.parametrize(
    ("arguments", "because"),
    [
        ((4, 6, [(0, 0, 0)]), "at least one head"),
        ((4, 6, []), "at least one head"),
        ((0, 6, [(0, 0)]), "at least 1"),
        ((4, 6, [(0.5, 0)]), "tie"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, because):
    with pytest.raises(ConfigError, match=because):
        SpatialAttention(*arguments)


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"groups": 3}, "groups divide"),
        ({"alpha": -1.0}, "negative"),
        ({"alpha": torch.tensor([1.0, math.inf])}, "one or the other"),
        ({"dtype": torch.complex64}, "real numbers"),
        ({"lattice": Lattice(stride=(1, 2, 3))}, "axes"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, because):
    with pytest.raises(ConfigError, match=because):
        SpatialAttention(4, 6, [(0, 0), (0, 1)], **options)


@pytest.mark.parametrize("steps", [[], [(0, 1), (0,)], ["left"], [None]])
def test_steps_that_make_no_table_are_refused(steps):
    with pytest.raises(ConfigError, match="each has one step along a line"):
        SpatialAttention(2, 2, steps)


def test_lattices_and_images_that_do_not_fit_are_refused():
    wrong_types = ({"stride": 2.0}, {"stride": "2"}, {"stride": True}, {"stride": (2, None)}, {"trim": 1.5})
    for wrong in ({"edges": "wrap"}, {"stride": 0}, *wrong_types):
        with pytest.raises(ConfigError, match="lattice"):
            Lattice(**wrong)
    layer = make()
    for shape in ((4, 7), (2, 5, 5, 7), (1, 2, 4, 5, 7)):
        with pytest.raises(InputError, match="channels come first"):
            layer(torch.zeros(shape, dtype=DOUBLE))
    with pytest.raises(InputError, match="channels come first"):
        layer.weights(5)
    with pytest.raises(InputError, match="no query"):
        make(lattice=Lattice(trim=5))(image_of(1, 4, 5, 7))
