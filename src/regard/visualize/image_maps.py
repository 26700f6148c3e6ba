"""What one pixel looks at: the weights of each layer and head, laid over the image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.errors import InputError
from regard.render.colors import ACCENT, FAINT, overlay
from regard.visualize.attention_map import AttentionMap
from regard.visualize.labels import Percent, head_title
from regard.visualize.picture import Picture, hide_axes, label_layer, make_panels, style
from regard.visualize.token_grid import TokenGrid

MOST_PANELS = 400


def draw_image_maps(
    maps: Sequence[AttentionMap],
    image: Tensor,
    places: TokenGrid,
    query: tuple[int, int] | None = None,
    heads: Sequence[int] | None = None,
    left_out: int = 0,
) -> Picture:
    """The attention of one pixel over an image `(channel, row, column)`: a row for each layer, a column for each head.

    Without a `query` it is the class token that looks, or the pixel in the middle where there is none. Only the rows of
    that one token are computed. `left_out` is the number of layers whose tokens are no grid of the image.
    """
    size = (image.shape[-2], image.shape[-1])
    named = query is not None or places.first == 0
    chosen = (size[0] // 2, size[1] // 2) if query is None else query
    token = places.token(chosen, size) if named else 0
    found = [attention.rows([token])[:, 0].detach().float().cpu() for attention in maps]  # (head, key)
    chosen_heads = [check_heads(heads, len(rows)) for rows in found]
    columns = max(map(len, chosen_heads))
    check_count(len(maps) * columns)
    grey = to_grayscale(image)
    largest_of = [
        places.maps(rows[numbers]).amax((-1, -2)).tolist() for rows, numbers in zip(found, chosen_heads, strict=True)
    ]
    percent = Percent([weight for row in largest_of for weight in row])
    drawn = {}
    with style():
        side = 1.15 if columns > 4 else 1.5
        figure, axes = make_panels(len(maps), columns, side, side * min(1.6, size[0] / size[1]) + 0.22)
        for row, (attention, rows, numbers) in enumerate(zip(maps, found, chosen_heads, strict=True)):
            seen = places.maps(rows[numbers])
            drawn[attention.name] = seen
            for place, panel in enumerate(axes[row]):
                hide_axes(panel)
                for side_of in panel.spines.values():
                    side_of.set(visible=True, linewidth=0.5)
                if place >= len(numbers):
                    panel.set_visible(False)
                    continue
                largest = largest_of[row][place]
                panel.imshow(
                    overlay(grey, places.spread(seen[place] / max(largest, 1e-30), size)).numpy(),
                    interpolation="nearest",
                )
                if named:
                    _mark(panel, places.box(token, size))
                panel.set_xlabel(f"max {percent(largest)}", fontsize=7, color=FAINT, labelpad=2)
                if row == 0:
                    panel.set_title(head_title(numbers[place]))
            label_layer(axes[row][0], attention.title)
    who = f"the pixel at row {chosen[0]}, column {chosen[1]} (outlined)" if named else "the class token"
    caption = (
        f"What {who} looks at, layer by layer and head by head: the bluer, the more weight. Each panel has its own "
        "scale; the number below is its largest weight."
    )
    if left_out:
        caption += f" {left_out} layers are left out: their tokens are no grid of the whole image."
    if places.first:
        rest = [float(rows[:, : places.first].sum(-1).mean()) for rows in found]
        caption += f" {_share(rest)} of the weight, on average, goes to the {_first(places.first)} outside the image."
    return Picture(figure, caption, {"layers": drawn, "token": token, "query": chosen if named else None})


def to_grayscale(image: Tensor) -> Tensor:
    """An image `(channel, row, column)` as darkness from 0 to 1, `(row, column)`: the mean of its channels."""
    mean = image.detach().float().cpu().mean(0)
    low, high = mean.min(), mean.max()
    return (mean - low) / (high - low) if high > low else torch.zeros_like(mean)


def check_heads(heads: Sequence[int] | None, count: int) -> list[int]:
    """The heads that are asked for, if there are such."""
    chosen = list(range(count)) if heads is None else list(heads)
    if any(not 0 <= head < count for head in chosen) or not chosen:
        raise InputError(
            "There is no such head.",
            asked=f"head={heads}",
            found=f"{count} heads",
            because="heads are counted from 0",
            instead=f"head=0 to head={count - 1}",
        )
    return chosen


def check_count(count: int) -> None:
    """Refuse a picture of more panels than anyone can look at."""
    if count > MOST_PANELS:
        raise InputError(
            "So many panels are no picture.",
            asked=f"{count} panels",
            because=f"beyond {MOST_PANELS} nobody sees what is in them",
            instead="layer=0, or head=0, or a list of them",
        )


def _mark(axes, box: tuple[float, float, float, float]) -> None:
    from matplotlib.patches import Rectangle

    top, left, high, wide = box
    axes.add_patch(Rectangle((left - 0.5, top - 0.5), wide, high, fill=False, edgecolor=ACCENT, linewidth=1.4))


def _share(shares: list[float]) -> str:
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"Between {low} and {high}"


def _first(count: int) -> str:
    return "class token" if count == 1 else f"{count} tokens"
