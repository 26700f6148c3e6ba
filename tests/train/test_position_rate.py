"""Position parameters may have a higher learning rate than the others."""

from __future__ import annotations

import pytest
import torch

from regard.errors import ConfigError
from regard.train import SpatialRecipe, train
from regard.train.optimizer import make_optimizer

SMALL = {
    "epochs": 1,
    "layers": 1,
    "dim": 8,
    "hidden_dim": 8,
    "heads": 3,
    "optimizer": "sgd",
    "max_grad_norm": None,
    "warmup_steps": 0.0,
}


def test_only_position_parameters_have_the_higher_rate(few):
    recipe = SpatialRecipe(**SMALL, position_rate=7.0)
    model = recipe.model(few)
    groups = make_optimizer(recipe.make_task(few), model).param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    fast = {names[parameter] for group in groups if group.get("share", 1.0) == 7.0 for parameter in group["params"]}
    assert fast == {name for name in names.values() if ".position." in name}
    assert sum(len(group["params"]) for group in groups) == len(names)


def test_heads_with_a_rate_of_zero_stay(few):
    still, moving = (train(SpatialRecipe(**SMALL, position_rate=rate), data=few, progress=False) for rate in (0.0, 5.0))
    for run, moves in ((still, False), (moving, True)):
        before, after = (
            epoch.head_profiles["blocks.0.attention"].centre for epoch in (run.evaluations[0], run.evaluations[-1])
        )
        assert torch.equal(before, after) != moves


def test_a_negative_rate_is_refused():
    with pytest.raises(ConfigError, match="position_rate"):
        SpatialRecipe(position_rate=-1.0)
