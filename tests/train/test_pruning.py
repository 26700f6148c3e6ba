"""Dropping heads: those that are planted are found, the others stay, and nothing else changes."""

import dataclasses

import pytest
import torch
from agreement import refused
from plain import slow_but

from regard.cost_model import cost
from regard.errors import InputError
from regard.models.spatial import POSITIONS, SpatialConfig, SpatialTransformer
from regard.train import SpatialRecipe, ViTRecipe, degenerate_heads, prune, prune_run, train

LAYERS = ["blocks.0.attention", "blocks.1.attention"]


def make(position, dtype=torch.float64, heads=5):
    torch.manual_seed(11)
    config = SpatialConfig(
        position, (6, 10), channels=2, patch=2, dim=8, layers=2, heads=heads, hidden_dim=7, classes=3
    )
    return SpatialTransformer(config).to(dtype).eval()


@torch.no_grad()
def plant(model, layer, head):
    """A head that looks everywhere alike."""
    position = model.blocks[layer].attention.position
    if model.config.position == "quadratic":
        position.spread[head] = 1e-4
    elif model.config.position == "gaussian":
        position.root[head] = 1e-4 * torch.eye(2)
    else:
        position.row_head[head] = 0.0
        position.column_head[head] = 1e-9


@pytest.mark.parametrize("position", ["quadratic", "gaussian", "learned"])
def test_planted_heads_are_found_and_dropped_and_others_are_kept(position):
    model = make(position)
    assert degenerate_heads(model) == {}
    for layer, head in ((0, 1), (0, 4), (1, 0)):
        plant(model, layer, head)
    found = degenerate_heads(model)
    assert found == {LAYERS[0]: (1, 4), LAYERS[1]: (0,)}
    pruned = prune(model, found)
    assert pruned.config.heads == (3, 4)
    assert degenerate_heads(pruned) == {}
    for layer, kept in enumerate(([0, 2, 3], [1, 2, 3, 4])):
        before, after = (one.blocks[layer].attention.head_profile() for one in (model, pruned))
        assert torch.equal(after.scores, before.scores[kept])
        assert torch.equal(after.values, before.values[kept])


def test_a_head_that_is_flat_along_one_direction_is_found():
    model = make("gaussian")
    with torch.no_grad():
        model.blocks[1].attention.position.root[2] = torch.tensor([[1.0, 0.0], [0.0, 0.03]])
    assert degenerate_heads(model) == {LAYERS[1]: (2,)}
    assert degenerate_heads(model, condition=1200) == {}


@pytest.mark.parametrize("position", ["quadratic", "gaussian", "learned"])
def test_a_layer_of_nothing_else_keeps_its_narrowest_head(position):
    model = make(position, heads=3)
    for head in range(3):
        plant(model, 1, head)
    if position == "quadratic":
        with torch.no_grad():
            model.blocks[1].attention.position.spread[1] = 2e-4
    assert len(degenerate_heads(model)[LAYERS[1]]) == 2
    if position == "quadratic":
        assert degenerate_heads(model) == {LAYERS[1]: (0, 2)}
    assert prune(model, degenerate_heads(model)).config.heads == (3, 1)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_dropping_heads_without_influence_leaves_the_logits(position, dtype):
    model, image = (
        make(position, dtype),
        torch.randn(3, 2, 6, 10, dtype=dtype, generator=torch.Generator().manual_seed(1)),
    )
    drop = {LAYERS[0]: [3], LAYERS[1]: [0, 2]}
    other = prune(model, drop)
    # A head with values that are not zero cannot go unnoticed.
    assert not torch.allclose(other(image), model(image), rtol=1e-3)
    with torch.no_grad():
        for layer, name in enumerate(LAYERS):
            model.blocks[layer].attention.value.weight.unflatten(1, (5, 8))[:, drop[name]] = 0.0
    pruned = prune(model, drop)
    # Sums of 8 heads * channels more or fewer zeros are added in another order.
    tolerance = 200 * torch.finfo(dtype).eps
    inputs = [image.clone().requires_grad_() for _ in range(2)]
    outputs = [one(x) for one, x in zip((model, pruned), inputs, strict=True)]
    assert torch.allclose(*outputs, rtol=tolerance, atol=tolerance)
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y, x in zip(outputs, inputs, strict=True)]
    assert torch.allclose(*gradients, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("position", slow_but(("quadratic",), POSITIONS))
def test_a_pruned_model_is_saved_read_and_counted_like_any_other(position, tmp_path):
    pruned = prune(make(position, torch.float32), {LAYERS[1]: [0, 3, 4]})
    pruned.save_pretrained(tmp_path)
    again = SpatialTransformer.from_pretrained(tmp_path)
    assert again.config == pruned.config
    assert again.config.heads == (5, 2)
    image = torch.randn(2, 2, 6, 10)
    assert torch.equal(again(image), pruned(image))
    assert cost(pruned).parameters == sum(parameter.numel() for parameter in pruned.parameters())


def test_pruning_to_equal_layers_and_pruning_nothing():
    model = make("quadratic")
    assert prune(model, {name: [0] for name in LAYERS}).config.heads == 4
    same = prune(model, {})
    assert same.config == model.config
    assert all(torch.equal(value, same.state_dict()[name]) for name, value in model.state_dict().items())
    assert same.blocks[0].dense.weight.data_ptr() != model.blocks[0].dense.weight.data_ptr()


def test_heads_that_are_not_there_and_all_heads_of_a_layer_are_refused():
    model = make("quadratic")
    for wrong in ([5], [-1], [0, 1, 2, 3, 4]):
        with refused(InputError, "at least one"):
            prune(model, {LAYERS[0]: wrong})
    with refused(InputError, "blocks.2.attention"):
        prune(model, {"blocks.2.attention": [0]})


def test_a_run_is_pruned_measured_and_trained_on(few, tmp_path):
    recipe = SpatialRecipe(epochs=3, batch_size=24, layers=2, heads=4, dim=8, hidden_dim=8)
    run = train(recipe, data=few)
    with torch.no_grad():
        run.model.blocks[1].attention.position.spread[2] = 0.0
    pruned = prune_run(run, tmp_path)
    assert pruned.dropped == {LAYERS[1]: (2,)}
    assert pruned.before == run.accuracy
    assert pruned.tuned.evaluations[0].accuracy == pruned.after  # it begins with the pruned model
    assert pruned.tuned.recipe == dataclasses.replace(
        recipe, heads=(4, 3), epochs=1, learning_rate=recipe.learning_rate / 10
    )
    assert pruned.tuned.model.config.heads == (4, 3)
    again = prune_run(run, tmp_path)  # which goes on from what is there
    assert again.tuned.accuracy == pruned.tuned.accuracy
    vit = train(ViTRecipe(epochs=1, batch_size=48, layers=1, dim=4, heads=2), data=few)
    with refused(InputError, "ViT"):
        prune_run(vit)
