"""Effective kernels of positional heads, beside the kernels of a convolution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.layers.profiles import HeadProfile, head_profile
from regard.render.colors import ACCENT, FAINT, diverging
from regard.render.markup import element
from regard.render.page import Widget, figure, read_asset
from regard.render.png import data_uri
from regard.visualize.picture import Picture, make_panels, style

COUNT = 8


def draw_kernels(sources: Mapping[str, Any], count: int = COUNT, reach: int | None = None) -> Picture:
    r"""Kernels of several layers on one scale, a row for each: blue is negative, white zero, red positive.

        K[o, i, delta] = sum_h weights[h, delta] W[h][o, i]

    is the kernel of the convolution that a layer of positional heads computes on an infinite image: the weight of input
    channel `i` at offset `delta` from the query in output channel `o`.

    Args:
        sources: by name, an `nn.Conv2d`, a `HeadProfile` with values, a layer that has one, or a tensor `(out, in, row,
            column)`.
        count: pairs of channels to draw: those with the largest norm in the first source, if all have the same
            channels; else those of each.
        reach: rows and columns around the query; those of nine tenths of the absolute weight, if not given.
    """
    if not isinstance(sources, Mapping) or not sources or not isinstance(count, int) or count < 1:
        raise InputError(
            "There are no kernels to draw.",
            asked=f"draw_kernels({type(sources).__name__}, count={count!r})",
            because="a picture has a row for each named source and a column for each of `count` pairs of channels",
            instead='draw_kernels({"convolution": conv, "attention": layer})',
        )
    read = {str(name): _Kernel(source) for name, source in sources.items()}
    shapes = {kernel.channels for kernel in read.values()}
    first = next(iter(read.values())).find_strongest_pairs(count)
    pairs = {name: first if len(shapes) == 1 else kernel.find_strongest_pairs(count) for name, kernel in read.items()}
    reach = max(kernel.reach(pairs[name]) for name, kernel in read.items()) if reach is None else reach
    drawn = {name: kernel.crop(pairs[name], reach) for name, kernel in read.items()}
    scales = {name: float(values.abs().max()) for name, values in drawn.items()}
    common = len(shapes) == 1
    largest = max(scales.values())
    columns = max(map(len, drawn.values()))
    with style():
        drawing, axes = make_panels(len(drawn), columns, 1.05, 1.2)
        for row, (name, values) in enumerate(drawn.items()):
            for place, panel in enumerate(axes[row]):
                panel.set_xticks([])
                panel.set_yticks([])
                if place >= len(values):
                    panel.set_visible(False)
                    continue
                panel.imshow(
                    diverging(values[place], largest if common else scales[name]).numpy(), interpolation="nearest"
                )
                for color, width in (("white", 2.0), (ACCENT, 0.7)):
                    panel.plot(
                        [reach], [reach], "s", color="none", markeredgecolor=color, markersize=4, markeredgewidth=width
                    )
                out, into = pairs[name][place]
                panel.set_title(f"{into} → {out}", fontsize=7, color=FAINT, pad=2)
            axes[row][0].set_ylabel(name)
    caption = (
        "Kernels by pairs of channels (in → out), the query in the middle: red is positive, blue negative, white zero. "
        + ("All share one scale" if common else "Each row has its own scale")
        + f", which ends at {_format_scales(scales, common)}."
    )
    return Picture(drawing, caption, {"kernels": drawn, "pairs": pairs, "largest": scales})


def kernel_figure(rows: Mapping[str, Tensor], caption: str, shared: bool = True) -> Widget:
    """Kernels `(kernel, row, column)` as a figure of a page, red positive and blue negative.

    All rows share one scale; with `shared=False` each has its own.
    """
    top = {name: float(values.abs().max()) for name, values in rows.items()}
    parts = []
    for name, values in rows.items():
        largest = max(top.values()) if shared else top[name]
        images = (
            element(
                "img", class_="pixels", alt=f"kernel {index + 1} of {name}", src=data_uri(diverging(kernel, largest))
            )
            for index, kernel in enumerate(values)
        )
        parts += [element("h3", name), element("div", *images)]
    style = read_asset("regard.visualize", "web/kernels.css")
    return Widget(figure(element("div", *parts, class_="kernels"), caption), style=style)


def effective_kernels(source: Any, pairs: list[tuple[int, int]], reach: int) -> Tensor:
    """The kernels of some pairs `(out, in)` of channels around the query, `(pair, 2 reach + 1, 2 reach + 1)`."""
    return _Kernel(source).crop(pairs, reach)


def find_strongest_pairs(source: Any, count: int = COUNT) -> list[tuple[int, int]]:
    """The pairs `(out, in)` of channels whose kernels have the largest norm, one for each output channel."""
    return _Kernel(source).find_strongest_pairs(count)


class _Kernel:
    """The kernel of a source; the kernels of positional heads are computed for the needed pairs of channels only."""

    def __init__(self, source: Any) -> None:
        self.head_profile: HeadProfile | None = None
        if isinstance(source, nn.Conv2d):
            self.table, self.origin = _dilate_kernel(source)
        elif isinstance(source, Tensor) and (source.ndim != 4 or not source.is_floating_point() or not source.numel()):
            raise InputError(
                "This tensor is not a kernel.",
                asked=f"{source.dtype} {tuple(source.shape)}",
                because="a kernel is (out, in, row, column) of floating point numbers",
                instead="conv.weight, or the convolution itself",
            )
        elif not isinstance(source, Tensor | HeadProfile | nn.Module):
            raise InputError(
                f"{type(source).__name__} has no kernel.",
                asked=f"kernels of {type(source).__name__}",
                because="a kernel is that of a convolution or of positional heads, or a tensor",
                instead='draw_kernels({"convolution": nn.Conv2d(3, 5, 3)})',
            )
        elif isinstance(source, Tensor):
            self.table, self.origin = source.detach(), (source.shape[2] // 2, source.shape[3] // 2)
        else:
            self.head_profile = source if isinstance(source, HeadProfile) else head_profile(source)
            rows, columns = self.head_profile.grid
            self.values, self.origin = self.head_profile._require_values(), (rows - 1, columns - 1)
            self.weights = self.head_profile.weights

    @property
    def channels(self) -> tuple[int, int]:
        shape = self.table.shape if self.head_profile is None else self.values.shape[1:]
        return shape[0], shape[1]

    def find_strongest_pairs(self, count: int) -> list[tuple[int, int]]:
        """The pairs `(out, in)` whose kernels have the largest norm, one for each output channel."""
        if self.head_profile is None:
            norm = self.table.flatten(2).norm(dim=-1)
        else:
            # |sum_h a_h w_h|^2 = w^T (a a^T) w, for all pairs at once
            weights = self.weights.flatten(1)
            values = self.values.flatten(1)
            norm = ((weights @ weights.T) @ values).mul(values).sum(0).clamp(min=0).sqrt().unflatten(0, self.channels)
        best = norm.max(dim=1)
        order = best.values.argsort(descending=True, stable=True)[:count]
        return [(int(out), int(best.indices[out])) for out in order]

    def select(self, pairs: list[tuple[int, int]]) -> Tensor:
        """The kernels of these pairs, `(pair, row, column)`."""
        out, into = (list(side) for side in zip(*pairs, strict=True))
        if self.head_profile is None:
            return self.table[out, into].float().cpu()
        return torch.einsum("hrc,hp->prc", self.weights, self.values[:, out, into]).float().cpu()

    def reach(self, pairs: list[tuple[int, int]]) -> int:
        """The distance from the query that holds nine tenths of the kernels' absolute sum."""
        values = self.select(pairs).abs().sum(0)
        total = float(values.sum())
        far = max(*self.origin, values.shape[0] - 1 - self.origin[0], values.shape[1] - 1 - self.origin[1])
        for reach in range(1, far + 1):
            if float(_crop(values[None], self.origin, reach).sum()) >= 0.9 * total:
                return reach
        return max(far, 1)

    def crop(self, pairs: list[tuple[int, int]], reach: int) -> Tensor:
        return _crop(self.select(pairs), self.origin, reach)


