"""What layers cost: linear layers, norms, positions, feed-forward parts and blocks; `multihead.py` has attention.

A layer alone reads tokens that came from somewhere, so their gradient is asked for; but what came in belongs to
whoever made it, so that a layer does not count it among what it keeps. Inside a model the same functions are told
`keeps=True`, and then do.

In a decoding step one token comes in, and an attention finds the keys and values of `N` others in its cache.
"""

from __future__ import annotations

import math
from typing import Any

import sympy
from torch import nn

from regard.cost_model import depth
from regard.cost_model.asked import Asked, Counted
from regard.cost_model.letters import letter, letters
from regard.cost_model.part import Part, Work
from regard.cost_model.rules import pieces
from regard.cost_model.rules.multihead import RULES as ATTENTIONS
from regard.cost_model.rules.multihead import Looking, looking_at, multi_head_parts
from regard.cost_model.rules.pieces import Found
from regard.cost_model.rules.reading import Reading
from regard.cost_model.setting import Setting
from regard.layers.block import BlockList, TransformerBlock
from regard.layers.feedforward import FeedForward
from regard.layers.linear import Linear
from regard.layers.positions import GridPositions, LearnedPositions, SinusoidalPositions
from regard.layers.rotary import Rotary

# One matrix, one norm, one table


def linear_rule(layer: nn.Linear, asked: Asked, setting: Setting) -> Counted:
    reading = Reading.of(asked, setting)
    width, out = letters("D O")
    values = {width: layer.in_features, out: layer.out_features}
    part = pieces.linear("linear", setting, reading.rows, width, out, bias=layer.bias is not None, keeps=False)
    return reading.counted(type(layer).__name__, Found([part], values))


def norm_rule(layer: nn.LayerNorm | nn.RMSNorm, asked: Asked, setting: Setting) -> Counted:
    reading = Reading.of(asked, setting)
    width = letter("D")
    part = norm_part("norm", layer, setting, reading.rows, width, keeps=False)
    return reading.counted(type(layer).__name__, Found([part], {width: math.prod(layer.normalized_shape)}))


def norm_part(name: str, layer: Any, setting: Setting, rows: Any, width: Any, *, keeps: bool = True) -> Part:
    return pieces.norm(
        name,
        setting,
        rows,
        width,
        kind="layer" if isinstance(layer, nn.LayerNorm) else "rms",
        keeps=keeps,
        weight=layer.weight is not None,
        bias=getattr(layer, "bias", None) is not None,
    )


def embedding_rule(layer: nn.Embedding, asked: Asked, setting: Setting) -> Counted:
    reading = Reading.of(asked, setting)
    count, width = letters("V D")
    values = {count: layer.num_embeddings, width: layer.embedding_dim}
    part = pieces.embedding("embedding", setting, reading.rows, count, width)
    return reading.counted("Embedding", Found([part], values))


def learned_rule(layer: LearnedPositions, asked: Asked, setting: Setting) -> Counted:
    """Positions are the same for every row of a batch, so that a row of the table is read once."""
    reading = Reading.of(asked, setting)
    count, width = letters("S D")
    values = {count: layer.weight.shape[0], width: layer.weight.shape[1]}
    part = pieces.embedding("positions", setting, reading.tokens, count, width)
    return reading.counted("LearnedPositions", Found([part], values))


def sinusoidal_rule(layer: SinusoidalPositions, asked: Asked, setting: Setting) -> Counted:
    reading = Reading.of(asked, setting)
    width = letter("D")
    part = sinusoids("positions", setting, reading.tokens, width)
    return reading.counted("SinusoidalPositions", Found([part], {width: layer.dim}))


def sinusoids(name: str, setting: Setting, tokens: Any, width: Any) -> Part:
    """The table is made of nothing but positions: an angle and its sine, nothing to learn and nothing to keep."""
    return Part(name, forward=Work(bytes=pieces.INDEX * tokens + setting.item * tokens * width, depth=2 * pieces.ONE))


def grid_rule(layer: GridPositions, asked: Asked, setting: Setting) -> Counted:
    """The table itself for the grid that was learned; for another one, its rows are read and mixed without products.

    The bicubic mixing is four numbers along each axis, whose weights are no parameters.
    """
    rows, columns, width = letters("R W D")
    values = {rows: layer.grid[0], columns: layer.grid[1], width: layer.weight.shape[1]}
    learned = (layer.first + rows * columns) * width
    work = Work()
    if asked.image is not None and tuple(asked.image) != layer.grid:
        other = (layer.first + asked.image[0] * asked.image[1]) * width
        work = Work(bytes=setting.item * (learned + other), depth=2 * depth.inner(4, setting.serial))
    return Counted("GridPositions", [Part("positions", parameters=learned, forward=work, backward=work)], values)


def rotary_rule(layer: Rotary, asked: Asked, setting: Setting) -> Counted:
    """Queries or keys turned, by a rotation that somebody made: two products of numbers and a sum."""
    reading = Reading.of(asked, setting)
    heads, channels = letters("H d")
    values = {channels: layer.dim if asked.dim is None else asked.dim, heads: asked.heads or 1}
    part = pieces.elementwise("rotary", setting, reading.rows * heads * channels, steps=2)
    return reading.counted("Rotary", Found([part], values))


