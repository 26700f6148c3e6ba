"""The colors of every picture and page: one palette for light and dark, colors of heads and of curves, color maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# The CSS variables of every page, in light and dark mode.
LIGHT = {
    "paper": "#fcfcfa",
    "ink": "#1d1f23",
    "faint": "#62676f",
    "line": "#e0dfd9",
    "card": "#fff",
    "holds": "#1a7040",
    "broken": "#c2281d",
    "flaky": "#8f5b00",
    "query": "#c2410c",
    "weight": "0, 92, 184",
    "wash": "#f2f1ec",
    "dot": "#fff",
}
DARK = {
    "paper": "#15171a",
    "ink": "#e9e7e1",
    "faint": "#a0a5ae",
    "line": "#33373d",
    "card": "#1c1f23",
    "holds": "#5cc98b",
    "broken": "#ff7d70",
    "flaky": "#e9b04b",
    "query": "#ff8a4c",
    "weight": "110, 178, 255",
    "wash": "#22262b",
    "dot": "#15171a",
}
# For matplotlib figures, which have a white background.
INK, FAINT, LINE = "#1d1f23", "#6a6f78", "#dddcd6"
ACCENT = LIGHT["query"]  # the query
WEIGHT = (0.0, 0.36, 0.72)  # attention weights, as red, green and blue
MASK_HIDDEN, MASK_VISIBLE = "#efeae0", "#1f4e79"  # pairs of a pattern

# One for each head, after Tol's "muted" scheme, which stays distinct under every kind of color vision; some are darker
# here for contrast with white. The second row is for dark mode. Heads are numbered as well.
HEADS = ("#332288", "#2b8fc4", "#2a9584", "#117733", "#85851f", "#b8860b", "#c8505f", "#882255", "#aa4499")
HEADS_DARK = ("#a79bff", "#88ccee", "#5cd0bc", "#66c47a", "#cbcb5a", "#e8cf73", "#f5919e", "#e07aa8", "#dd94d4")
# One for each curve, after Okabe and Ito, and the same for dark mode. Dashes distinguish curves without color.
CURVES = ("#0072b2", "#d55e00", "#00805c", "#a8508a", "#8a6a00", "#2a8fc7", "#5a5a5a")
CURVES_DARK = ("#5db3ea", "#ff8a3d", "#35c99c", "#eba3cc", "#f0c04a", "#9bd4f5", "#bdbdbd")
DASHES = ("", "9 4", "2 3", "12 3 2 3", "5 3", "1 4", "14 4")

# From blue through white to red, nearly linear in lightness; the middle is zero.
NEGATIVE, POSITIVE = (0.0196, 0.2863, 0.5882), (0.6980, 0.0941, 0.1255)


def head_color(head: int, dark: bool = False) -> str:
    """The color of a head; after nine they repeat."""
    colors = HEADS_DARK if dark else HEADS
    return colors[head % len(colors)]


def css_variables() -> str:
    """The palette as CSS, for light and dark mode: `--ink`, ..., `--h0` to `--h8` of heads, `--c0` to `--c6` of curves.

    The mode is the reader's own, unless the page says `<html data-theme="light">` or `"dark"`.
    """

    def variables(palette: Mapping[str, str], heads: Sequence[str], curves: Sequence[str]) -> str:
        named = [*palette.items(), *((f"h{index}", color) for index, color in enumerate(heads))]
        named += [(f"c{index}", color) for index, color in enumerate(curves)]
        return " ".join(f"--{name}: {value};" for name, value in named)

    dark = variables(DARK, HEADS_DARK, CURVES_DARK)
    return (
        f":root {{ color-scheme: light dark; {variables(LIGHT, HEADS, CURVES)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {dark} }} }}\n"
        f":root[data-theme=light] {{ color-scheme: light; }}\n"
        f":root[data-theme=dark] {{ color-scheme: dark; {dark} }}\n"
    )


def diverging(values: Tensor, largest: float) -> Tensor:
    """Red, green and blue, `(*values, 3)`: white at 0, red at `largest` and above, blue at `-largest` and below.

    >>> from regard.render.colors import diverging
    >>> (255 * diverging(torch.tensor([-2.0, 0.0, 2.0]), 2.0)).round().int().tolist()
    [[5, 73, 150], [255, 255, 255], [178, 24, 32]]
    """
    share = (values / largest if largest > 0 else torch.zeros_like(values)).clamp(-1, 1).unsqueeze(-1)
    ends = [torch.tensor(end, dtype=share.dtype, device=share.device) for end in (NEGATIVE, POSITIVE)]
    # A little more color for small values, which would look white otherwise.
    strength = share.abs() ** 0.8
    return 1 - strength * (1 - torch.where(share < 0, ends[0], ends[1]))


def overlay(image: Tensor, weights: Tensor) -> Tensor:
    """A grayscale image `(row, column)` with `weights` `(row, column)` laid over it in blue, `(row, column, 3)`.

    Both from 0 to 1. The image keeps to light grays, so that the blue is visible everywhere.
    """
    gray = (1 - 0.55 * image.clamp(0, 1)).unsqueeze(-1)
    share = 0.9 * weights.clamp(0, 1).unsqueeze(-1)
    return gray * (1 - share) + share * torch.tensor(WEIGHT, dtype=gray.dtype)