def _crop(values: Tensor, origin: tuple[int, int], reach: int) -> Tensor:
    """A square window around the origin, zero-padded."""
    side = 2 * reach + 1
    window = values.new_zeros(len(values), side, side)
    rows, columns = values.shape[1:]
    top, left = origin[0] - reach, origin[1] - reach
    r0, r1 = max(top, 0), min(top + side, rows)
    c0, c1 = max(left, 0), min(left + side, columns)
    if r0 < r1 and c0 < c1:
        window[:, r0 - top : r1 - top, c0 - left : c1 - left] = values[:, r0:r1, c0:c1]
    return window


def _dilate_kernel(layer: nn.Conv2d) -> tuple[Tensor, tuple[int, int]]:
    """The dense kernel of a convolution, and the position of the query in it: tap `i` is at `dilation i - padding`."""
    weight = layer.weight.detach()
    if layer.groups > 1:
        each = weight.shape[0] // layer.groups
        blocks = [torch.block_diag(*weight[..., r, c].split(each)) for r, c in _list_taps(weight)]
        weight = torch.stack(blocks, -1).unflatten(-1, weight.shape[2:])
    (down, across), size = layer.dilation, layer.kernel_size
    wide = weight.new_zeros(*weight.shape[:2], down * (size[0] - 1) + 1, across * (size[1] - 1) + 1)
    wide[:, :, ::down, ::across] = weight
    padding = layer.padding
    if isinstance(padding, str):
        padding = tuple((side - 1) // 2 for side in wide.shape[2:]) if padding == "same" else (0, 0)
    return wide, (padding[0], padding[1])


def _list_taps(weight: Tensor) -> list[tuple[int, int]]:
    return [(row, column) for row in range(weight.shape[2]) for column in range(weight.shape[3])]


def _format_scales(scales: dict[str, float], common: bool) -> str:
    if common:
        return f"±{max(scales.values()):.2g}"
    return ", ".join(f"±{scale:.2g} ({name})" for name, scale in scales.items())
