"""Teacher and student: the kernel of a convolution is recovered, wherever the heads are centred."""

import pytest
import torch
from plain import long
from torch.nn import functional

from regard.errors import InputError
from regard.models.spatial import SpatialConfig, SpatialHeads
from regard.train import TeacherRecipe, train_student


def test_a_short_run_recovers_most_of_the_kernel():
    result = train_student(
        TeacherRecipe(channels=2, canvas=(7, 5), margin=3, batch_size=16, steps=300, record_every=70, seed=2)
    )
    assert result.losses[0] > 0.5
    assert result.loss < 0.1
    assert result.kernel_error < 0.4
    assert [step for step, _ in result.recorded] == [0, 70, 140, 210, 280, 300]
    assert result.kernel.shape == result.target_kernel.shape == (2, 2, 19, 15)
    assert result.recorded[0][1].width.allclose(torch.ones(1).double(), atol=0.1)  # alpha = 1/2
    moved = result.head_profile.centre - result.recorded[0][1].centre
    assert moved.norm(dim=-1).max() > 0.1


def test_the_losses_are_those_of_the_effective_kernel():
    recipe = TeacherRecipe(channels=3, canvas=(5, 7), margin=2, batch_size=11, steps=1, learning_rate=1e-9)
    result = train_student(recipe)
    torch.manual_seed(5)
    x = torch.randn(400, 3, 5, 7, dtype=torch.float64)
    output = functional.conv2d(x, result.kernel, padding=(6, 8))
    target = functional.conv2d(x, result.teacher, padding=1)
    relative = ((output - target).square().sum() / target.square().sum()).item()
    # Eight batches of 11 images, 1155 numbers each: a ratio of sums of squares is known to a few in a hundred.
    assert abs(result.loss - relative) < 0.1 * relative


@pytest.mark.parametrize("position", ["quadratic", "gaussian", "learned"])
def test_weights_by_relative_position_have_gradients_and_are_the_head_profiles(position):
    torch.manual_seed(1)
    layer = SpatialHeads(SpatialConfig(position, image=(5, 7), patch=1, dim=3, heads=2)).double()
    weights = layer.relative_weights()
    assert torch.allclose(weights, layer.head_profile().weights, rtol=1e-12)
    grad_output = torch.randn(weights.shape, dtype=torch.float64)
    for gradient in torch.autograd.grad((weights * grad_output).sum(), list(layer.position.parameters())):
        assert bool(gradient.isfinite().all())
        assert gradient.abs().max() > 1e-6
    with pytest.raises(InputError):
        SpatialHeads(SpatialConfig("content", image=(4, 6), dim=4, heads=2)).relative_weights()


def test_the_same_seed_gives_the_same_result():
    recipe = TeacherRecipe(channels=2, canvas=(5, 5), margin=1, batch_size=5, steps=15)
    one, other = train_student(recipe), train_student(recipe)
    assert one.losses == other.losses
    assert torch.equal(one.kernel, other.kernel)
    assert (
        train_student(TeacherRecipe(channels=2, canvas=(5, 5), margin=1, batch_size=5, steps=15, seed=1)).losses
        != one.losses
    )


@pytest.mark.parametrize("position", ["gaussian", "learned"])
def test_other_kinds_of_heads_learn_the_kernel_too(position):
    result = train_student(
        TeacherRecipe(position=position, channels=2, canvas=(5, 7), margin=2, batch_size=16, steps=150)
    )
    assert result.loss < 0.3 * result.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *long(1, 2)])
def test_nine_heads_find_a_convolution_of_three_by_three(seed):
    result = train_student(TeacherRecipe(seed=seed))
    assert result.loss <= 1e-4
    assert result.kernel_error <= 1e-2
    # Where the heads stand is not determined: soft heads between the pixels span the same filters. Each of the nine
    # taps is a sum of the nine heads' weights, to which eight heads would not suffice.
    weights = result.head_profile.weights.flatten(1)  # (head, relative position)
    rows, columns = result.head_profile.grid
    taps = torch.zeros(9, 2 * rows - 1, 2 * columns - 1, dtype=torch.float64)
    for tap, (row, column) in enumerate(torch.cartesian_prod(*[torch.arange(-1, 2)] * 2).tolist()):
        taps[tap, rows - 1 + row, columns - 1 + column] = 1
    assert len(weights) == 9
    assert missing(weights, taps.flatten(1)).max() <= 1e-2
    assert all(missing(weights[torch.arange(9) != head], taps.flatten(1)).max() > 0.1 for head in range(9))
    assert result.distances.median() > 0.1


def missing(weights: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
    """What no sum of the heads' weights makes of each tap: the norm of the rest, `(tap,)`."""
    mixture = torch.linalg.lstsq(weights.mT, taps.mT).solution
    return (weights.mT @ mixture - taps.mT).norm(dim=0)
