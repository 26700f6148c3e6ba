"""Pictures of descriptions: which pairs a pattern allows, and what a bias says about distances."""

from __future__ import annotations

from numbers import Integral

import torch

from regard.biases import Bias
from regard.errors import InputError
from regard.patterns import Pattern
from regard.render.colors import ACCENT, LINE, MASK_HIDDEN, MASK_VISIBLE, head_color
from regard.render.svg import spread_labels
from regard.visualize.picture import Picture, hide_axes, make_panels, style

MOST_TOKENS = 1024


def draw_mask(pattern: Pattern, tokens: int, query: int | None = None) -> Picture:
    """The pairs that a pattern allows, rows are queries; the row of `query` is marked."""
    if tokens > MOST_TOKENS:
        raise InputError(
            "The pattern is too long to be drawn pair by pair.",
            asked=f"show({pattern!r}, {tokens})",
            because=f"beyond {MOST_TOKENS} tokens a pair is smaller than a dot",
            instead=f"show({pattern!r}, 64); plan(pattern, {tokens}) for what is computed",
        )
    if query is not None and (not isinstance(query, Integral) or not 0 <= query < tokens):
        raise InputError(
            "There is no such token.",
            asked=f"query={query!r}",
            found=f"{tokens} tokens",
            because="tokens are counted from 0",
            instead=f"query={tokens - 1}, the last",
        )
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
    caption = f"{pattern!r} over {tokens} tokens: rows are queries, columns are keys, {pairs:,} pairs may meet."
    return Picture(figure, caption, {"mask": found, "pairs": pairs})


def draw_bias(bias: Bias, tokens: int) -> Picture:
    """What a bias along a line adds to the score of a pair, by the distance from query to key, a line for each head."""
    if bias.needs_content:
        raise InputError(
            f"{type(bias).__name__} looks by content.",
            asked=f"show({type(bias).__name__}, {tokens})",
            because="its scores depend on the queries and keys themselves",
            instead="show(layer, tokens) of a layer that has it",
        )
    # A query at one end sees all distances to one side, a query at the other end those to the other.
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
        ends = spread_labels(scores[:, -1].tolist(), (high - low) / 22)  # a label is so high
        for head, place in enumerate(ends):
            style_of = {"color": head_color(head), "fontsize": 7, "va": "center"}
            panel.annotate(f"head {head}", (float(distance[-1]), place), (3, 0), textcoords="offset points", **style_of)
        panel.set_ylim(min(low, *ends), max(high, *ends))
    caption = (
        f"What {type(bias).__name__} adds to a score, by how far the key lies after the query; a line for each head."
    )
    return Picture(figure, caption, {"distance": distance, "scores": scores})
