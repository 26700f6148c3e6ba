"""The optimizer of a recipe: parameter groups, learning rate schedule, and state as named tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from regard.errors import CheckpointError
from regard.train.recipe import Recipe, SpatialRecipe


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer, with weight decay on matrices only: not on norms, biases or head positions."""
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim > 1 and ".position" not in f".{name}" and not name.endswith("class_token")
        (decayed if is_matrix else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if isinstance(recipe, SpatialRecipe) and recipe.position_rate != 1:
        positions = [parameter for name, parameter in model.named_parameters() if ".position" in f".{name}"]
        groups[1]["params"] = [
            parameter for parameter in others if all(parameter is not position for position in positions)
        ]
        groups.append({"params": positions, "weight_decay": 0.0, "share": recipe.position_rate})
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.rate, momentum=recipe.momentum)
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.99))


def learning_rate_at(recipe: Recipe, step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0: linear warmup, then cosine decay.

        rate (step + 1) / w                                     for step < w, w = warmup * steps
        rate (1 + cos(pi (step - w) / (steps - w))) / 2         after that

    >>> from regard.train import SpatialRecipe
    >>> recipe = SpatialRecipe(rate=1.0, warmup=0.25)
    >>> [round(learning_rate_at(recipe, step, 8), 3) for step in range(8)]
    [0.5, 1.0, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067]
    """
    warm = math.ceil(recipe.warmup * steps)
    if step < warm:
        return recipe.rate * (step + 1) / warm
    return recipe.rate * (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer state of every parameter, as `parameter/name`."""
    return {
        f"{name}/{what}": value
        for name, parameter in model.named_parameters()
        for what, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the optimizer state that `optimizer_state` returned."""
    parameters = dict(model.named_parameters())
    for key, value in state.items():
        name, _, what = key.rpartition("/")
        if name not in parameters:
            raise CheckpointError(
                f"The optimizer state belongs to another model: there is no parameter {name!r}.",
                asked=key,
                because="the state of an optimizer is saved by parameter",
                instead="the checkpoint of this run",
            )
        optimizer.state[parameters[name]][what] = value.clone()
