"""What optimizers keep for every parameter, and optimizers for parameters without numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.errors import CostError

Optimizer = str | Callable[..., Any]


class SteppedOptimizer(Protocol):
    """What is needed of an optimizer."""

    def step(self) -> Any: ...


class Factored:
    """Adafactor as far as memory goes: torch's own asks tensors for numbers, and these have none.

        row (..., n, 1) and column (..., 1, m) for a matrix, all for a vector;  update = row column, as large as itself

    Source: Shazeer and Stern, Adafactor (2018), algorithm 4, as in torch.optim.Adafactor.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._state: dict[nn.Parameter, tuple[Tensor, ...]] = {}

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self._parameters:
            if parameter not in self._state:
                shapes = _list_factor_shapes(parameter.shape)
                made = [parameter.new_zeros(shape) for shape in shapes]
                self._state[parameter] = (torch.zeros((), dtype=torch.float32), *made)
            _, *factors = self._state[parameter]
            update = factors[0] @ factors[1] if len(factors) > 1 else factors[0].clone()
            parameter.add_(update)


def _list_factor_shapes(shape: Sequence[int]) -> list[tuple[int, ...]]:
    if len(shape) < 2:
        return [tuple(shape)]
    return [(*shape[:-1], 1), (*shape[:-2], 1, shape[-1])]


# Named ones, with torch's own defaults.
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], SteppedOptimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "adafactor": Factored,
}

# Elements of state for each parameter element, in its own dtype; adafactor's depend on the shapes.
MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1}
# A counter of steps for every tensor, in float32, where the state has one.
COUNTER = {"adamw": 4, "adam": 4, "sgd": 0, "momentum": 0, "adafactor": 4}


def optimizer_for(optimizer: Optimizer, parameters: list[nn.Parameter]) -> SteppedOptimizer:
    """An optimizer by its name, or made by a function from parameters."""
    if callable(optimizer):
        return optimizer(parameters)
    check_optimizer(optimizer)
    return OPTIMIZERS[optimizer](parameters)


def check_optimizer(optimizer: Optimizer) -> None:
    if not callable(optimizer) and optimizer not in OPTIMIZERS:
        raise CostError(
            f"There is no optimizer {optimizer!r}.",
            asked=f"optimizer={optimizer!r}",
            because=f"known are {', '.join(OPTIMIZERS)}",
            instead='optimizer="adamw", or a function from parameters to an optimizer, such as torch.optim.RMSprop',
        )


def state_bytes(optimizer: str, parameters: Iterable[Tensor], item: int | None = None) -> int:
    """Bytes of the state of a named optimizer for these parameters; `item` are those of a number, if not its own."""
    total = 0
    for parameter in parameters:
        numbers = sum(math.prod(shape) for shape in _list_factor_shapes(parameter.shape))
        if optimizer in MOMENTS:
            numbers = MOMENTS[optimizer] * parameter.numel()
        total += COUNTER[optimizer] + numbers * (parameter.element_size() if item is None else item)
    return total
