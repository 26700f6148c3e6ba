"""Convolutions and images for the tests of their conversion."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.layers.lattice import EDGES

DOUBLE = torch.float64


def image_of(*shape: int, dtype: torch.dtype = DOUBLE, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


def conv_of(kind, *arguments, seed: int = 2, dtype: torch.dtype = DOUBLE, **options):
    """A convolution with weights of size 1, the same ones in every format."""
    conv = kind(*arguments, **options)
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=made))
    return conv.to(dtype)


@st.composite
def convolutions(draw):
    """A convolution and an image that it accepts."""
    axes = draw(st.integers(1, 2))

    def each(least, most):
        return tuple(draw(st.lists(st.integers(least, most), min_size=axes, max_size=axes)))

    kernel, stride, dilation = each(1, 4), each(1, 3), each(1, 3)
    groups = draw(st.sampled_from([1, 2, 3]))
    same = set(stride) == {1} and draw(st.booleans())
    reach = [spread * (taps - 1) for taps, spread in zip(kernel, dilation, strict=True)]
    size = tuple(draw(st.integers(max(5, far + 1), 13)) for far in reach)
    conv = conv_of(
        nn.Conv1d if axes == 1 else nn.Conv2d,
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 3)),
        kernel,
        stride=stride,
        padding="same" if same else each(0, 4),
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(EDGES)),
        seed=draw(st.integers(0, 99)),
    )
    return conv, image_of(2, conv.in_channels, *size)
