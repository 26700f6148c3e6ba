"""Rules for the classifiers of images: ViT and DaViT."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import sympy

from regard.cost_model import depth
from regard.cost_model.asked import Asked, Counted
from regard.cost_model.letters import letter, letters
from regard.cost_model.part import ZERO, Part, Work, inside
from regard.cost_model.rules import pieces
from regard.cost_model.rules.grids import (
    channel_parts,
    convolution,
    copied_patches,
    is_product,
    only_images,
    only_whole,
    patches,
    singles_of,
)
from regard.cost_model.rules.reading import Reading
from regard.cost_model.rules.text import stack_blocks
from regard.cost_model.rules.windows import Windows
from regard.cost_model.setting import Setting
from regard.layers.linear import Linear
from regard.models import davit
from regard.models.davit import ConvolutionalPosition, DaViT, DaViTBlock, DaViTConfig, Head, PatchMerging, Stage, Stem
from regard.models.vit import ViT

Values = dict[sympy.Symbol, Any]


def mean(name: str, setting: Setting, rows: Any, summed: Any, channels: Any) -> Part:
    """The mean of `summed` tokens in each of `rows` images: nothing of it is kept."""
    moved = setting.item * rows * channels * (summed + 1)
    return Part(
        name,
        forward=Work(bytes=moved, depth=depth.total(summed, setting.serial) + 1),
        backward=Work(bytes=moved, depth=pieces.ONE),
    )


# ViT


def _vit(model: ViT, asked: Asked, setting: Setting) -> Counted:
    """Patches and a class token, blocks over all of them, a norm, and a matrix for the classes.

    N tokens are `(rows / patch) (columns / patch) + 1`. An image of another size than was learned has interpolated
    positions (`resize=True`), which takes no products.
    """
    only_images(model, asked, setting)
    config = model.config
    image = config.image if asked.image is None else asked.image
    only_whole(image, config.patch)
    batch, tokens, width, channels, side, classes, learned = letters("B N D C p A S")
    places = (image[0] // config.patch) * (image[1] // config.patch)
    numbers = {batch: asked.batch, tokens: places + 1}
    reading = Reading(batch, tokens, places + 1, numbers)
    values: Values = {channels: config.channels, side: config.patch, **numbers}
    values |= {classes: config.classes, learned: model.positions.weight.shape[0]}

    sizes = (channels, side, width, tokens - 1)
    seen = dataclasses.replace(asked, image=image)
    kept = setting.item * batch * channels * side**2 * (tokens - 1) if copied_patches(model.patches, seen) else ZERO
    parts = [
        patches("patches", setting, model.patches, batch=batch, sizes=sizes, kept=kept),
        dataclasses.replace(pieces.copying("class_token", setting, reading.rows * width), parameters=width),
        dataclasses.replace(pieces.addition("positions", setting, reading.rows * width), parameters=learned * width),
    ]
    blocks = stack_blocks("block", model.blocks, setting, reading, None, width)
    parts += blocks.parts
    parts.append(pieces.norm("norm", setting, reading.rows, width))
    if config.pool == "mean":
        parts.append(mean("mean", setting, batch, tokens - 1, width))
    if config.classes:
        # The class token is one row of the normed tokens, and a row keeps the tensor it is a part of.
        held = batch * width if config.pool == "mean" else reading.rows * width
        head = pieces.linear("head", setting, batch, width, classes, keeps=False)
        parts.append(dataclasses.replace(head, kept=setting.item * held))
    return Counted("ViT", parts, {**values, **blocks.values}, blocks.notes)


# DaViT


@dataclass(frozen=True)
class _Grid:
    """The tokens of a stage: letters, numbers where they are known, and in how many pieces a batch passes.

    A large batch passes a stage in pieces. Products and norms do not care; but every piece makes its own kernels for
    positions, and a piece of one image is copied less often.
    """

    index: int
    size: tuple[int, int] | None
    at_once: int | None

    def of(self, name: str) -> sympy.Symbol:
        return letter(name, self.index)

    @property
    def tokens(self) -> sympy.Expr:
        return self.of("R") * self.of("W")

    @property
    def rows(self) -> sympy.Expr:
        return letter("B") * self.tokens

    def number_of_pieces(self, batch: int) -> int:
        return 1 if self.at_once is None else -(-batch // self.at_once)


def _davit(model: DaViT, asked: Asked, setting: Setting) -> Counted:
    """A stem, stages of pairs of blocks, and a head. Letters have the number of their stage.

        rows of stage i = ceil(rows of the image / 2^(i + 1))

    and so for columns: what is padded to whole patches and windows is multiplied like everything else.
    """
    only_images(model, asked, setting)
    config = model.config
    assert isinstance(config, DaViTConfig)
    batch, channels, window, classes = letters("B C w A")
    values: Values = {batch: asked.batch, channels: config.channels, window: config.window, classes: config.classes}
    notes = [
        "R_1 and W_1 are a quarter of the image, rounded up; later stages halve them, rounded up.",
        "Pairs are pairs of tokens in windows, and pairs of channels in groups; H are both heads and groups.",
    ]
    grids, size = [], asked.image
    for index in range(1, len(config.dims) + 1):
        step = 4 if index == 1 else 2
        size = None if size is None else (-(-size[0] // step), -(-size[1] // step))
        width = config.dims[index - 1]
        # As the stage itself decides: see `PIECE`.
        hidden = width * max(1, round(config.expansion)) * setting.item
        at_once = None if size is None else max(1, davit.PIECE // (math.prod(size) * hidden))
        grid = _Grid(index, size, at_once)
        grids.append(grid)
        values |= {grid.of("D"): width, grid.of("H"): config.heads[index - 1], grid.of("L"): config.depths[index - 1]}
        values[grid.of("F")] = int(width * config.expansion)
        if size is not None:
            values |= {grid.of("R"): size[0], grid.of("W"): size[1]}
        if (number := grid.number_of_pieces(asked.batch)) > 1:
            notes.append(f"Stage {index} passes the batch in {number} pieces of up to {at_once} images.")

    parts = inside("stem", *_stem(model, asked, setting, grids[0]))
    for before, grid, stage in zip([None, *grids], grids, model.stages, strict=False):
        made, more = _stage(stage, before, grid, asked.batch, setting)
        parts += inside(f"stage{grid.index}", *made)
        values |= more
    parts += inside("head", *_head(model, setting, grids[-1]))
    return Counted("DaViT", parts, values, tuple(notes))


def _stem(model: DaViT, asked: Asked, setting: Setting, grid: _Grid) -> list[Part]:
    """Patches of 7 x 7 pixels, one every 4, and a norm. An image that has to be padded is kept as its padded copy."""
    batch, channels, width = letter("B"), letter("C"), grid.of("D")
    padded = asked.image is not None and any(side % 4 for side in asked.image)
    kept = setting.item * 16 * channels * grid.rows if padded else ZERO
    sizes = (channels, model.stem.embed.patch, width, grid.tokens)
    embed = patches("embed", setting, model.stem.embed, batch=batch, sizes=sizes, kept=kept)
    return [embed, pieces.norm("norm", setting, grid.rows, width)]


def _merge(layer: PatchMerging, setting: Setting, before: _Grid, grid: _Grid) -> list[Part]:
    """A norm, and patches of 2 x 2 tokens of it, or 3 x 3 that overlap.

    It keeps the patches: the normed tokens, padded if there is an odd number of them. Large patches are multiplied as
    a matrix; channels then come last, and so do those of a copy of the weights.
    """
    read, out, embed = before.of("D"), grid.of("D"), layer.embed
    kept = 4 * grid.rows * read if embed.tiles else before.rows * read
    if is_product(embed):
        kept += 4 * read * out
    sizes = (read, embed.patch, out, grid.tokens)
    made = patches(
        "embed", setting, embed, batch=letter("B"), sizes=sizes, learns_input=True, kept=setting.item * kept
    )  # fmt: skip
    return [pieces.norm("norm", setting, before.rows, read), made]


def _stage(stage: Any, before: _Grid | None, grid: _Grid, batch: int, setting: Setting) -> tuple[list[Part], Values]:
    """The step from the stage before, and L pairs of blocks: windows, channels."""
    parts: list[Part] = []
    if before is not None:
        parts += inside("merge", *_merge(stage.merge, setting, before, grid))
    if not len(stage.blocks):
        return parts, {}
    first, second = (block.attention for block in stage.blocks[:2])
    width, heads, side = grid.of("D"), grid.of("H"), letter("w")
    singles = singles_of(batch, grid.at_once)
    windows = Windows(
        first, letter("B"), grid.of("R"), grid.of("W"), width, heads, (side, side), grid.size, singles, grid.of("Z")
    )
    channels = channel_parts(
        setting,
        second,
        batch=letter("B"),
        tokens=grid.tokens,
        width=width,
        groups=heads,
        singles=singles,
        keeps=True,
    )
    copies = grid.number_of_pieces(batch)
    for name, attention in (("window", windows.parts(setting, keeps=True)), ("channel", channels)):
        block = _block(grid, attention, copies, setting)
        parts += inside(name, *pieces.repeated(block, grid.of("L")))
    return parts, windows.area(setting)[1]


def _block(grid: _Grid, attention: list[Part], copies: int, setting: Setting) -> list[Part]:
    """A position, a norm and an attention, added; a position, a norm and a feed-forward part, added.

    Each norm keeps what its position made, and each position what was added up before it.
    """
    width, hidden, rows = grid.of("D"), grid.of("F"), grid.rows
    return [
        _position("position1", grid, copies, setting),
        pieces.norm("norm1", setting, rows, width),
        *inside("attention", *attention),
        pieces.addition("add1", setting, rows * width),
        _position("position2", grid, copies, setting),
        pieces.norm("norm2", setting, rows, width),
        pieces.linear("feed_forward.inner", setting, rows, width, hidden),
        pieces.bent("feed_forward.bend", setting, rows * hidden, "gelu"),
        pieces.linear("feed_forward.outer", setting, rows, hidden, width),
        pieces.addition("add2", setting, rows * width),
    ]


def _position(name: str, grid: _Grid, copies: int, setting: Setting) -> Part:
    """A convolution of 3 x 3 tokens for each channel alone.

    The identity is added to its kernel, so that it keeps the sum, once for each piece of the batch, beside the tokens.
    """
    width = grid.of("D")
    return convolution(
        name,
        setting,
        places=grid.rows,
        summed=sympy.Integer(9),
        out=width,
        reads=grid.rows * width,
        returns=9,
        kept=setting.item * (grid.rows * width + 9 * width * copies),
    )


def _head(model: DaViT, setting: Setting, grid: _Grid) -> list[Part]:
    """The mean of all tokens, a norm of it, and a matrix for the classes."""
    batch, width = letter("B"), grid.of("D")
    parts = [mean("mean", setting, batch, grid.tokens, width), pieces.norm("norm", setting, batch, width)]
    if isinstance(model.head.classify, Linear):
        parts.append(pieces.linear("classify", setting, batch, width, letter("A")))
    return parts


RULES = {ViT: _vit, DaViT: _davit}
# What they are made of, and has no rule of its own.
PARTS = (Stem, Stage, PatchMerging, DaViTBlock, ConvolutionalPosition, Head)
