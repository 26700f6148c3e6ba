"""Pictures of patterns and biases: the allowed pairs, and the scores by distance."""

from __future__ import annotations

import torch

from regard.biases import Bias
from regard.errors import InputError
from regard.patterns import Pattern
from regard.render.colors import ACCENT, LINE, MASK_HIDDEN, MASK_VISIBLE, head_color
from regard.render.svg import spread_labels
from regard.visualize.picture import Picture, hide_axes, make_panels, style
from regard.visualize.selection import select_indices

MOST_TOKENS = 1024


def draw_mask(pattern: Pattern, tokens: int, query: int | None = None) -> Picture:
    """The pairs that a pattern allows, rows are queries; the row of `query` is marked."""
    if tokens > MOST_TOKENS:
        raise InputError(
            "The pattern is too long to be drawn pair by pair.",
            asked=f"show({pattern!r}, {tokens})",
            because=f"with more than {MOST_TOKENS} tokens a pair is smaller than a pixel",
            instead=f"show({pattern!r}, 64); plan(pattern, {tokens}) for the tiles that are computed",
        )
    if query is not None:
        select_indices("query", [query], tokens, "tokens")
    found = pattern.matrix(tokens)
    found = (found if found.ndim == 2 else found[0]).cpu()
    with style():
        figure, axes = make_panels(1, 1, 3.2, 3.2)
        panel = axes[0][0]
        from matplotlib.colors import ListedColormap

        panel.imshow(
            found.numpy(), cmap=ListedColormap([MASK_HIDDEN, MASK_VISIBLE]), vmin=0, vmax=1, interpolation="nearest"
        )
        hide_axes(panel)
        panel.set(xlabel="key", ylabel="query")
        if tokens <= 64:
            edges = [place - 0.5 for place in range(1, tokens)]
            panel.hlines(edges, -0.5, tokens - 0.5, color="white", linewidth=0.6)
            panel.vlines(edges, -0.5, tokens - 0.5, color="white", linewidth=0.6)
        if query is not None:
            panel.axhspan(query - 0.5, query + 0.5, fill=False, edgecolor=ACCENT, linewidth=1.4)
    pairs = pattern.pairs(tokens)
    caption = f"{pattern!r} over {tokens} tokens: rows are queries, columns are keys, {pairs:,} pairs are allowed."
    return Picture(figure, caption, {"mask": found, "pairs": pairs})


def draw_bias(bias: Bias, tokens: int) -> Picture:
    """The scores of a one-dimensional bias by the distance from query to key, a line for each head."""
    if bias.needs_content:
        raise InputError(
            f"{type(bias).__name__} attends by content.",
            asked=f"show({type(bias).__name__}, {tokens})",
            because="its scores depend on the queries and keys",
            instead="show(layer, tokens) of a layer that has it",
        )
    # The last query has all distances to one side, the first those to the other.
    places = torch.arange(tokens)
    with torch.no_grad():
        before = bias.scores(torch.tensor(tokens - 1), places)
        after = bias.scores(torch.tensor(0), places)
    distance = torch.cat((places - tokens + 1, places[1:]))
    scores = torch.cat((before, after[:, 1:]), 1).float().cpu()  # (head, 2 tokens - 1)
    with style():
        figure, axes = make_panels(1, 1, 4.6, 2.8)
        panel = axes[0][0]
        panel.axvline(0, color=ACCENT, linewidth=1)
        for head, line in enumerate(scores):
            panel.plot(distance.numpy(), line.numpy(), color=head_color(head), linewidth=1.4)
        panel.grid(color=LINE, linewidth=0.6)
        panel.set(xlabel="key minus query", ylabel="bias")
        low, high = panel.get_ylim()
        ends = spread_labels(scores[:, -1].tolist(), (high - low) / 22)  # the height of a label
        for head, place in enumerate(ends):
            style_of = {"color": head_color(head), "fontsize": 7, "va": "center"}
            panel.annotate(f"head {head}", (float(distance[-1]), place), (3, 0), textcoords="offset points", **style_of)
        panel.set_ylim(min(low, *ends), max(high, *ends))
    caption = (
        f"What {type(bias).__name__} adds to a score, by how far the key lies after the query; a line for each head."
    )
    return Picture(figure, caption, {"distance": distance, "scores": scores})
