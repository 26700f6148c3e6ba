"""Statistics of heads and teacher-student results, on cases worked out by hand."""

import dataclasses

import pytest
import torch

from regard.layers.profiles import HeadProfile
from regard.train import SpatialRecipe, TeacherRecipe, TeacherResult, prune_run, train
from regard.train.history import summarize_heads

NARROW = torch.log(torch.tensor([[0.1, 0.05, 0.05], [0.05, 0.6, 0.05], [0.05, 0.02, 0.03]]))


def test_a_heads_contours_and_its_share_of_the_kernel():
    scores = torch.stack((NARROW, torch.zeros(3, 3)))
    values = torch.stack((2.0 * torch.eye(2), 6.0 * torch.eye(2)))
    first, flat = summarize_heads(HeadProfile(scores, values=values))["heads"]
    # 0.6 is more than half; 0.9 is reached among the five of 0.05, and what is alike is within or without together.
    assert (first["pixels_50"], first["pixels_90"]) == (1, 7)
    assert (flat["pixels_50"], flat["pixels_90"]) == (9, 9)
    # |a| |W|: sqrt(0.36 + 0.01 + 5 * 0.0025 + 0.0004 + 0.0009) * 2 sqrt(2), and 1 / 3 * 6 sqrt(2).
    narrow, wide = 0.3838**0.5 * 2, 6 / 3
    assert first["share"] == pytest.approx(narrow / (narrow + wide), rel=1e-5)
    assert first["share"] + flat["share"] == pytest.approx(1)


def make_result(centre, weights, kernel):
    scores = torch.full((1, 5, 5), -torch.inf, dtype=torch.float64)
    scores[0, 2, 2] = 0  # one head, which looks at the pixel itself
    profile = HeadProfile(
        scores, centre=torch.tensor([centre], dtype=torch.float64), values=torch.full((1, 1, 1), weights).double()
    )
    student: object = None
    return TeacherResult(TeacherRecipe(channels=1), kernel, [], [(0, profile)], 0.0, 0.0, student)  # type: ignore[arg-type]


def test_a_results_kernel_error_has_a_sign_and_its_distances_are_to_the_nearest_pixel():
    kernel = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    kernel[0, 0, 1, 1] = 2.0
    assert make_result((0.0, 0.0), 2.0, kernel).kernel_error == 0
    assert make_result((0.0, 0.0), -2.0, kernel).kernel_error == pytest.approx(2.0)
    assert make_result((0.0, 0.0), 3.0, kernel).kernel_error == pytest.approx(0.5)
    assert make_result((0.7, -1.6), 2.0, kernel).distances.tolist() == pytest.approx([(0.3**2 + 0.4**2) ** 0.5])


def test_a_pruned_run_learns_on_for_a_third_of_the_epochs(few):
    recipe = SpatialRecipe(epochs=7, batch_size=97, layers=1, heads=2, dim=4, hidden_dim=4)
    run = train(recipe, data=few)
    tuned = prune_run(run, drop={"blocks.0.attention": [0]}).tuned
    assert tuned.recipe == dataclasses.replace(recipe, epochs=2, heads=1, learning_rate=recipe.learning_rate / 10)


def test_smoothing_and_clipping_reach_the_steps(few):
    recipe = SpatialRecipe(
        epochs=1, batch_size=97, layers=1, heads=2, dim=4, hidden_dim=4, optimizer="sgd", momentum=0.0
    )
    recipe = dataclasses.replace(
        recipe, learning_rate=1.0, warmup_steps=0.0, weight_decay=0.0, label_smoothing=0.0, max_grad_norm=None
    )
    plain = train(recipe, data=few)
    smooth = train(dataclasses.replace(recipe, label_smoothing=0.5), data=few)
    assert smooth.evaluations[1].loss != plain.evaluations[1].loss
    # One step of plain descent with rate 1 moves all numbers together by the norm of the gradient, or by the clip.
    begun = train(dataclasses.replace(recipe, learning_rate=0.0), data=few)
    for run, far in ((train(dataclasses.replace(recipe, max_grad_norm=1e-3), data=few), 1e-3), (plain, None)):
        before, after = begun.model.state_dict(), run.model.state_dict()
        moved = sum(float((after[name] - before[name]).double().square().sum()) for name in before) ** 0.5
        assert moved == pytest.approx(far, rel=1e-2) if far else moved > 1e-2
