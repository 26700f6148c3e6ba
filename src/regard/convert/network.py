"""Conversion of all convolutions of a network to attention, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from regard.convert.from_conv import CONVS, conv_to_attention
from regard.convert.to_conv import attention_to_conv
from regard.errors import ConfigError
from regard.layers.spatial import SpatialAttention
from regard.layers.tables import TableAttention


def convert_network(model: nn.Module, **options: Any) -> nn.Module:
    """A copy of a network with every `Conv1d` and `Conv2d` replaced by an equivalent attention layer.

    `options` are those of `conv_to_attention`. Other modules stay as they are, transposed and three-dimensional
    convolutions included; a convolution that is shared becomes one shared layer. Hooks of a convolution are not copied,
    and code that accesses `self.conv.weight` directly fails.

        >>> from torch import nn
        >>> from regard.convert import convert_network, restore_network
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 35, 10))
        >>> attentive = convert_network(net)
        >>> image = torch.randn(2, 1, 5, 7)
        >>> torch.testing.assert_close(attentive(image), net(image))
        >>> [type(layer).__name__ for layer in attentive]
        ['SpatialAttention', 'ReLU', 'Flatten', 'Linear']
        >>> restore_network(attentive)[0]
        Conv2d(1, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))
    """
    return _replace_modules(model, CONVS, lambda conv: conv_to_attention(conv, **options))


def restore_network(model: nn.Module) -> nn.Module:
    """A copy of a network with every `SpatialAttention` and `TableAttention` converted back to a convolution."""

    def conv(layer: nn.Module) -> nn.Module:
        if isinstance(layer, SpatialAttention) and not layer.exact:
            raise ConfigError(
                "A soft layer is no convolution near the edges.",
                asked=f"restore_network with {layer}",
                because="the restored network would compute something else",
                instead="layer.with_alpha(math.inf) where steps are whole numbers, or attention_to_conv(layer, images)",
            )
        made = attention_to_conv(layer).conv
        learned = any(parameter.requires_grad for name, parameter in layer.named_parameters() if name != "bias")
        made.weight.requires_grad_(learned)
        if made.bias is not None and layer.bias is not None:
            made.bias.requires_grad_(bool(layer.bias.requires_grad))
        return made

    return _replace_modules(model, (SpatialAttention, TableAttention), conv)


def _replace_modules(
    model: nn.Module, kinds: tuple[type[nn.Module], ...], make: Callable[[Any], nn.Module]
) -> nn.Module:
    """A copy of a module tree with modules of some types replaced; shared modules stay shared."""
    model = copy.deepcopy(model)
    made: dict[nn.Module, nn.Module] = {}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if isinstance(child, kinds):
                if child not in made:
                    made[child] = make(child)
                module._modules[name] = made[child]
    return make(model) if isinstance(model, kinds) else model
