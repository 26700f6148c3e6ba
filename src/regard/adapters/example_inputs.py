"""Example inputs of a module: which tensors it takes, and what each of their axes is.

Sizes that vary are symbols: `B` batch, `N` tokens, `M` keys, `T` tokens of the other text, `R` and `W` rows and columns
of an image. `infer_inputs` finds the inputs from a module's class, its configuration, or its first layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

STRIDE = 32  # pixels by which image sizes are varied: what most networks for images are built for


@dataclass(frozen=True, eq=False)
class InputSpec:
    """A tensor to be made.

    Attributes:
        axes: its sizes, some of them symbols.
        dtype: None is the floating-point dtype of the module.
        requires_grad: whether a gradient is computed: of activations inside a network, not of images and ids.
    """

    axes: tuple[int | str, ...]
    dtype: torch.dtype | None = None
    requires_grad: bool = False

    def make(self, sizes: Mapping[str, int], dtype: torch.dtype) -> Tensor:
        """Zeros of this shape."""
        shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.axes)
        made = torch.zeros(shape, dtype=self.dtype or dtype)
        return made.requires_grad_() if self.requires_grad and made.is_floating_point() else made


@dataclass
class ExampleInputs:
    """Arguments of a call with `InputSpec` in place of tensors, and the symbols in them.

    Attributes:
        sizes: a number for every symbol.
        known: symbols whose number the caller gave, or the module has.
        steps: by how much a symbol is varied, where not by one.
        limits: the largest number of a symbol that the module is built for.
        numbers: symbols whose number is an argument itself, such as the grid that positions are resized to.
        alternative: the same with symbols on more axes, if those here do not go together.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    steps: dict[str, int] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    numbers: set[str] = field(default_factory=set)
    alternative: ExampleInputs | None = None

    def make(self, sizes: Mapping[str, int], dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments at these sizes; one `InputSpec` in two places is one tensor."""
        tensors: dict[int, Tensor] = {}

        def make(value: Any) -> Any:
            if isinstance(value, InputSpec):
                if id(value) not in tensors:
                    tensors[id(value)] = value.make(sizes, dtype)
                return tensors[id(value)]
            if isinstance(value, Mapping):
                return {key: make(each) for key, each in value.items()}
            if isinstance(value, list | tuple):
                return type(value)(make(each) for each in value)
            return value

        return tuple(make(value) for value in self.args), {key: make(value) for key, value in self.kwargs.items()}

    @property
    def symbols(self) -> list[str]:
        """The symbols that occur."""
        return [name for name in self.sizes if any(name in spec.axes for spec in self.specs())]

    def specs(self) -> list[InputSpec]:
        """Every tensor among the arguments."""
        found: list[InputSpec] = []

        def collect(value: Any) -> None:
            if isinstance(value, InputSpec):
                found.append(value)
            elif isinstance(value, Mapping | list | tuple):
                for each in value.values() if isinstance(value, Mapping) else value:
                    collect(each)

        collect(self.args)
        collect(self.kwargs)
        return found

    # What the adapters of the libraries fill in

    def limit(self, most: Any, symbol: str = "N") -> None:
        """Note the number of positions there are; a length that the caller did not give becomes no longer than that."""
        if isinstance(most, int) and most > 0:
            self.limits[symbol] = most
            if symbol not in self.known:
                self.sizes[symbol] = min(self.sizes[symbol], most)

    def image(self, size: Any, channels: int, channels_last: bool = False) -> InputSpec:
        """An image of the size that the caller gave, or of the size that the module is for."""
        rows, columns = (size, size) if isinstance(size, int) else tuple(size)[:2]
        for symbol, number in (("R", rows), ("W", columns)):
            if symbol not in self.known:
                self.sizes[symbol] = int(number)
            self.known.add(symbol)
            self.steps[symbol] = STRIDE
        axes = ("B", "R", "W", channels) if channels_last else ("B", channels, "R", "W")
        return InputSpec(axes, requires_grad=channels_last)


def token_ids(symbol: str = "N") -> InputSpec:
    return InputSpec(("B", symbol), torch.int64)


def activations(channels: int, batch_first: bool = True, symbol: str = "N") -> InputSpec:
    """Rows of `channels` numbers for each token."""
    return InputSpec(("B", symbol, channels) if batch_first else (symbol, "B", channels), requires_grad=True)


def infer_inputs(module: nn.Module, sizes: Mapping[str, int], known: set[str]) -> ExampleInputs | None:
    """What a module takes, or None; `sizes` has a number for every symbol, `known` those that the caller gave."""
    from regard.adapters import huggingface, regard_layers, regard_models, timm_torchvision, torch_nn

    for library in (huggingface, regard_models, timm_torchvision, torch_nn, regard_layers):
        inputs = ExampleInputs(sizes=dict(sizes), known=set(known))
        if library.fill_inputs(module, inputs):
            return inputs
    inputs = ExampleInputs(sizes=dict(sizes), known=set(known))
    return inputs if _fill_by_first_layer(module, inputs) else None


def _fill_by_first_layer(module: nn.Module, inputs: ExampleInputs) -> bool:
    """A module that takes one input is given what its first layer takes."""
    from regard.adapters import regard_layers, torch_nn

    required = [
        parameter
        for parameter in inspect.signature(module.forward).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(required) > 1:
        return False
    children = module if isinstance(module, nn.Sequential) else ()
    first = next((child for child in children if any(True for _ in child.parameters())), None)
    if first is not None and (torch_nn.fill_inputs(first, inputs) or regard_layers.fill_inputs(first, inputs)):
        return True
    spec = next((spec for layer in module.modules() if (spec := _layer_input(layer, inputs)) is not None), None)
    inputs.args = (spec,)
    return spec is not None


def _layer_input(layer: nn.Module, inputs: ExampleInputs) -> InputSpec | None:
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return token_ids()
    if isinstance(layer, nn.Linear):
        return activations(layer.in_features)
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return InputSpec(("B", "N", *layer.normalized_shape), requires_grad=True)
    if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
        return inputs.image(224, layer.in_channels)
    if isinstance(layer, nn.Conv1d | nn.ConvTranspose1d):
        return InputSpec(("B", layer.in_channels, "N"), requires_grad=True)
    if isinstance(layer, nn.BatchNorm2d):
        return inputs.image(224, layer.num_features)
    if isinstance(layer, nn.BatchNorm1d):
        return InputSpec(("B", layer.num_features, "N"), requires_grad=True)
    if isinstance(layer, nn.GroupNorm):
        return inputs.image(224, layer.num_channels)
    return None
