"""Convert attention to a convolution: its effective kernel, or a least-squares fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.convert.from_conv import read_conv
from regard.errors import InputError
from regard.layers.lattice import Edges, Lattice
from regard.layers.profiles import head_profile
from regard.layers.spatial import SpatialAttention
from regard.layers.tables import TableAttention

# The tail of a soft head is truncated where its weight is below this.
TAIL = 1e-9


@dataclass(frozen=True, eq=False)
class ConvFit:
    """The convolution that equals an attention layer, or approximates it.

    Attributes:
        conv: a `torch.nn.Conv1d` or `Conv2d`, a drop-in replacement of the layer.
        residual: `|layer - conv| / |layer - mean|`, in the 2-norm, over images: 0 is equal, 1 is no better than a
            constant per channel. `None` if no images were given.
    """

    conv: nn.Conv1d | nn.Conv2d
    residual: float | None = None

    @property
    def kernel(self) -> Tensor:
        """`(out, in / groups, *taps)`."""
        return self.conv.weight.detach()

    def __repr__(self) -> str:
        told = "" if self.residual is None else f", residual={self.residual:.2g}"
        return f"ConvFit({self.conv}{told})"


def attention_to_conv(layer: nn.Module, images: Tensor | None = None) -> ConvFit:
    r"""Convert a positional attention layer to a convolution with its effective kernel.

        kernel[delta] = sum_h a_h[delta] W^(h)

    `a_h[delta]` is the weight that head `h` gives to the pixel at `delta` from the query, far from the borders, and
    `W^(h)` its matrix. Only this sum is identifiable: other heads with the same sum compute the same function.

    An exact `SpatialAttention` and a `TableAttention` equal a convolution with the same stride, dilation, padding and
    groups, borders included. A soft one is an approximation: its tails are truncated where weights fall below 1e-9, and
    near a border its weights are renormalised, so it is not a convolution there; pass `images` to measure the
    difference (`ConvFit.residual`). Any other layer with a `head_profile()` that has values, such as those of
    `SpatialTransformer`, gives a convolution over its whole grid, with replicate padding. For content-based attention
    use `fit_conv`.

        >>> layer = conv_to_attention(torch.nn.Conv2d(3, 5, (3, 4), stride=2, dilation=(1, 2), padding=1))
        >>> attention_to_conv(layer)
        ConvFit(Conv2d(3, 5, kernel_size=(3, 4), stride=(2, 2), padding=(1, 1), dilation=(1, 2)))
    """
    if isinstance(layer, TableAttention):
        conv = _make_conv(layer.steps, layer.kernel(), layer.lattice, layer.groups, layer.bias)
    elif isinstance(layer, SpatialAttention) and layer.exact:
        conv = _make_conv(layer.steps, layer.matrices().permute(1, 2, 0), layer.lattice, layer.groups, layer.bias)
    elif isinstance(layer, SpatialAttention):
        conv = _convert_soft(layer)
    else:
        conv = _convert_profile(layer)
    conv.train(layer.training)
    if images is None:
        return ConvFit(conv)
    _check_reach(conv, images)
    first = isinstance(layer, SpatialAttention | TableAttention)  # every other layer is channels-last
    return ConvFit(conv, residual(layer if first else lambda x: layer(x.movedim(1, -1)).movedim(-1, 1), conv, images))


def fit_conv(
    layer: Callable[[Tensor], Tensor],
    images: Tensor,
    kernel_size: int | Sequence[int] = 3,
    **geometry: Any,
) -> ConvFit:
    r"""ConvFit a convolution to any function of images, by least squares.

        minimise over kernel and bias  sum over images and pixels of |layer(image) - conv(image)|^2

    `layer` is a function of images `(batch, channel, row, column)` or `(batch, channel, position)`. `geometry` is what
    `torch.nn.Conv2d` takes: `stride`, `padding` ("same" unless given), `dilation`, `groups`, `bias`, `padding_mode`.
    For content-based attention, `residual` measures the distance from a convolution on these images. At least as many
    pixels as weights per output are needed; an underdetermined fit gives the kernel of smallest norm.

        >>> blur = torch.nn.AvgPool2d(3, stride=1)
        >>> from regard.convert import fit_conv
        >>> fit = fit_conv(blur, torch.randn(2, 1, 11, 13), padding=0)
        >>> round(fit.kernel[0, 0, 1, 1].item(), 4), fit.residual < 1e-5
        (0.1111, True)
    """
    with torch.no_grad():
        wanted = layer(images)
    axes = images.ndim - 2
    if axes not in (1, 2) or wanted.ndim != images.ndim:
        raise InputError(
            "This is no layer from images to images.",
            asked=f"fit_conv from {tuple(images.shape)} to {tuple(wanted.shape)}",
            because="images are (batch, channel, row, column) or (batch, channel, position), before and after",
            instead="lambda x: layer(x.movedim(1, -1)).movedim(-1, 1), if the layer has channels last",
        )
    kind = nn.Conv1d if axes == 1 else nn.Conv2d
    size: Any = kernel_size if isinstance(kernel_size, int) else tuple(kernel_size)
    geometry.setdefault("padding", "same")
    conv = kind(images.shape[1], wanted.shape[1], size, **geometry).to(images)
    _, taps = read_conv(conv)
    places = taps.lattice.queries(images.shape[2:])
    if places != tuple(wanted.shape[2:]):
        raise InputError(
            "The layer and the convolution have outputs of different sizes.",
            asked=f"{conv} on images {tuple(images.shape)}",
            found=f"{tuple(wanted.shape[2:])} places where the convolution has {places}",
            because="they are compared pixel by pixel",
            instead="stride=, padding= and dilation= as the layer has them",
        )
    _solve_least_squares(conv, taps.lattice.read(images.double(), taps.steps), wanted.double())
    return ConvFit(conv, residual(layer, conv, images))


@torch.no_grad()
def residual(layer: Callable[[Tensor], Tensor], conv: nn.Module, images: Tensor) -> float:
    """`|layer - conv| / |layer - mean|` over images, in the 2-norm; the mean is per channel."""
    truth, found = layer(images).double(), conv(images).double()
    mean = truth.transpose(0, 1).flatten(1).mean(1).view(-1, *[1] * (truth.ndim - 2))
    off, size = (truth - found).norm(), (truth - mean).norm()
    return float(off / size) if size > 0 else float(off)


@torch.no_grad()
def _solve_least_squares(conv: nn.Conv1d | nn.Conv2d, inputs: Tensor, wanted: Tensor) -> None:
    """Set the least-squares weights of a convolution from the inputs of its taps, `(batch, channel, tap, *query)`."""
    groups = conv.groups
    columns = inputs.unflatten(1, (groups, -1)).movedim(0, 3).flatten(3).flatten(1, 2)  # (group, in tap, sample)
    targets = wanted.unflatten(1, (groups, -1)).movedim(0, 2).flatten(2)  # (group, out, sample)
    if conv.bias is not None:
        columns = torch.cat((columns, torch.ones_like(columns[:, :1])), 1)
    found = torch.linalg.lstsq(columns.mT, targets.mT, driver="gelsd").solution.mT  # (group, out, in tap + 1)
    if conv.bias is not None:
        conv.bias.copy_(found[..., -1].flatten())
        found = found[..., :-1]
    conv.weight.copy_(found.reshape(conv.weight.shape))


def _check_reach(conv: nn.Conv1d | nn.Conv2d, images: Tensor) -> None:
    """Raise if the padding exceeds the image, which torch does not support (wide soft heads with circular padding)."""
    if conv.padding_mode not in ("circular", "reflect"):
        return
    for size, taps, dilation, axis in zip(images.shape[2:], conv.kernel_size, conv.dilation, (0, 1), strict=False):
        pad = (dilation * (taps - 1) + 1) // 2 if conv.padding == "same" else int(conv.padding[axis])
        most = size if conv.padding_mode == "circular" else size - 1
        if pad > most:
            raise InputError(
                "The padding of the convolution exceeds the image.",
                asked=f"images {tuple(images.shape)}, to compare with {conv}",
                found=f"{pad} pixels beyond an edge",
                because=f"torch's {conv.padding_mode} padding shows {most} pixels beyond the edge of {size}",
                instead=f"images of at least {pad if conv.padding_mode == 'circular' else pad + 1} pixels a side, or "
                "steeper heads: layer.with_alpha(20.0)",
            )


# Positional layers


@torch.no_grad()
def _convert_soft(layer: SpatialAttention) -> nn.Conv1d | nn.Conv2d:
    """The kernel of soft heads far from the borders: the weight of every delta, without the null key's share."""
    alpha, step = layer.alpha.double(), layer.step.double()
    far = math.ceil(float(step.abs().max()) + math.sqrt(math.log(1 / TAIL) / float(alpha.min().clamp(min=1e-3))))
    line = torch.arange(-far, far + 1, device=step.device)
    sums, weights = torch.zeros_like(alpha), None
    for axis in range(layer.axes):
        scores = -alpha[:, None] * (line - step[:, axis, None]).square()
        sums = sums + scores.logsumexp(-1)
        part = scores.softmax(-1)
        weights = part if weights is None else weights[:, :, None] * part[:, None]
    assert weights is not None
    if layer.lattice.edges == "zeros":
        weights = weights * (sums + alpha / 2).sigmoid().view(-1, *[1] * layer.axes)
    weights = weights.where(weights > TAIL, 0).flatten(1)
    kept = weights.any(0).nonzero()[:, 0].tolist()
    deltas = list(itertools.product(line.tolist(), repeat=layer.axes))
    kernel = layer.matrices().double().permute(1, 2, 0) @ weights[:, kept]
    kernel = kernel.to(layer.matrices().dtype)
    return _make_conv([deltas[tap] for tap in kept], kernel, layer.lattice, layer.groups, layer.bias)


