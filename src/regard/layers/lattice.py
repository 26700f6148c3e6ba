"""Where the queries of an image stand, what they find a step away, and what lies beyond the edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from regard.errors import ConfigError, InputError

Edges = Literal["zeros", "replicate", "circular", "reflect"]
EDGES = ("zeros", "replicate", "circular", "reflect")


@dataclass(frozen=True)
class Lattice:
    """The pixels of the queries, and what lies beyond the edges of the image.

        query o stands at pixel  stride o,    o = 0, 1, ..., queries - 1
        queries = floor((size - trim - 1) / stride) + 1

    along each axis. `trim` is by how many pixels the line of queries is shorter than that of pixels before the stride
    thins it; negative, queries also stand beyond the edge. A convolution of `kernel` taps with `dilation` and
    `padding` on both sides has `trim = dilation (kernel - 1) - 2 padding`. Stride and trim are one number, or one for
    each axis.

    Beyond the edges lie zeros, the nearest pixel (`replicate`), the image again (`circular`), or its mirror
    (`reflect`, which does not repeat the pixel at the edge).

        >>> from regard.layers.lattice import Lattice
        >>> Lattice(stride=(2, 3), trim=2).queries((11, 13))
        (5, 4)
    """

    stride: int | tuple[int, ...] = 1
    trim: int | tuple[int, ...] = 0
    edges: Edges = "zeros"

    def __post_init__(self) -> None:
        strides, trims = ((given,) if isinstance(given, int) else given for given in (self.stride, self.trim))
        numbers = isinstance(strides, tuple) and isinstance(trims, tuple)
        if numbers:
            numbers = all(type(number) is int for number in (*strides, *trims)) and all(one >= 1 for one in strides)
        if self.edges not in EDGES or not numbers:
            raise ConfigError(
                "There is no such lattice of queries.",
                asked=f"{self}",
                because="a stride is a whole number of at least 1, a trim one of any sign, or a tuple with one for\n"
                "each axis, and four things may lie beyond an edge",
                instead=f"stride=1, and one of {', '.join(EDGES)}",
            )

    def strides(self, axes: int) -> tuple[int, ...]:
        return _repeat_per_axis(self.stride, axes)

    def trims(self, axes: int) -> tuple[int, ...]:
        return _repeat_per_axis(self.trim, axes)

    def check_axes(self, axes: int) -> None:
        """Refuse heads that step along another number of axes."""
        self.strides(axes)
        self.trims(axes)

    def queries(self, size: Sequence[int]) -> tuple[int, ...]:
        """How many queries stand on an image of this size, along each axis."""
        geometry = zip(size, self.strides(len(size)), self.trims(len(size)), strict=True)
        counts = tuple((pixels - trim - 1) // stride + 1 for pixels, stride, trim in geometry)
        if min(counts) < 1 or min(size) < 1:
            raise InputError(
                "The image is smaller than the reach of a query.",
                asked=f"an image of {' x '.join(map(str, size))}",
                found=f"a lattice that takes {' x '.join(map(str, self.trims(len(size))))} pixels away",
                because="no query would be left",
                instead="a larger image, or a smaller trim: the padding of a convolution",
            )
        return counts

    def read(self, image: Tensor, steps: Sequence[Sequence[int]]) -> Tensor:
        """What every query sees at each of its steps, `(batch, channel, step, *query)`, of `(batch, channel, *size)`.

            seen[b, c, h, o] = image[b, c, stride o + steps[h]]

        >>> from regard.layers.lattice import Lattice
        >>> Lattice().read(torch.tensor([[[1.0, 2.0, 3.0]]]), [[-1], [1]]).tolist()
        [[[[0.0, 1.0, 2.0], [2.0, 3.0, 0.0]]]]
        """
        size = tuple(image.shape[2:])
        counts, strides = self.queries(size), self.strides(len(size))
        lowest = [min(along) for along in zip(*steps, strict=True)]
        lengths = [(count - 1) * stride + 1 for count, stride in zip(counts, strides, strict=True)]
        before = [max(0, -low) for low in lowest]
        after = [
            max(0, max(along) + length - pixels)
            for along, length, pixels in zip(zip(*steps, strict=True), lengths, size, strict=True)
        ]
        whole = self._pad_edges(image, before, after)
        views = [whole[(..., *_make_slices(step, before, lengths, strides))] for step in steps]
        return torch.stack(views, dim=2) if len(views) > 1 else views[0].unsqueeze(2)

    def pixel(self, place: Tensor, size: int) -> Tensor:
        """Which pixel of an axis is seen at a place, beyond the edges too; with zeros there, -1."""
        inside = (place >= 0) & (place < size)
        if self.edges == "zeros":
            return place.where(inside, -1)
        if self.edges == "replicate":
            return place.clamp(0, size - 1)
        if self.edges == "circular":
            return place % size
        mirrored = place.abs()
        return mirrored.where(mirrored < size, 2 * (size - 1) - mirrored)

    def places(self, size: Sequence[int], axis: int, device: torch.device | None = None) -> Tensor:
        """The pixels of the queries along an axis, `(query,)`."""
        return torch.arange(self.queries(size)[axis], device=device) * self.strides(len(size))[axis]

    def soft_weights(self, centre: Tensor, alpha: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Attention weights over the pixels of an axis, and the log-sum-exp of their scores.

            weight[h, q, k] = exp(-alpha[h] |k - centre[h, q]|^2) / total[h, q]

        `centre (head, query)` is the centre of a query's attention. With circular edges distances are the shorter ones;
        with reflected edges a pixel occurs up to three times, and its weights are added. Weights `(head, query, key)`,
        totals `(head, query)`.
        """
        places = torch.arange(size, device=centre.device)
        if self.edges == "reflect":
            places = torch.arange(1 - size, 2 * size - 1, device=centre.device)
        distance = places.to(centre) - centre[..., None]
        if self.edges == "circular":
            distance = distance - size * (distance / size).round()
        scores = -alpha[:, None, None] * distance.square()
        weights, totals = scores.softmax(-1), scores.logsumexp(-1)
        if self.edges == "reflect":
            folded = weights.new_zeros(*weights.shape[:-1], size)
            weights = folded.index_add(-1, self.pixel(places, size), weights)
        return weights, totals

    def _pad_edges(self, image: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
        """The image with what lies beyond its edges, as far as it is read."""
        if not any(before) and not any(after):
            return image
        if self.edges == "zeros":
            pads = [pad for pair in zip(reversed(before), reversed(after), strict=True) for pad in pair]
            return functional.pad(image, pads)
        for axis, (first, last) in enumerate(zip(before, after, strict=True)):
            size = image.shape[2 + axis]
            self.check_mirror(max(first, last), size)
            if first or last:
                place = torch.arange(-first, size + last, device=image.device)
                image = image.index_select(2 + axis, self.pixel(place, size))
        return image

    def check_mirror(self, beyond: int, size: int) -> None:
        if self.edges == "reflect" and beyond >= size:
            raise InputError(
                "The offset is larger than the reflected image.",
                asked=f"an offset {beyond} pixels beyond the edge",
                found=f"an axis of {size} pixels",
                because=f"a mirror that does not repeat the edge shows {size - 1} pixels",
                instead="a larger image, or edges that replicate",
            )


def _repeat_per_axis(given: int | tuple[int, ...], axes: int) -> tuple[int, ...]:
    if isinstance(given, int):
        return (given,) * axes
    if len(given) != axes:
        raise ConfigError(
            "The lattice has another number of axes.",
            asked=f"{given} for {axes} axes",
            because="there is one number for every axis, or one for all",
            instead="one number, or as many as axes",
        )
    return cast("tuple[int, ...]", tuple(given))


def _make_slices(
    step: Sequence[int], before: Sequence[int], lengths: Sequence[int], strides: Sequence[int]
) -> tuple[slice, ...]:
    firsts = [delta + pad for delta, pad in zip(step, before, strict=True)]
    return tuple(
        slice(first, first + length, stride) for first, length, stride in zip(firsts, lengths, strides, strict=True)
    )


__all__ = ["EDGES", "Edges", "Lattice"]
