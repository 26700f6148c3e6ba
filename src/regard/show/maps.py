"""What one pixel looks at: the weights of each layer and head, laid over the image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.errors import InputError
from regard.show.colours import ACCENT, FAINT, overlay
from regard.show.heads import layer_title
from regard.show.looking import Look
from regard.show.picture import Picture, bare, panels, style
from regard.show.places import Places

MOST_PANELS = 400


def maps(
    looks: Sequence[Look],
    image: Tensor,
    places: Places,
    query: tuple[int, int] | None = None,
    heads: Sequence[int] | None = None,
) -> Picture:
    """The attention of one pixel over an image `(channel, row, column)`: a row for each layer, a column for each head.

    Without a `query` it is the class token that looks, or the pixel in the middle where there is none. Only the rows of
    that one token are computed.
    """
    size = (image.shape[-2], image.shape[-1])
    named = query is not None or places.first == 0
    chosen = (size[0] // 2, size[1] // 2) if query is None else query
    token = places.token(chosen, size) if named else 0
    found = [look.rows([token])[:, 0].detach().float().cpu() for look in looks]  # (head, key)
    chosen_heads = [check_heads(heads, len(rows)) for rows in found]
    columns = max(map(len, chosen_heads))
    check_count(len(looks) * columns)
    grey = greys(image)
    drawn = {}
    with style():
        side = 1.15 if columns > 4 else 1.5
        figure, axes = panels(len(looks), columns, side, side * min(1.6, size[0] / size[1]) + 0.22)
        for row, (look, rows, numbers) in enumerate(zip(looks, found, chosen_heads, strict=True)):
            seen = places.maps(rows[numbers])
            drawn[look.name] = seen
            for place, panel in enumerate(axes[row]):
                bare(panel)
                if place >= len(numbers):
                    panel.set_visible(False)
                    continue
                largest = float(seen[place].max())
                panel.imshow(
                    overlay(grey, places.spread(seen[place] / max(largest, 1e-30), size)).numpy(),
                    interpolation="nearest",
                )
                if named:
                    _mark(panel, places.box(token, size))
                panel.set_xlabel(f"{largest:.0%}", fontsize=7, color=FAINT, labelpad=2)
                if row == 0:
                    panel.set_title(f"head {numbers[place] + 1}")
            axes[row][0].set_ylabel(layer_title(look.name, row))
    who = f"the pixel at row {chosen[0]}, column {chosen[1]} (outlined)" if named else "the class token"
    caption = (
        f"What {who} looks at, layer by layer and head by head: the bluer, the more weight. Each panel has its own "
        "scale; the number below is its largest weight."
    )
    if places.first:
        rest = [float(rows[:, : places.first].sum(-1).mean()) for rows in found]
        caption += f" {_share(rest)} of the weight, on average, goes to the {_first(places.first)} outside the image."
    return Picture(figure, caption, {"layers": drawn, "token": token, "query": chosen if named else None})


def greys(image: Tensor) -> Tensor:
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
