"""Attention maps of texts: whole matrices, or the largest weights of one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from regard.render.colors import ACCENT, INK, LINE, WEIGHT
from regard.visualize.attention_map import AttentionMap
from regard.visualize.interactive import attention_data, fits_a_page, render_attention
from regard.visualize.labels import Percent, axis_end
from regard.visualize.picture import Picture, draw_per_head, escape_missing, hide_axes, style
from regard.visualize.selection import select_indices

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LABELS = 32  # tokens that are labelled
MOST_CELLS = 128  # rows and columns of a matrix; longer texts are pooled
MOST_KEYS = 12  # keys that are listed for one token
NUMBER = "#4a4f57"  # color of weights, on a bar and on paper


def draw_matrices(
    maps: Sequence[AttentionMap],
    heads: Sequence[int] | None = None,
    words: Sequence[str] | None = None,
    query_words: Sequence[str] | None = None,
) -> Picture:
    """The weights of all pairs: rows are queries, columns are keys; a row of panels for each layer.

    Texts of more than 128 tokens are max-pooled; the whole matrix is never in memory. `words` label the keys, and the
    queries where there are as many; `query_words` are those of cross-attention.
    """
    longest = max(max(attention.queries, attention.keys) for attention in maps)
    cell = -(-longest // MOST_CELLS)
    pooled = [attention.pooled(cell).detach().float().cpu() for attention in maps]
    selected = [select_indices("head", heads, len(square)) for square in pooled]
    drawn = [square[chosen] for square, chosen in zip(pooled, selected, strict=True)]
    labels = words if words is not None and longest <= MOST_LABELS else None
    percent = Percent([float(square.max()) for square in pooled])

    def draw(panel: Axes, layer: int, column: int) -> None:
        from matplotlib.colors import PowerNorm

        hide_axes(panel, frame=True)
        square = drawn[layer][column]
        largest = float(square.max())
        # Shades by the square root: the small weights of a row over many tokens stay visible.
        norm = PowerNorm(0.5, vmin=0, vmax=max(largest, 1e-30))
        panel.imshow(square.numpy(), cmap=_make_colormap(), norm=norm, interpolation="nearest")
        if labels is not None:
            own = labels if query_words is None else query_words
            _label_ticks(panel, labels, own if maps[layer].queries == len(own) else None)
        panel.set_xlabel(f"max {percent(largest)}", fontsize=7, labelpad=2)

    with style():
        side = 1.35 if labels is None else 0.16 * longest + 1.0
        figure = draw_per_head(maps, selected, side, side + 0.3, draw)
    caption = (
        "Attention weights: rows are queries, columns are keys, darker is larger, by the square root. Each panel has "
        "its own scale, from 0 to the weight below it."
    )
    if cell > 1:
        caption += f" One cell is {cell} by {cell} tokens and shows the largest weight among them."
    if words is not None and labels is None:
        caption += f" Words are left out: {longest} tokens, and up to {MOST_LABELS} are labelled."
    data = {attention.name: squares for attention, squares in zip(maps, drawn, strict=True)}
    picture = Picture(figure, caption, {"layers": data, "cell": cell})
    if fits_a_page(maps, [len(chosen) for chosen in selected]):
        picture.page = lambda caption: render_attention(attention_data(maps, selected, words, query_words), caption)
    return picture


def draw_top_keys(
    maps: Sequence[AttentionMap], query: int, heads: Sequence[int] | None = None, words: Sequence[str] | None = None
) -> Picture:
    """The largest weights of one token: a bar for each key, in descending order; only its own rows are computed.

    All bars of a picture share one axis, which ends at the first of 1, 2, 5, 10, 20, 50 and 100 % that holds them.
    """
    for attention in maps:
        select_indices("query", [query], attention.queries, f"tokens in {attention.name}")
    rows = [attention.rows([query])[:, 0].detach().float().cpu() for attention in maps]
    selected = [select_indices("head", heads, len(weights)) for weights in rows]
    drawn = [weights[chosen] for weights, chosen in zip(rows, selected, strict=True)]
    visible = max(int((weights > 0).sum(-1).max()) for weights in drawn)
    most = max(min(MOST_KEYS, visible), 1)
    largest = [float(weights.max()) for weights in drawn]
    percent, end = Percent(largest), axis_end(largest)

    def draw(panel: Axes, layer: int, column: int) -> None:
        attention = maps[layer]
        top = drawn[layer][column].topk(min(most, attention.keys))
        own = query if attention.queries == attention.keys else None
        _draw_bars(panel, top, end, most, own, words, percent)

    with style():
        figure = draw_per_head(maps, selected, 1.7, 0.17 * most + 0.5, draw)
    is_self_attention = all(attention.queries == attention.keys for attention in maps)
    name = f" {words[query]!r}" if is_self_attention and words is not None else ""
    caption = (
        f"The largest weights of token {query}{name}, for each layer and head: the position of each key, and its "
        f"weight. All bars share one axis, from 0 to {end:.0%}."
    )
    if visible > most:
        caption += f" Of {visible} visible keys the {most} with the largest weights are listed."
    data = {attention.name: weights for attention, weights in zip(maps, drawn, strict=True)}
    return Picture(figure, caption, {"layers": data, "query": query, "axis": end})


def _draw_bars(
    panel: Axes, top: Any, end: float, most: int, query: int | None, words: Sequence[str] | None, percent: Percent
) -> None:
    """Bars over the whole axis, each with the position, the word and the weight of a key."""
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


def _label_ticks(axes: Axes, keys: Sequence[str], queries: Sequence[str] | None) -> None:
    axes.set_xticks(range(len(keys)), [escape_missing(word) for word in keys], rotation=90, fontsize=7)
    if queries is not None:
        axes.set_yticks(range(len(queries)), [escape_missing(word) for word in queries], fontsize=7)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)
    axes.tick_params(length=0, pad=2)


def _make_colormap():
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("regard", [(1.0, 1.0, 1.0), (0.62, 0.77, 0.91), WEIGHT, (0.0, 0.12, 0.32)])
