"""The rule for the classifier whose heads look by position: `SpatialTransformer`.

Where the weights are a product over rows and columns, what runs is the product of each axis alone, and that is what is
counted. Only `attention_dropout`, which drops entries of the square, needs the square in training, as the published
code always does: `backend="reference"` counts it for a model that has such dropout, and `backend=None` never.

Weights by position are the same for every image, so that there are scores and exponentials for one. What is kept is
what runs without dropout, whatever backend is asked about.

Published FLOPs are two for each multiply-add of linear layers, and leave the attention itself out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import sympy

from regard.cost_model import depth
from regard.cost_model.asked import Asked, Counted
from regard.cost_model.letters import letters
from regard.cost_model.part import ZERO, Part, Work, inside
from regard.cost_model.rules import pieces
from regard.cost_model.rules.grids import only_images
from regard.cost_model.rules.images import mean
from regard.cost_model.rules.shape import Shape
from regard.cost_model.rules.windows import meeting
from regard.cost_model.setting import Setting
from regard.errors import CostError
from regard.models.spatial import (
    ContentPosition,
    LearnedPosition,
    SpatialBlock,
    SpatialConfig,
    SpatialHeads,
    SpatialTransformer,
)

B, R, W, D, H = letters("B R W D H")
N = R * W  # tokens


def _spatial(model: SpatialTransformer, asked: Asked, setting: Setting) -> Counted:
    """Space to depth and a matrix; layers of attention and feed-forward, normalised after; a mean, and a matrix."""
    only_images(model, asked, setting)
    config = model.config
    if asked.image not in (None, config.image):
        raise CostError(
            "The images do not fit the model.",
            asked=f"image={asked.image}",
            found=f"a model for {config.image[0]} x {config.image[1]} pixels",
            because="its tables of positions were made for that size",
            instead="a SpatialConfig with that image, or no image= here",
        )
    hidden, layers, classes, channels, side = letters("F L A C p")
    values = {B: asked.batch, R: config.grid[0], W: config.grid[1], D: config.dim}
    values |= {hidden: config.hidden_dim, classes: config.classes, channels: config.channels, side: config.patch}
    blocks = []
    for heads, count in Counter(config.layer_heads).items():
        block = _block(config, heads, hidden, asked.batch, setting)
        blocks.append(
            pieces.Found(inside("block", *pieces.repeated(block, layers)), values | {H: heads, layers: count})
        )
    found = pieces.merged(*blocks)  # where layers differ in their heads, these are numbers and no letter
    parts = [
        pieces.linear("embedding", setting, B * N, channels * side**2, D, learns_input=False),
        *found.parts,
        mean("mean", setting, B, N, D),
        pieces.linear("classifier", setting, B, D, classes),
    ]
    notes = ()
    if _is_separable(config):
        notes = ("The square is multiplied out." if _is_square(config, setting) else "Rows and columns, one by one.",)
    return Counted("SpatialTransformer", parts, found.values, notes)


def _block(config: SpatialConfig, heads: int, hidden: sympy.Expr, batch: int, setting: Setting) -> list[Part]:
    """Attention and feed-forward, each added and normalised after."""
    return [
        *inside("attention", *_attention(config, heads, batch, setting)),
        pieces.linear("dense", setting, B * N, D, D),
        pieces.addition("attention_add", setting, B * N * D),
        pieces.norm("attention_norm", setting, B * N, D),
        pieces.linear("inner", setting, B * N, D, hidden),
        pieces.bent("bend", setting, B * N * hidden, "gelu"),
        pieces.linear("outer", setting, B * N, hidden, D),
        pieces.addition("add", setting, B * N * D),
        pieces.norm("norm", setting, B * N, D),
    ]


def _is_separable(config: SpatialConfig) -> bool:
    return config.position in ("quadratic", "learned")


def _is_square(config: SpatialConfig, setting: Setting) -> bool:
    """Whether all pairs are multiplied out although they need not be."""
    return setting.backend == "reference" and config.attention_dropout > 0


def _attention(config: SpatialConfig, heads: int, batch: int, setting: Setting) -> list[Part]:
    """Where to look, the weighted means of all heads, and the matrix that reads all of them."""
    if config.position == "content":
        looked = _by_content(config, heads, batch, setting)
    elif config.position == "gaussian":
        looked = _by_covariance(setting)
    else:
        scores = _quadratic(setting) if config.position == "quadratic" else _learned(setting)
        looked = [scores, *(_square(setting) if _is_square(config, setting) else _axes(setting))]
        looked = [replace(part, kept=ZERO) for part in looked]
        looked.append(Part("kept", kept=_kept_by_axes(config, heads, batch, setting)))
    # Heads that lie one after the other are copied side by side; one head, or one token, lies right already.
    copied = _is_separable(config) or (heads > 1 and config.grid != (1, 1))
    return [*looked, pieces.linear("value", setting, B * N, H * D, D, keeps=copied)]


# One axis after the other


def _quadratic(setting: Setting) -> Part:
    """`-alpha (delta - centre)^2` along each axis: a centre for each and a spread, 3 numbers to a head."""
    work = Work(bytes=setting.item * 4 * H * (R**2 + W**2), depth=sympy.Integer(3))
    return Part("positions", parameters=3 * H, forward=work, backward=work)


def _learned(setting: Setting) -> Part:
    """A vector for each relative row and column, and two for each head: `H D (2 R - 1) + H D (2 W - 1)` products."""
    table = (2 * R - 1) + (2 * W - 1)
    read = (table + 2 * H) * D
    forward = Work(
        macs=table * H * D,
        bytes=setting.item * (read + table * H + 2 * H * (R**2 + W**2)),
        depth=depth.inner(D, setting.serial),
    )
    # An entry of the table is read once in every row of the scores, of which it gets the gradients back.
    longest = sympy.Max(R, W)
    backward = Work(
        macs=2 * table * H * D,
        bytes=setting.item * (2 * read + table * H + 2 * H * (R**2 + W**2)),
        depth=depth.total(longest, setting.serial) + depth.inner(H, setting.serial),
    )
    return Part("positions", parameters=read, forward=forward, backward=backward)


def _axes(setting: Setting) -> list[Part]:
    """A softmax along each axis, then all columns, then all rows: `R W (R + W)` products for each head and channel."""
    item, scores = setting.item, H * (R**2 + W**2)
    longest, tokens = sympy.Max(R, W), B * H * N * D
    softmax = Part(
        "softmax",
        forward=Work(
            exponentials=scores,
            bytes=item * 2 * scores,
            depth=depth.softmax(longest, stable=setting.stable, serial=setting.serial),
        ),
        backward=Work(bytes=item * 3 * scores, depth=depth.inner(longest, setting.serial) + 2),
        pairs=B * H * N**2,
    )
    columns = Part(
        "means.columns",
        forward=Work(
            macs=tokens * W,
            bytes=item * (H * W**2 + B * N * D + tokens),
            depth=depth.inner(W, setting.serial),
        ),
        backward=Work(
            macs=2 * tokens * W,
            bytes=item * (2 * H * W**2 + 2 * B * N * D + tokens),
            depth=depth.inner(W * H, setting.serial),
        ),
    )
    rows = Part(
        "means.rows",
        forward=Work(macs=tokens * R, bytes=item * (H * R**2 + 2 * tokens), depth=depth.inner(R, setting.serial)),
        backward=Work(
            macs=2 * tokens * R, bytes=item * (2 * H * R**2 + 3 * tokens), depth=depth.inner(R, setting.serial)
        ),
    )
    return [softmax, columns, rows]


def _square(setting: Setting) -> list[Part]:
    """The same with all pairs multiplied out: `N^2` products for each head and channel.

    The two softmaxes stay: their products are the square.
    """
    item, square, tokens = setting.item, H * N**2, B * H * N * D
    softmax = _axes(setting)[0]
    spread = Work(bytes=item * square, depth=pieces.ONE)
    softmax = replace(softmax, forward=softmax.forward + spread, backward=softmax.backward + spread)
    means = Part(
        "means",
        forward=Work(
            macs=B * square * D,
            bytes=item * (square + B * N * D + tokens),
            depth=depth.inner(N, setting.serial),
        ),
        backward=Work(
            macs=2 * B * square * D,
            bytes=item * (2 * square + 2 * B * N * D + tokens),
            depth=depth.inner(N * H, setting.serial),
        ),
    )
    return [softmax, means]


def _kept_by_axes(config: SpatialConfig, heads: int, batch: int, setting: Setting) -> sympy.Expr:
    """What the two products keep: weights, tokens with columns last, and the means over columns with rows last.

    The softmax keeps its result as well, and a byte for each query that says whether it sees anything. torch multiplies
    batches of matrices, for which the rows' weights of several heads are written out for every image.
    """
    scores = H * (R**2 + W**2)
    weights = H * W**2 + H * R**2 * (B if batch > 1 and heads > 1 else 1)
    numbers, marks = scores + weights + B * N * D + B * H * N * D, H * (R + W)
    if config.position == "quadratic":
        # Differences and their squares, and alpha with another sign, for each axis.
        return setting.item * (numbers + 2 * scores + 2 * H) + marks
    return setting.item * numbers + pieces.INDEX * (R**2 + W**2) + marks  # where each score is in the tables


# All pairs


def _by_covariance(setting: Setting) -> list[Part]:
    """Scores from a table of all relative positions; all heads share the tokens as values."""
    item, entries = setting.item, (2 * R - 1) * (2 * W - 1)
    table = Work(bytes=item * 6 * H * entries, depth=sympy.Integer(6))
    # Offsets along both axes, two sums that are squared and the table; four numbers of a head's matrix; the head's
    # number; which entries lie on the grid, in bytes.
    kept = item * (5 * H * entries + 4 * H) + pieces.INDEX * H + entries
    positions = Part("positions", parameters=6 * H, forward=table, backward=table, kept=kept)
    # Scores without content are asked for as those of queries and keys of one channel, which is zero, which nobody
    # learns, and of which one number is kept.
    square = B * H * N**2
    again = square if setting.backend in ("native", "blocked") else ZERO
    scores = Part(
        "scores", forward=Work(macs=square), backward=Work(macs=again), kept=sympy.Integer(item), pairs=square
    )
    shape = Shape(B, N, N, H, pieces.ONE, pieces.ONE, D)
    _, softmax, means = meeting(shape, setting, longest=N, met=square, area=square)
    return [positions, scores, softmax, replace(means, name="means")]


def _by_content(config: SpatialConfig, heads: int, batch: int, setting: Setting) -> list[Part]:
    """Queries and keys from the tokens, whose products with tables and positions are further channels of them.

    q = [q, q . row[k - r] for every row k, q . column[l - c] for every column l],   k = [k, one-hot row and column]
    """
    item, wide, tokens = setting.item, D + R + W, B * H * N
    query = pieces.linear("query", setting, B * N, D, H * D)
    key = pieces.linear("key", setting, B * N, D, H * D, keeps=False)
    half = D / 2
    tables = (2 * R - 1 + 2 * W - 1) * half
    # With one channel for each table there is no sum, and torch multiplies number by number.
    products = tokens * half * (R + W) if config.dim > 2 else ZERO
    picked = (R**2 + W**2) * half
    positions = Part(
        "positions",
        parameters=tables,
        forward=Work(
            macs=products,
            bytes=item * (tables + 2 * picked + tokens * (D + 2 * wide)),
            depth=depth.inner(half, setting.serial),
        ),
        backward=Work(
            macs=2 * products,
            bytes=item * (tables + 2 * picked + 2 * tokens * (D + 2 * wide)),
            depth=depth.inner(sympy.Max(R, W), setting.serial) + 1,
        ),
        # Rows of the tables for all pairs of rows and of columns, where they are, and both halves of the queries.
        kept=item * (picked + _kept_queries(config, heads, batch)) + pieces.INDEX * (R**2 + W**2),
    )
    square = tokens * N
    shape = Shape(B, N, N, H, H, wide, D)
    scores, softmax, means = meeting(shape, setting, longest=N, met=square, area=square)
    # The tokens are queries', keys' and values' one source, and kept once, for the queries.
    means = replace(means, name="means", kept=item * shape.output)
    return [pieces.beside("projections", query, key), positions, scores, softmax, means]


def _kept_queries(config: SpatialConfig, heads: int, batch: int) -> sympy.Expr:
    """Numbers that the products with the tables keep of the queries.

    For a product all queries of a row are laid one below the other, and then all of a column: each time half of their
    channels is copied. Where they lie so already there is no copy, and the queries themselves are kept.
    """
    rows, columns = config.grid
    down = batch == 1 or rows == 1 or columns * heads == 1
    across = heads == 1 or columns == 1 or batch * rows == 1
    copies = (not down) + (not across) if config.dim > 2 else 0
    return B * H * N * (sympy.Rational(copies, 2) * D + (D if copies < 2 else 0))


RULES = {SpatialTransformer: _spatial}
# What it is made of, and has no rule of its own.
PARTS = (SpatialBlock, SpatialHeads, LearnedPosition, ContentPosition)
