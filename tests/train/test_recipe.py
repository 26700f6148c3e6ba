"""Recipes: checked when they are made, and the same after a file."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
from agreement import refused

from regard.errors import ConfigError
from regard.models import ViT
from regard.models.spatial import POSITIONS, SpatialTransformer
from regard.train import SpatialRecipe, TeacherRecipe, ViTRecipe, read_recipe
from regard.train.optimizer import make_optimizer
from regard.train.schedule import learning_rate_at


@pytest.mark.parametrize("recipe", [SpatialRecipe(), SpatialRecipe.paper(position="content"), ViTRecipe(seed=3)])
def test_a_recipe_comes_back_from_a_file(recipe):
    assert read_recipe(json.loads(json.dumps(recipe.to_json()))) == recipe
    assert type(recipe).from_json(recipe.to_json()) == recipe


def test_heads_may_differ_from_layer_to_layer():
    recipe = SpatialRecipe(layers=2, heads=(4, 7))
    assert read_recipe(json.loads(json.dumps(recipe.to_json()))) == recipe
    with refused(ConfigError, "heads=(4, 7)"):
        SpatialRecipe(layers=3, heads=(4, 7))


def test_what_makes_no_sense_is_refused_before_anything_begins():
    for wrong in (
        {"epochs": 0},
        {"batch_size": 0},
        {"learning_rate": -1.0},
        {"learning_rate": math.nan},
        {"warmup_steps": -1.0},
        {"label_smoothing": 1.0},
        {"momentum": -0.1},
        {"shift": -1},
        {"turn": math.inf},
        {"max_grad_norm": 0.0},
        {"optimizer": "lion"},
        {"heads": 0},
        {"dim": 64.5},
    ):
        for kind in (SpatialRecipe, ViTRecipe):
            with refused(ConfigError):
                kind(**wrong)
    with refused(ConfigError, "content"):
        SpatialRecipe(position="content", dim=7)
    with refused(ConfigError, "known are"):
        SpatialRecipe(position="nowhere")
    with refused(ConfigError, "not a ViTRecipe"):
        ViTRecipe.from_json(SpatialRecipe().to_json())
    with refused(ConfigError, "the kinds are"):
        read_recipe({"kind": "lstm"})
    with refused(ConfigError, "has no field 'epoch'"):
        read_recipe({"kind": "vit", "epoch": 3})
    for wrong in ({"kernel": 4}, {"position": "content"}, {"canvas": (0, 3)}, {"margin": -1}, {"learning_rate": 0.0}):
        with refused(ConfigError, "no convolution to learn"):
            TeacherRecipe(**wrong)


@pytest.mark.parametrize("position", POSITIONS)
def test_the_papers_recipe_builds_the_papers_model(position):
    recipe = SpatialRecipe.paper(position=position)
    with torch.device("meta"):
        model = SpatialTransformer(recipe.config((32, 32), 3, 10))
    counts = {"quadratic": 12_086_844, "gaussian": 12_087_006, "learned": 12_278_682, "content": 29_484_282}
    assert sum(parameter.numel() for parameter in model.parameters()) == counts[position]
    assert (recipe.optimizer, recipe.learning_rate, recipe.momentum, recipe.weight_decay) == ("sgd", 0.1, 0.9, 1e-4)
    assert (recipe.batch_size, recipe.epochs, recipe.warmup_steps, recipe.shift, recipe.flip) == (
        100,
        300,
        0.05,
        4,
        True,
    )


def test_the_rate_rises_on_a_line_and_falls_on_a_cosine():
    recipe = SpatialRecipe(learning_rate=0.1, warmup_steps=0.05)
    rates = [learning_rate_at(recipe, step, 400) for step in range(400)]
    assert rates[:20] == pytest.approx([0.1 * (step + 1) / 20 for step in range(20)])
    assert max(rates) == rates[19] == rates[20] == 0.1
    assert rates[20 + 190] == pytest.approx(0.05)
    assert all(early > late for early, late in itertools.pairwise(rates[20:]))
    assert 0 < rates[-1] < 1e-5
    flat = dataclasses.replace(recipe, warmup_steps=0.0)
    assert learning_rate_at(flat, 0, 400) == 0.1


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weight_decays_on_matrices_and_not_on_positions(optimizer, few):
    recipe = SpatialRecipe(optimizer=optimizer, layers=1, dim=8)
    task = recipe.make_task(few)
    for position in POSITIONS:
        model = dataclasses.replace(recipe, position=position).model(few)
        decays, stays = (group["params"] for group in make_optimizer(task, model).param_groups)
        names = {parameter: name for name, parameter in model.named_parameters()}
        assert len(decays) + len(stays) == len(names)
        assert {names[p].rpartition(".")[2] for p in decays} == {"weight"}
        assert not any("position" in names[p] or "norm" in names[p] for p in decays)
        assert all(p.ndim > 1 for p in decays)
    vit = ViT(ViTRecipe(optimizer=optimizer).config((8, 8), 1, 10))
    decays, stays = (group["params"] for group in make_optimizer(task, vit).param_groups)
    names = {parameter: name for name, parameter in vit.named_parameters()}
    assert {"class_token"} < {names[p] for p in stays}
    assert any("positions" in names[p] for p in stays)
