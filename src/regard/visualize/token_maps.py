"""What the tokens of a text look at: whole matrices, or one token's draw_top_keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from regard.errors import InputError
from regard.render.colors import ACCENT, INK, LINE, WEIGHT
from regard.visualize.attention_map import AttentionMap
from regard.visualize.image_maps import check_count, check_heads
from regard.visualize.labels import Percent, axis_end, head_title
from regard.visualize.picture import Picture, escape_missing, hide_axes, label_layer, make_panels, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LABELS = 32  # tokens that have their words beside them
MOST_CELLS = 128  # rows and columns of a matrix; longer texts are drawn in tiles
MOST_KEYS = 12  # keys that one token's picture lists
NUMBER = "#4a4f57"  # of a weight, on a bar as on paper


def draw_matrices(
    maps: Sequence[AttentionMap], heads: Sequence[int] | None = None, words: Sequence[str] | None = None
) -> Picture:
    """The weights of every pair: rows are queries, columns are keys; a row of panels for each layer.

    Texts of more than 128 tokens are drawn in tiles, each as dark as its largest weight; the square is never held.
    `words` label the keys, and the queries where there are as many.
    """
    longest = max(max(attention.queries, attention.keys) for attention in maps)
    cell = -(-longest // MOST_CELLS)
    found = [attention.pooled(cell).detach().float().cpu() for attention in maps]
    chosen = [check_heads(heads, len(square)) for square in found]
    columns = max(map(len, chosen))
    check_count(len(maps) * columns)
    labelled = words is not None and longest <= MOST_LABELS
    percent = Percent([float(square.max()) for square in found])
    drawn = {}
    with style():
        side = (0.16 * longest + 1.0) if labelled else 1.35
        figure, axes = make_panels(len(maps), columns, side, side + 0.3)
        for row, (attention, squares, numbers) in enumerate(zip(maps, found, chosen, strict=True)):
            drawn[attention.name] = squares[numbers]
            for place, panel in enumerate(axes[row]):
                hide_axes(panel)
                if place >= len(numbers):
                    panel.set_visible(False)
                    continue
                square = squares[numbers[place]]
                largest = float(square.max())
                panel.imshow(square.numpy(), cmap=_blues(), norm=_roots(largest), interpolation="nearest")
                for side_of in panel.spines.values():
                    side_of.set(visible=True, linewidth=0.5)
                if labelled and words is not None:
                    _label_ticks(panel, words, queries=attention.queries == len(words))
                panel.set_xlabel(f"max {percent(largest)}", fontsize=7, labelpad=2)
                if row == 0:
                    panel.set_title(head_title(numbers[place]))
            label_layer(axes[row][0], attention.title)
    caption = (
        "What each token looks at: rows are queries, columns are keys, darker is more weight, by its square root. Each "
        "panel has its own scale, from 0 to the weight below it."
    )
    if cell > 1:
        caption += f" One cell is {cell} by {cell} tokens, as dark as the largest weight in it."
    if words is not None and not labelled:
        caption += f" Words are left out, which {longest} tokens have no room for (up to {MOST_LABELS} have)."
    return Picture(figure, caption, {"layers": drawn, "cell": cell})


def draw_top_keys(
    maps: Sequence[AttentionMap], query: int, heads: Sequence[int] | None = None, words: Sequence[str] | None = None
) -> Picture:
    """What one token looks at most: a bar for each key, the heaviest first; only its own rows are computed.

    All bars of a picture share one axis, which ends at the first of 1, 2, 5, 10, 20, 50 and 100 % that holds them.
    """
    for attention in maps:
        if not 0 <= query < attention.queries:
            raise InputError(
                "There is no such token.",
                asked=f"query={query}",
                found=f"{attention.queries} tokens in {attention.name}",
                because="tokens are counted from 0",
                instead=f"query={attention.queries - 1}, the last",
            )
    found = [attention.rows([query])[:, 0].detach().float().cpu() for attention in maps]
    chosen = [check_heads(heads, len(rows)) for rows in found]
    columns = max(map(len, chosen))
    check_count(len(maps) * columns)
    seen = max(int((rows[numbers] > 0).sum(-1).max()) for rows, numbers in zip(found, chosen, strict=True))
    most = max(min(MOST_KEYS, seen), 1)
    largest = [float(rows[numbers].max()) for rows, numbers in zip(found, chosen, strict=True)]
    percent, end = Percent(largest), axis_end(largest)
    drawn = {}
    with style():
        figure, axes = make_panels(len(maps), columns, 1.7, 0.17 * most + 0.5)
        for row, (attention, rows, numbers) in enumerate(zip(maps, found, chosen, strict=True)):
            drawn[attention.name] = rows[numbers]
            for place, panel in enumerate(axes[row]):
                if place >= len(numbers):
                    panel.set_visible(False)
                    continue
                top = rows[numbers[place]].topk(min(most, attention.keys))
                own = query if attention.queries == attention.keys else None
                _draw_bars(panel, top, end, most, own, words, percent)
                if row == 0:
                    panel.set_title(head_title(numbers[place]))
            label_layer(axes[row][0], attention.title)
    named = words is not None and all(attention.queries == attention.keys for attention in maps)
    name = f" {words[query]!r}" if named and words is not None else ""
    caption = (
        f"What token {query}{name} looks at most, layer by layer and head by head: the position of each key, and its "
        f"weight. All bars share one axis, from 0 to {end:.0%}."
    )
    if seen > most:
        caption += f" Of {seen} keys that are seen the {most} with the most weight are listed."
    return Picture(figure, caption, {"layers": drawn, "query": query, "axis": end})


def _draw_bars(
    panel: Axes, top: Any, end: float, most: int, query: int | None, words: Sequence[str] | None, percent: Percent
) -> None:
    """Bars on tracks that show the whole axis; a word and a weight on each."""
    hide_axes(panel)
    panel.set_xticks([0, end], ["0", f"{end:.0%}"], fontsize=7)
    left, right = panel.get_xticklabels()
    left.set_horizontalalignment("left")
    right.set_horizontalalignment("right")
    panel.tick_params(length=0, pad=2)
    values, keys = (
        [number for number, weight in zip(each, top.values.tolist(), strict=True) if weight > 0]
        for each in (top.values.tolist(), top.indices.tolist())
    )
    lines = range(len(values))
    panel.barh(lines, [end] * len(lines), color=LINE, alpha=0.4, height=0.86, label="axis")
    panel.barh(lines, values, color=WEIGHT, alpha=0.28, height=0.86, label="weight")
    panel.set(xlim=(0, end), ylim=(most - 0.5, -0.5))
    room = 0.04 + 0.04 * len(str(max(keys, default=0)))  # for the position of the key
    for line, value, key in zip(lines, values, keys, strict=True):
        where: dict[str, Any] = {"transform": panel.get_yaxis_transform(), "va": "center_baseline", "fontsize": 7}
        color = ACCENT if key == query else NUMBER if words is not None else INK
        panel.text(room - 0.02, line, f"{key}", ha="right", color=color, **{**where, "fontsize": 6})
        if words is not None:
            color = ACCENT if key == query else INK
            panel.text(room + 0.01, line, escape_missing(f"{words[key]}"), color=color, parse_math=False, **where)
        panel.text(0.98, line, percent(value), ha="right", color=NUMBER, **where)


def _label_ticks(axes: Axes, words: Sequence[str], queries: bool) -> None:
    shown = [escape_missing(word) for word in words]
    axes.set_xticks(range(len(words)), shown, rotation=90, fontsize=7)
    if queries:
        axes.set_yticks(range(len(words)), shown, fontsize=7)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)
    axes.tick_params(length=0, pad=2)


def _roots(largest: float):
    """Shades by the square root: a row over many tokens has small weights, and they should be seen."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0, vmax=max(largest, 1e-30))


def _blues():
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("regard", [(1.0, 1.0, 1.0), (0.62, 0.77, 0.91), WEIGHT, (0.0, 0.12, 0.32)])
