"""What the tokens of a text look at: whole matrices, or one token's favourites."""

from __future__ import annotations

from collections.abc import Sequence

from regard.errors import InputError
from regard.show.colours import ACCENT, FAINT, INK, LOOK
from regard.show.heads import layer_title
from regard.show.looking import Look
from regard.show.maps import check_count, check_heads
from regard.show.picture import Picture, bare, panels, style

MOST_LABELS = 32  # tokens that have their words beside them
MOST_CELLS = 128  # rows and columns of a matrix; longer texts are drawn in tiles
MOST_KEYS = 12  # keys that one token's picture lists


def matrices(looks: Sequence[Look], heads: Sequence[int] | None = None, words: Sequence[str] | None = None) -> Picture:
    """The weights of every pair: rows are queries, columns are keys; a row of panels for each layer.

    Texts of more than 128 tokens are drawn in tiles, each as dark as its largest weight; the square is never held.
    """
    longest = max(max(look.queries, look.keys) for look in looks)
    cell = -(-longest // MOST_CELLS)
    found = [look.pooled(cell).detach().float().cpu() for look in looks]
    chosen = [check_heads(heads, len(square)) for square in found]
    columns = max(map(len, chosen))
    check_count(len(looks) * columns)
    labelled = words is not None and longest <= MOST_LABELS and all(look.queries == look.keys for look in looks)
    drawn = {}
    with style():
        side = (0.16 * longest + 1.0) if labelled else 1.35
        figure, axes = panels(len(looks), columns, side, side + 0.2)
        for row, (look, squares, numbers) in enumerate(zip(looks, found, chosen, strict=True)):
            drawn[look.name] = squares[numbers]
            for place, panel in enumerate(axes[row]):
                bare(panel)
                if place >= len(numbers):
                    panel.set_visible(False)
                    continue
                square = squares[numbers[place]]
                panel.imshow(square.numpy(), cmap=_blues(), norm=_roots(float(square.max())), interpolation="nearest")
                for side_of in panel.spines.values():
                    side_of.set(visible=True, linewidth=0.5)
                if labelled:
                    _words(panel, words or ())
                if row == 0:
                    panel.set_title(f"head {numbers[place] + 1}")
            axes[row][0].set_ylabel(layer_title(look.name, row))
    caption = (
        "What each token looks at: rows are queries, columns are keys, darker is more weight, by its square root. Each "
        "panel has its own scale."
    )
    if cell > 1:
        caption += f" One cell is {cell} by {cell} tokens, as dark as the largest weight in it."
    return Picture(figure, caption, {"layers": drawn, "cell": cell})


def favourites(
    looks: Sequence[Look], query: int, heads: Sequence[int] | None = None, words: Sequence[str] | None = None
) -> Picture:
    """What one token looks at most: a bar for each key, the heaviest first; only its own rows are computed.

    Bars are as long as the weight, on a scale that ends at the largest, or at 20 % where none is as large.
    """
    for look in looks:
        if not 0 <= query < look.queries:
            raise InputError(
                "There is no such token.",
                asked=f"query={query}",
                found=f"{look.queries} tokens in {look.name}",
                because="tokens are counted from 0",
                instead=f"query={look.queries - 1}, the last",
            )
    found = [look.rows([query])[:, 0].detach().float().cpu() for look in looks]
    chosen = [check_heads(heads, len(rows)) for rows in found]
    columns = max(map(len, chosen))
    check_count(len(looks) * columns)
    most = min(MOST_KEYS, max(look.keys for look in looks))
    drawn = {}
    with style():
        figure, axes = panels(len(looks), columns, 1.7, 0.17 * most + 0.4)
        for row, (look, rows, numbers) in enumerate(zip(looks, found, chosen, strict=True)):
            drawn[look.name] = rows[numbers]
            for place, panel in enumerate(axes[row]):
                bare(panel)
                if place >= len(numbers):
                    panel.set_visible(False)
                    continue
                top = rows[numbers[place]].topk(min(most, look.keys))
                panel.barh(range(len(top.values)), top.values.tolist(), color=LOOK, alpha=0.28, height=0.86)
                panel.set(xlim=(0, max(float(top.values[0]), 0.2)), ylim=(most - 0.5, -0.5))
                for line, (value, key) in enumerate(zip(top.values.tolist(), top.indices.tolist(), strict=True)):
                    own = words is not None and key < len(words)
                    label = f"{words[key]!s}" if own and words is not None else f"{key}"
                    where = {"transform": panel.get_yaxis_transform(), "va": "center", "fontsize": 7}
                    panel.text(0.01, line, label, color=ACCENT if key == query else INK, **where)
                    panel.text(0.99, line, _percent(value), ha="right", color=FAINT, **where)
                if row == 0:
                    panel.set_title(f"head {numbers[place] + 1}")
            axes[row][0].set_ylabel(layer_title(look.name, row))
    name = f" {words[query]!r}" if words is not None and query < len(words) else ""
    caption = f"What token {query}{name} looks at most, layer by layer and head by head."
    longest = max(look.keys for look in looks)
    if longest > most:
        caption += f" Of {longest} keys the {most} with the most weight are listed."
    return Picture(figure, caption, {"layers": drawn, "query": query})


def _words(axes, words: Sequence[str]) -> None:
    axes.set_xticks(range(len(words)), words, rotation=90, fontsize=7)
    axes.set_yticks(range(len(words)), words, fontsize=7)
    axes.tick_params(length=0, pad=2)


def _roots(largest: float):
    """Shades by the square root: a row over many tokens has small weights, and they should be seen."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0, vmax=max(largest, 1e-30))


def _percent(value: float) -> str:
    return f"{value:.0%}" if value >= 0.0995 else f"{value:.1%}" if value >= 0.000995 else f"{value:.0e}"


def _blues():
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("regard", [(1.0, 1.0, 1.0), (0.62, 0.77, 0.91), LOOK, (0.0, 0.12, 0.32)])
