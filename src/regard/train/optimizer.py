"""The optimizer of a task, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from regard.errors import CheckpointError
from regard.train.task import Task


def make_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer on the task's parameter groups. One fused kernel updates all parameters of a group."""
    recipe, groups = task.recipe, task.parameter_groups(model)
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.momentum)
    betas = (recipe.beta1, recipe.beta2)
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=betas, eps=recipe.eps, fused=True)


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
        optimizer.state[parameters[name]][what] = _shard_like(parameters[name], value)


def prepare_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that the first step would make, to be filled from a checkpoint."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad or optimizer.state[parameter]:
                continue
            names = ("exp_avg", "exp_avg_sq") if "betas" in group else ("momentum_buffer",) * bool(group["momentum"])
            optimizer.state[parameter] = {name: torch.zeros_like(parameter) for name in names}
            if "betas" in group:
                optimizer.state[parameter]["step"] = torch.zeros((), dtype=torch.float32)


@torch.no_grad()
def fill_tensors(targets: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into tensors of the same names, of which this process may hold a part."""
    for name, target in targets.items():
        target.copy_(_shard_like(target, state[name]))


def _shard_like(target: Tensor, whole: Tensor) -> Tensor:
    """A tensor sharded as another one is; every process has the whole already, so nothing is sent. A copy."""
    mesh = getattr(target, "device_mesh", None)
    if mesh is None or not whole.ndim:
        return whole.clone()
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, mesh, target.placements, src_data_rank=None)  # type: ignore[attr-defined]