# Feed-forward


def feed_forward_rule(layer: FeedForward, asked: Asked, setting: Setting) -> Counted:
    reading = Reading.of(asked, setting)
    width = letter("D")
    return reading.counted("FeedForward", feed_forward_parts(layer, setting, reading.rows, width, keeps=False))


def feed_forward_parts(layer: FeedForward, setting: Setting, rows: Any, width: Any, *, keeps: bool = True) -> Found:
    """Two products and a bend.

    Gate and channels of a gated one lie in one tensor, which is kept whole, and their product keeps the bent gate.
    """
    hidden = letter("F")
    bias = layer.inner.bias is not None
    parts = [
        pieces.linear("inner", setting, rows, width, hidden * (2 if layer.gated else 1), bias=bias, keeps=keeps),
        pieces.bent("bend", setting, rows * hidden, layer.activation),
    ]
    if layer.gated:
        parts[1] = pieces.elementwise("bend", setting, rows * hidden, keeps=2 * rows * hidden)
        parts.append(pieces.elementwise("gate", setting, rows * hidden, reads=2, keeps=rows * hidden))
    parts.append(pieces.linear("outer", setting, rows, hidden, width, bias=layer.outer.bias is not None))
    return Found(parts, {width: layer.inner.in_features, hidden: layer.outer.in_features})


# Blocks


def block_rule(block: TransformerBlock, asked: Asked, setting: Setting) -> Counted:
    reading = Reading.of(asked, setting)
    other = None
    if block.cross is not None:
        count = asked.context_tokens if asked.context_tokens is not None else asked.keys
        other = Reading.of(asked, setting, "T", count)
    found = block_parts(block, setting, reading, other, letter("D"), keeps=False)
    return reading.counted(
        "TransformerBlock", found if other is None else pieces.merged(found, Found([], other.values))
    )


def block_parts(
    block: TransformerBlock,
    setting: Setting,
    reading: Reading,
    other: Reading | None,
    width: sympy.Symbol,
    *,
    keeps: bool = True,
    makes_rotation: bool = True,
) -> Found:
    """Attention, perhaps attention to another text, and feed-forward, each with its norm and its way past.

    A norm keeps what it reads and the first product after it what the norm has made; sums keep nothing. So before a
    part the residual is kept twice, as it is and normalised; after a part only the sum that is normalised.

    other: the other text; it is kept once for all blocks, by whoever counts them.
    keeps: whether what comes in is kept by this block.
    """
    rows = reading.rows
    outer = width if block.attention.sizes.output == block.attention.sizes.input else letter("O")
    before = block.order == "pre"
    looking = looking_at(block.attention, reading)
    several = [
        multi_head_parts(
            block.attention, setting, reading, looking, width, keeps=before or keeps, makes_rotation=makes_rotation
        ).inside("attention")
    ]
    if block.shortcut is not None:
        # It reads what the attention, or the norm before it, keeps already, and is done long before it.
        past = pieces.linear("shortcut", setting, rows, width, outer, bias=False, keeps=False)
        numbers = {width: block.shortcut.in_features, outer: block.shortcut.out_features}
        several.append(Found([pieces.aside(past)], numbers))
    if block.cross is not None and other is not None:
        seen = Looking(other.tokens, other.values, other=True, cached=reading.past is not None)
        several.append(multi_head_parts(block.cross, setting, reading, seen, outer).inside("cross"))
    several.append(feed_forward_parts(block.feed_forward, setting, rows, outer).inside("feed_forward"))
    found = pieces.merged(*several)

    def wrapped(name: str, channels: Any, keeps: bool = True) -> list[Part]:
        """The parts of this name between their norm and their sum."""
        layer = getattr(block, f"{name}_norm")
        if before:
            begin = [norm_part(f"{name}_norm", layer, setting, rows, channels, keeps=keeps)]
            end = [pieces.addition(f"{name}_add", setting, rows * outer)]
        else:
            begin = []
            end = [
                pieces.addition(f"{name}_add", setting, rows * outer),
                norm_part(f"{name}_norm", layer, setting, rows, outer),
            ]
        return [*begin, *(part for part in found.parts if part.name.startswith(f"{name}.")), *end]

    whole = [part for part in found.parts if part.name == "shortcut"]
    whole += wrapped("attention", width, keeps)
    whole += wrapped("cross", outer) if block.cross is not None else []
    return found._replace(parts=whole + wrapped("feed_forward", outer))


RULES = {
    Linear: linear_rule,
    nn.Linear: linear_rule,
    nn.LayerNorm: norm_rule,
    nn.RMSNorm: norm_rule,
    nn.Embedding: embedding_rule,
    LearnedPositions: learned_rule,
    SinusoidalPositions: sinusoidal_rule,
    GridPositions: grid_rule,
    Rotary: rotary_rule,
    FeedForward: feed_forward_rule,
    TransformerBlock: block_rule,
    **ATTENTIONS,
}
# What holds blocks and has no formula of its own.
PARTS = (BlockList,)
