"""Rules for layers that read images: patches, attention between channels, attention on a grid; windows are next door.

Sizes of a grid are `image=(rows, columns)`: of pixels for a `PatchEmbedding`, of tokens for everything else.

What is kept was found by looking at what autograd saves in float32 on a CPU with our kernels; where that is not what
the mathematics needs, a comment says why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy

from regard.cost_model import depth
from regard.cost_model.asked import Asked, Counted
from regard.cost_model.letters import letters
from regard.cost_model.part import ZERO, Part, Work, inside
from regard.cost_model.rules.multihead import multi_head_rule
from regard.cost_model.rules.pieces import linear
from regard.cost_model.setting import Setting
from regard.errors import CostError
from regard.layers.channels import FEW_GROUPS, ChannelAttention
from regard.layers.grid import GridAttention
from regard.layers.patches import LARGE_PATCH, PatchEmbedding

Number = Any  # an expression of sympy, or an int


# Sizes


def only_images(target: Any, asked: Asked, setting: Setting, *, tokens: bool = False) -> None:
    """Refuses questions about texts: a length without rows and columns, a next token."""
    name = type(target).__name__
    if setting.step == "decode":
        raise CostError(
            "An image has no next token.",
            asked=f'cost({name}, step="decode")',
            because="all tokens of a grid are there at once, and nothing is cached",
            instead='step="forward"',
        )
    for given in ("tokens", "keys", "context_tokens"):
        if getattr(asked, given) is not None and not (tokens and given == "tokens"):
            raise CostError(
                f"{name} is asked about a text.",
                asked=f"cost({name}, {given}={getattr(asked, given)})",
                because="it reads a grid, and a length does not say how many rows and columns that has",
                instead="image=(rows, columns)" + (", or tokens=..." if tokens else ""),
            )


def only_whole(image: tuple[int, int] | None, patch: int) -> None:
    """Refuses an image that patches which lie side by side do not fill."""
    if image is not None and (image[0] % patch or image[1] % patch):
        raise CostError(
            "The image is not a whole number of patches.",
            asked=f"image={image}",
            found=f"patches of {patch} x {patch} pixels",
            because="pixels that are left over are refused, not lost",
            instead=f"image={tuple(-(-side // patch) * patch for side in image)}",
        )


def grid_values(asked: Asked) -> dict[sympy.Symbol, int]:
    """Numbers of B, and of R and W if the grid is known."""
    batch, rows, columns = letters("B R W")
    known = {} if asked.image is None else {rows: asked.image[0], columns: asked.image[1]}
    return {batch: asked.batch, **known}


def singles_of(batch: int, at_once: int | None = None) -> int:
    """How many images of a batch are worked on alone, if at most so many are worked on at once."""
    if at_once == 1:
        return batch
    return 1 if (batch if at_once is None else batch % at_once) == 1 else 0


# Patches


def convolution(
    name: str,
    setting: Setting,
    *,
    places: Number,
    summed: Number,
    out: Number,
    reads: Number,
    returns: Number,
    bias: bool = True,
    learns_input: bool = True,
    kept: Number = ZERO,
) -> Part:
    """A convolution with `places` results in each of `out` channels, each a sum of `summed` products.

    At the rim the kernel meets padding and multiplies it like any pixel. Backward, the weights' gradient takes as many
    multiply-adds as forward, and that of the input as many again, if anything before it learns.

    reads: numbers of the input.
    returns: how many products the gradient of one input number is the sum of.
    kept: bytes.
    """
    weights = summed * out + (out if bias else ZERO)
    products = places * summed * out
    moved = reads + weights + places * out
    back = moved + (moved if learns_input else ZERO)
    longest = depth.inner(returns if learns_input else places, setting.serial)
    return Part(
        name,
        parameters=sympy.sympify(weights),
        forward=Work(
            macs=products,
            bytes=setting.item * moved,
            depth=depth.inner(summed, setting.serial) + (1 if bias else 0),
        ),
        backward=Work(macs=products * (2 if learns_input else 1), bytes=setting.item * back, depth=longest),
        kept=sympy.sympify(kept),
    )


def patches(
    name: str,
    setting: Setting,
    layer: PatchEmbedding,
    *,
    batch: Number,
    sizes: tuple[Number, Number, Number, Number],
    learns_input: bool = False,
    kept: Number = ZERO,
) -> Part:
    """A `PatchEmbedding`; `sizes` are its channels, patch, output channels and places in an image."""
    channels, side, out, places = sizes
    # A pixel belongs to as many patches as begin within the length of one.
    overlap = -(-layer.patch // layer.stride)
    pixels = channels * side**2 * places if layer.tiles else channels * layer.stride**2 * places
    return convolution(
        name,
        setting,
        places=batch * places,
        summed=channels * side**2,
        out=out,
        reads=batch * pixels,
        returns=out * overlap**2,
        bias=layer.bias is not None,
        learns_input=learns_input,
        kept=kept,
    )


def is_product(layer: PatchEmbedding) -> bool:
    """Whether it is computed as one matrix product, for which the patches are copied."""
    return layer.tiles and layer.channels * layer.patch**2 >= LARGE_PATCH


def copied_patches(layer: PatchEmbedding, asked: Asked) -> bool:
    """Whether the patches of an image are another tensor than the image, which is kept then."""
    if not is_product(layer):
        return False
    rows, columns = (None, None) if asked.image is None else (side // layer.patch for side in asked.image)
    if layer.patch == 1:  # pixels are only strided, and one image of them is a matrix already
        return asked.batch > 1 and (rows, columns) != (1, 1)
    # A patch as wide as the image is a block of memory, if it is as high, too, or there is one channel.
    return not (columns == 1 and (rows == 1 or layer.channels == 1))


def _patches(layer: PatchEmbedding, asked: Asked, setting: Setting) -> Counted:
    only_images(layer, asked, setting)
    batch, channels, side, out, rows, columns = letters("B C p D R W")
    values = {**grid_values(asked), channels: layer.channels, side: layer.patch, out: layer.dim}
    notes: tuple[str, ...] = ()
    if layer.tiles:
        only_whole(asked.image, layer.patch)
        places = rows * columns / side**2
    else:
        reach = 2 * layer.padding - side
        down, across = (sympy.floor((length + reach) / layer.stride) + 1 for length in (rows, columns))
        places = down * across
        notes = (f"A patch begins every {layer.stride} pixels; {layer.padding} pixels of padding on each side.",)
    kept = setting.item * batch * channels * rows * columns if copied_patches(layer, asked) else ZERO
    part = patches("patches", setting, layer, batch=batch, sizes=(channels, side, out, places), kept=kept)
    return Counted("PatchEmbedding", [part], values, notes)


# Channels


def channel_parts(
    setting: Setting,
    layer: ChannelAttention,
    *,
    batch: Number,
    tokens: Number,
    width: Number,
    groups: Number,
    singles: int,
    keeps: bool,
) -> list[Part]:
    """Projection, scores, softmax, values and projection of `ChannelAttention`.

        multiply-adds   2 N D (D / H) in H groups of D / H channels, beside 4 N D^2 for the projections
        pairs           D^2 / H pairs of channels, which are here what tokens are elsewhere

    singles: how many images are worked on alone, not in a batch.
    keeps: whether the tokens that come in are this layer's to keep.
    """
    item, size = setting.item, width / groups
    rows, pairs = batch * tokens, batch * width * size
    products = rows * width * size
    # Queries are scaled, and the scaled ones are kept. Keys and values lie in one tensor with the unscaled queries,
    # which is kept whole; but many groups of several images are copied before they are multiplied, and then only the
    # copies are kept.
    together = layer.groups > FEW_GROUPS
    sides = 3 * rows - ((rows - singles * tokens) if together else ZERO)
    total = depth.total(size, setting.serial)
    scores = Part(
        "scores",
        forward=Work(
            macs=products, bytes=item * (4 * rows * width + pairs), depth=1 + depth.inner(tokens, setting.serial)
        ),
        backward=Work(
            macs=2 * products,
            bytes=item * (6 * rows * width + pairs),
            depth=depth.inner(size, setting.serial) + 1,
        ),
        kept=item * (sides * width + rows * width),
        pairs=pairs,
    )
    softmax = Part(
        "softmax",
        forward=Work(
            exponentials=pairs,
            bytes=item * 2 * pairs,
            depth=depth.softmax(size, stable=setting.stable, serial=setting.serial),
        ),
        backward=Work(bytes=item * 3 * pairs, depth=3 + total),
        kept=item * pairs,
    )
    values = Part(
        "values",
        forward=Work(macs=products, bytes=item * (2 * rows * width + pairs), depth=depth.inner(size, setting.serial)),
        # The weights' gradient, on which that of queries and keys waits, is a sum over all tokens.
        backward=Work(
            macs=2 * products,
            bytes=item * (3 * rows * width + 2 * pairs),
            depth=depth.inner(tokens, setting.serial),
        ),
    )
    qkv = linear("qkv", setting, rows, width, 3 * width, bias=layer.qkv.bias is not None, keeps=keeps)
    return [qkv, scores, softmax, values, linear("proj", setting, rows, width, width)]


def _channels(layer: ChannelAttention, asked: Asked, setting: Setting) -> Counted:
    only_images(layer, asked, setting, tokens=True)
    batch, tokens, width, groups = letters("B N D H")
    values = {batch: asked.batch, width: layer.dim, groups: layer.groups}
    count = asked.tokens if asked.image is None else asked.image[0] * asked.image[1]
    if count is not None:
        values[tokens] = count
    parts = channel_parts(
        setting,
        layer,
        batch=batch,
        tokens=tokens,
        width=width,
        groups=groups,
        singles=singles_of(asked.batch),
        keeps=False,
    )
    notes = ("H are the groups of channels, and pairs are pairs of channels: they are what attends here.",)
    return Counted("ChannelAttention", parts, values, notes)


def _grid(layer: GridAttention, asked: Asked, setting: Setting) -> Counted:
    """Multi-head attention over the grid read row by row."""
    only_images(layer, asked, setting, tokens=True)
    count = asked.tokens if asked.image is None else asked.image[0] * asked.image[1]
    counted = multi_head_rule(layer.attention, replace(asked, image=None, tokens=count), setting)
    return Counted("GridAttention", inside("attention", *counted.parts), counted.values, counted.notes)


RULES = {PatchEmbedding: _patches, ChannelAttention: _channels, GridAttention: _grid}
