"""Convert a convolution to attention: one head per tap, or one more than the rank of the kernel."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from regard.convert.leakage import steepness
from regard.convert.low_rank import low_rank_heads
from regard.errors import ConfigError
from regard.layers.lattice import EDGES, Edges, Lattice
from regard.layers.spatial import SpatialAttention
from regard.layers.tables import TableAttention

CONVS = (nn.Conv1d, nn.Conv2d)
Layer = TypeVar("Layer", SpatialAttention, TableAttention)


def conv_to_attention(
    conv: nn.Conv1d | nn.Conv2d,
    *,
    exact: bool = True,
    tolerance: float = 1e-6,
    heads: Literal["taps", "minimal"] = "taps",
    head_dim: int | None = None,
) -> SpatialAttention | TableAttention:
    r"""Convert a convolution to an equivalent self-attention layer: same input, same output, any image size.

        conv[o] = bias + sum_t W_t image[stride o + dilation t - padding]
        head t:  step = dilation t - padding,   W^(t) = W_t,   queries at stride o

    `t` runs over the taps of the kernel, `W_t` is the matrix (out, in) of one tap; a step is key minus query, so the
    kernel is not flipped. Every kernel size, stride, dilation, padding, padding mode and number of groups is
    supported. Taps that are zero get no head; on the meta device every tap gets one.

    Source: Cordonnier, Loukas and Jaggi, On the Relationship between Self-Attention and Convolutional Layers (ICLR
    2020), theorem 1. Where we differ: the paper converts `K x K` kernels of odd `K` with stride 1, without the borders.

    Args:
        conv: a `Conv1d` or `Conv2d`; its parameters are copied.
        exact: hard heads, which copy one pixel. `False` gives soft heads, whose offsets can be trained: `alpha` is the
            smallest integer whose leak is at most `tolerance` (`steepness`).
        tolerance: the share of its weight that a soft head may put on other pixels.
        heads: `"taps"` is one head per nonzero tap. `"minimal"` is `r + 1` heads with free tables, `r` the rank of the
            kernel as a matrix of taps times channel pairs, where that is fewer (`TableAttention`).
        head_dim: channels of a head's values; `W_t = W^o W^v` is then stored as two matrices, which is exact if no tap
            has a larger rank. `None` stores one matrix.

        >>> conv = torch.nn.Conv2d(3, 5, kernel_size=3, stride=2, padding=1)
        >>> layer = conv_to_attention(conv)
        >>> image = torch.randn(2, 3, 11, 13)
        >>> torch.testing.assert_close(layer(image), conv(image))
        >>> layer.heads, layer.steps[0]
        (9, (-1, -1))
    """
    kernel, geometry = read_conv(conv)
    if heads not in ("taps", "minimal"):
        raise ConfigError(
            "There is no such number of heads.",
            asked=f"heads={heads!r}",
            because="heads follow from the kernel: one for each tap, or the fewest known to be enough",
            instead='heads="taps" or heads="minimal"',
        )
    narrow = head_dim is not None and head_dim * conv.groups < min(conv.in_channels, conv.out_channels)
    if kernel.is_meta and (heads == "minimal" or narrow):
        raise ConfigError(
            "A kernel without numbers has no rank.",
            asked=f"heads={heads!r}, head_dim={head_dim} of a convolution on the meta device",
            because="how few heads or channels are enough is read from the numbers of the kernel",
            instead="conv_to_attention(conv) with a head for each tap, or a convolution with numbers",
        )
    if heads == "minimal":
        if not exact or head_dim is not None:
            raise ConfigError(
                "Few heads are exact and keep one matrix each.",
                asked=f"heads='minimal', exact={exact}, head_dim={head_dim}",
                because="their tables are weights already, and have no width; mixed taps have no small rank",
                instead="conv_to_attention(conv, heads='minimal')",
            )
        found = low_rank_heads(kernel)
        if found is not None:
            return _make_table_layer(conv, geometry, *found)
    return _make_tap_layer(conv, kernel, geometry, None if exact else tolerance, head_dim)


@dataclass(frozen=True)
class Geometry:
    """The offsets of the taps of a convolution, and the lattice of its outputs: stride, size and padding mode."""

    steps: list[tuple[int, ...]]
    lattice: Lattice


def read_conv(conv: nn.Module) -> tuple[Tensor, Geometry]:
    """The kernel `(out, in / groups, tap)` and the geometry of a convolution; raises if it is unsupported."""
    because = _explain_unsupported(conv)
    if because:
        raise ConfigError(
            f"{type(conv).__name__} cannot be converted to attention.",
            asked=f"conv_to_attention({type(conv).__name__})",
            because=because,
            instead="torch.nn.Conv1d or torch.nn.Conv2d with real weights;\n"
            "regard.convert.convert_network(model) for all of them inside a model",
        )
    assert isinstance(conv, CONVS)
    size, dilation, stride = (tuple(map(int, each)) for each in (conv.kernel_size, conv.dilation, conv.stride))
    before, after = find_paddings(conv)
    lines = [
        [spread * tap - pad for tap in range(taps)] for taps, spread, pad in zip(size, dilation, before, strict=True)
    ]
    trim = tuple(
        spread * (taps - 1) - first - last
        for taps, spread, first, last in zip(size, dilation, before, after, strict=True)
    )
    # A convolution without padding needs no null key.
    edges: Edges = conv.padding_mode if any(before) or any(after) else "replicate"  # pyright: ignore[reportAssignmentType]
    return conv.weight.detach().flatten(2), Geometry(list(itertools.product(*lines)), Lattice(stride, trim, edges))


def find_paddings(conv: nn.Conv1d | nn.Conv2d) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The padding before and after each axis; `"same"` may pad one more after."""
    if conv.padding == "valid":
        return (0,) * len(conv.kernel_size), (0,) * len(conv.kernel_size)
    if conv.padding == "same":
        total = [spread * (taps - 1) for taps, spread in zip(conv.kernel_size, conv.dilation, strict=True)]
        return tuple(pad // 2 for pad in total), tuple(pad - pad // 2 for pad in total)
    padding = tuple(int(pad) for pad in conv.padding)
    return padding, padding


def _explain_unsupported(conv: nn.Module) -> str:
    if not isinstance(conv, CONVS):
        return f"a {type(conv).__name__} is neither a Conv1d nor a Conv2d of torch.nn"
    if isinstance(conv.weight, nn.parameter.UninitializedParameter):
        return "it is lazy: its channels are set by the first input"
    plain = nn.Conv1d if isinstance(conv, nn.Conv1d) else nn.Conv2d
    if type(conv).forward is not plain.forward or type(conv)._conv_forward is not plain._conv_forward:
        return f"{type(conv).__name__} computes something of its own (quantised weights, for instance)"
    if not conv.weight.dtype.is_floating_point:
        return f"weights of attention are real numbers, and these are {conv.weight.dtype}"
    if conv.padding_mode not in EDGES:
        return f"padding mode {conv.padding_mode!r} is unknown"
    return ""


@torch.no_grad()
def _make_tap_layer(
    conv: nn.Conv1d | nn.Conv2d, kernel: Tensor, geometry: Geometry, tolerance: float | None, head_dim: int | None
) -> SpatialAttention:
    # At least one head, even if all taps are zero.
    kept = list(range(kernel.shape[2])) if kernel.is_meta else kernel.abs().amax((0, 1)).nonzero()[:, 0].tolist() or [0]
    alpha, dims = math.inf, len(geometry.steps[0])
    if tolerance is not None:
        alpha = float(math.ceil(steepness(tolerance, dims, null=geometry.lattice.edges == "zeros")))
    layer = SpatialAttention(
        conv.in_channels,
        conv.out_channels,
        [geometry.steps[tap] for tap in kept],
        alpha=alpha,
        lattice=geometry.lattice,
        groups=conv.groups,
        head_dim=head_dim,
        bias=conv.bias is not None,
        dtype=kernel.dtype,
        device=kernel.device,
    )
    if head_dim is None:
        layer.weight.copy_(kernel[:, :, kept])
    else:
        value, output = factor_taps(kernel[:, :, kept], conv.groups, head_dim)
        layer.value.copy_(value)
        layer.output.copy_(output)
    return _copy_settings(layer, conv)


def factor_taps(taps: Tensor, groups: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Values `(group, head, head_dim, in)` and outputs `(out, head_dim, head)` whose product is every tap.

    If `head_dim` is at least the number of input channels, the values are the pixel and the output matrix is the tap;
    if it is at least the number of output channels, the values are the tap. Otherwise the tap's singular vectors, if
    its rank is small enough.
    """
    tap = taps.unflatten(0, (groups, -1)).permute(0, 3, 1, 2)  # (group, head, out, in)
    outs, ins = tap.shape[2:]
    if head_dim >= min(outs, ins):
        value, output = tap.new_zeros(*tap.shape[:2], head_dim, ins), tap.new_zeros(*tap.shape[:2], outs, head_dim)
        if head_dim >= ins:
            value[..., :ins, :] = torch.eye(ins).to(tap)
            output[..., :ins] = tap
        else:
            value[..., :outs, :] = tap
            output[..., :outs] = torch.eye(outs).to(tap)
    else:
        left, scale, right = torch.linalg.svd(tap.double(), full_matrices=False)
        least = scale[..., :1] * max(outs, ins) * torch.finfo(tap.dtype).eps
        rank = int((scale > least).sum(-1).max())
        if rank > head_dim:
            raise ConfigError(
                "The values of a head are too narrow for this kernel.",
                asked=f"head_dim={head_dim}",
                found=f"a tap of rank {rank}, from {ins} to {outs} channels",
                because="a head's matrix is W^o W^v, whose rank is at most the channels of its values",
                instead=f"head_dim={rank}, or None",
            )
        root = scale[..., :head_dim].sqrt()
        value = (root[..., None] * right[..., :head_dim, :]).to(tap)
        output = (left[..., :head_dim] * root[..., None, :]).to(tap)
    return value, output.permute(0, 2, 3, 1).flatten(0, 1)


@torch.no_grad()
def _make_table_layer(conv: nn.Conv1d | nn.Conv2d, geometry: Geometry, table: Tensor, weight: Tensor) -> TableAttention:
    layer = TableAttention(
        conv.in_channels,
        conv.out_channels,
        len(table),
        geometry.steps,
        lattice=geometry.lattice,
        groups=conv.groups,
        bias=conv.bias is not None,
        dtype=weight.dtype,
        device=weight.device,
    )
    layer.scores.copy_(table.log())
    layer.weight.copy_(weight)
    return _copy_settings(layer, conv)


def _copy_settings(layer: Layer, conv: nn.Conv1d | nn.Conv2d) -> Layer:
    """Copy bias, `requires_grad` and training mode of the convolution to the layer."""
    if conv.bias is not None and layer.bias is not None:
        layer.bias.copy_(conv.bias)
        layer.bias.requires_grad_(conv.bias.requires_grad)
    if not conv.weight.requires_grad:
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name == "bias" and parameter.requires_grad)
    return layer.train(conv.training)