@torch.no_grad()
def _convert_profile(layer: nn.Module) -> nn.Conv1d | nn.Conv2d:
    found = head_profile(layer)  # raises for content-based attention
    kernel, (rows, columns) = found.kernel, found.grid
    # The attention weights do not depend on the image, so the output of a zero image is the bias.
    bias = layer(kernel.new_zeros(1, rows, columns, kernel.shape[1]))[0, 0, 0]
    deltas = list(itertools.product(range(1 - rows, rows), range(1 - columns, columns)))
    return _make_conv(deltas, kernel.flatten(2), Lattice(edges="replicate"), 1, bias)


@torch.no_grad()
def _make_conv(
    steps: Sequence[Sequence[int]], kernel: Tensor, lattice: Lattice, groups: int, bias: Tensor | None
) -> nn.Conv1d | nn.Conv2d:
    """The smallest convolution with these taps, `kernel (out, in / groups, tap)`."""
    axes = len(steps[0])
    alongs = list(zip(*steps, strict=True))
    strides, trims = lattice.strides(axes), lattice.trims(axes)
    padding: Any = "same"
    if set(strides) == {1} and not any(trims) and all(_needs_same_padding(along) for along in alongs):
        lines = [TapLine.covering(along, min(along), max(along)) for along in alongs]
    else:
        pads = tuple(max(-min(along), max(along) - trim, 0) for along, trim in zip(alongs, trims, strict=True))
        lines = [
            TapLine.covering(along, -pad, pad + trim) for along, pad, trim in zip(alongs, pads, trims, strict=True)
        ]
        padding = pads
    kind = nn.Conv1d if axes == 1 else nn.Conv2d
    edges: Edges = lattice.edges if padding == "same" or any(padding) else "zeros"
    conv = kind(
        kernel.shape[1] * groups,
        kernel.shape[0],
        tuple(line.taps for line in lines),  # pyright: ignore[reportArgumentType]
        stride=strides,  # pyright: ignore[reportArgumentType]
        padding=padding,
        dilation=tuple(line.dilation for line in lines),  # pyright: ignore[reportArgumentType]
        groups=groups,
        bias=bias is not None,
        padding_mode=edges,
        dtype=kernel.dtype,
        device=kernel.device,
    )
    conv.weight.zero_()
    for tap, step in enumerate(steps):
        place = tuple((delta - line.low) // line.dilation for delta, line in zip(step, lines, strict=True))
        conv.weight[(slice(None), slice(None), *place)] += kernel[:, :, tap]  # several heads may have the same offset
    if bias is not None and conv.bias is not None:
        conv.bias.copy_(bias)
    return conv


@dataclass(frozen=True)
class TapLine:
    """The taps along one axis: the first offset, the spacing, and their number."""

    low: int
    dilation: int
    taps: int

    @classmethod
    def covering(cls, steps: Sequence[int], low: int, high: int) -> TapLine:
        """The taps of widest spacing from `low` to `high` that include every step."""
        dilation = math.gcd(high - low, *(step - low for step in steps)) or 1
        return cls(low, dilation, (high - low) // dilation + 1)


def _needs_same_padding(steps: Sequence[int]) -> bool:
    """True for a padding that only `padding="same"` expresses: one pixel more after an axis than before it."""
    return min(steps) <= 0 and max(steps) + min(steps) == 1
