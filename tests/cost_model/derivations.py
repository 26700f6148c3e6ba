"""Six models of other people, counted by hand: plain integers, and the reason beside each of them.

Nothing here comes from `regard.cost`; it is what those formulas are judged by. Multiply-adds are those of matrix
products and convolutions, kernels that meet padding included. A matrix of `inside x outside` on `rows` rows takes
`rows * inside * outside`. Attention in heads takes `queries * keys * width` for its scores, whatever the heads, which
share the width, and as much for its sums; the modules compute the whole square, hidden pairs included.

Backward every product has two: one for each of its operands. The first convolution of an image has one, because
the image has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Derived:
    """Parameters, multiply-adds forward and backward, numbers in all attention weights."""

    parameters: int
    forward: int
    backward: int
    weights: int

    @property
    def bytes(self) -> int:
        """Parameters in float32."""
        return 4 * self.parameters


def bert(
    batch: int,
    tokens: int,
    *,
    width: int = 768,
    layers: int = 12,
    heads: int = 12,
    hidden: int = 3072,
    vocab_size: int = 30522,
    positions: int = 512,
    kinds: int = 2,
) -> Derived:
    """transformers' BertModel with its pooler. Source: Devlin et al. (2019)."""
    # Embeddings of words, positions and kinds of sentences, and a norm: a weight and a bias for each channel.
    embeddings = (vocab_size + positions + kinds) * width + 2 * width
    # Query, key, value and output are square matrices with a bias; the norm after them.
    attention = 4 * (width * width + width) + 2 * width
    feed_forward = (width * hidden + hidden) + (hidden * width + width) + 2 * width
    pooler = width * width + width
    parameters = embeddings + layers * (attention + feed_forward) + pooler

    rows = batch * tokens
    projections = 4 * rows * width * width
    scores_and_sums = 2 * batch * tokens * tokens * width
    two_products = 2 * rows * width * hidden
    # The pooler reads the first token of each text.
    forward = layers * (projections + scores_and_sums + two_products) + batch * width * width
    # Every operand is learned or made of what is learned: words are rows of a table.
    return Derived(parameters, forward, 2 * forward, layers * batch * heads * tokens * tokens)


def gpt2(
    batch: int,
    tokens: int,
    *,
    head: bool = True,
    triangle: bool = False,
    width: int = 768,
    layers: int = 12,
    heads: int = 12,
    vocab_size: int = 50257,
    positions: int = 1024,
) -> Derived:
    """transformers' GPT2LMHeadModel, or without its head GPT2Model. Source: Radford et al. (2019).

    triangle: count only the pairs of a token and itself or one before it, which is what a fused causal attention needs.
    """
    hidden = 4 * width
    embeddings = (vocab_size + positions) * width
    norms = 2 * (2 * width)
    attention = (width * 3 * width + 3 * width) + (width * width + width)
    feed_forward = (width * hidden + hidden) + (hidden * width + width)
    # One norm after the last block. The head is the table of words again, and has no bias.
    parameters = embeddings + layers * (norms + attention + feed_forward) + 2 * width

    rows = batch * tokens
    pairs = tokens * (tokens + 1) // 2 if triangle else tokens * tokens
    block = rows * width * 3 * width + rows * width * width + 2 * batch * pairs * width
    block += 2 * rows * width * hidden
    forward = layers * block + (rows * width * vocab_size if head else 0)
    return Derived(parameters, forward, 2 * forward, layers * batch * heads * pairs)


def vit(
    batch: int,
    image: tuple[int, int],
    *,
    built_for: tuple[int, int] = (224, 224),
    patch: int = 16,
    channels: int = 3,
    width: int = 768,
    layers: int = 12,
    heads: int = 12,
    hidden: int = 3072,
    classes: int = 1000,
    pooler: bool = False,
) -> Derived:
    """timm's vit_base_patch16_224; with `classes=0` and a pooler, transformers' ViTModel. Dosovitskiy et al. (2021)."""
    learned = (built_for[0] // patch) * (built_for[1] // patch) + 1
    tokens = (image[0] // patch) * (image[1] // patch) + 1  # patches, and the token that asks for the class
    pixels = channels * patch * patch
    # Patches, positions of all tokens, the class token itself.
    embeddings = pixels * width + width + learned * width + width
    block = 4 * (width * width + width) + (width * hidden + hidden) + (hidden * width + width) + 2 * (2 * width)
    top = (width * classes + classes) if classes else 0
    top += (width * width + width) if pooler else 0
    parameters = embeddings + layers * block + 2 * width + top

    patches = batch * (tokens - 1) * pixels * width
    inside = 4 * batch * tokens * width * width + 2 * batch * tokens * tokens * width
    inside += 2 * batch * tokens * width * hidden
    # The head reads the class token alone.
    last = batch * width * (classes + (width if pooler else 0))
    forward = patches + layers * inside + last
    return Derived(parameters, forward, 2 * forward - patches, layers * batch * heads * tokens * tokens)


def davit(
    batch: int,
    image: tuple[int, int],
    *,
    widths: tuple[int, ...] = (96, 192, 384, 768),
    heads: tuple[int, ...] = (3, 6, 12, 24),
    depths: tuple[int, ...] = (1, 1, 3, 1),
    window: int = 7,
    channels: int = 3,
    classes: int = 1000,
    ratio: int = 4,
) -> Derived:
    """timm's davit_tiny: in each stage pairs of a block of windows and a block of channels. Ding et al. (2022)."""
    # Patches of 7 x 7 pixels that begin every 4th; the image is padded to a multiple of 4, and by 3 all around.
    rows, columns = -(-image[0] // 4), -(-image[1] // 4)
    parameters = (channels * 49 * widths[0] + widths[0]) + 2 * widths[0]
    first = forward = batch * rows * columns * channels * 49 * widths[0]
    weights = 0
    for stage, (width, count, depth) in enumerate(zip(widths, heads, depths, strict=True)):
        if stage:
            # A norm, and patches of 2 x 2 tokens, side by side, of a grid that is padded to even sides.
            before = widths[stage - 1]
            rows, columns = -(-rows // 2), -(-columns // 2)
            parameters += 2 * before + (before * 4 * width + width)
            forward += batch * rows * columns * before * 4 * width
        tokens = rows * columns
        # Both kinds of block: two kernels of 3 x 3 for each channel, two norms, qkv, output, two layers.
        both = 2 * (9 * width + width) + 2 * (2 * width)
        both += (width * 3 * width + 3 * width) + (width * width + width)
        both += (width * ratio * width + ratio * width) + (ratio * width * width + width)
        parameters += 2 * depth * both
        kernels = 2 * batch * tokens * 9 * width
        layers = 2 * batch * tokens * width * ratio * width
        # Windows: the grid is padded to whole windows before the projections, so those are larger too.
        windows = (-(-rows // window)) * (-(-columns // window))
        padded = windows * window * window
        spatial = 4 * batch * padded * width * width + 2 * batch * padded * window * window * width
        # Channels: in each of `count` groups `size x size` scores, each a sum over all tokens, and as much again.
        size = width // count
        channel = 4 * batch * tokens * width * width + 2 * batch * tokens * width * size
        forward += depth * (2 * (kernels + layers) + spatial + channel)
        weights += depth * batch * count * (padded * window * window + size * size)
    # The mean over all tokens, a norm, a matrix.
    parameters += 2 * widths[-1] + (widths[-1] * classes + classes)
    forward += batch * widths[-1] * classes
    return Derived(parameters, forward, 2 * forward - first, weights)


def swin(
    batch: int,
    image: tuple[int, int] = (224, 224),
    *,
    width: int = 96,
    heads: tuple[int, ...] = (3, 6, 12, 24),
    depths: tuple[int, ...] = (2, 2, 6, 2),
    window: int = 7,
    patch: int = 4,
    channels: int = 3,
    classes: int = 1000,
    ratio: int = 4,
) -> Derived:
    """timm's swin_tiny_patch4_window7_224, whose image is fixed when it is built. Liu et al. (2021)."""
    rows, columns = image[0] // patch, image[1] // patch
    pixels = channels * patch * patch
    parameters = (pixels * width + width) + 2 * width
    first = forward = batch * rows * columns * pixels * width
    weights = 0
    for stage, (count, depth) in enumerate(zip(heads, depths, strict=True)):
        if stage:
            # Four neighbours side by side, a norm of all their channels, and a matrix to half as many, without a bias.
            rows, columns = -(-rows // 2), -(-columns // 2)
            parameters += 2 * (4 * width) + 4 * width * 2 * width
            forward += batch * rows * columns * 4 * width * 2 * width
            width = 2 * width
        # A window is no larger than the grid. Windows that are shifted are as many: what leaves on one side comes in
        # on the other, and a mask hides the pairs that are no neighbours.
        down, across = min(window, rows), min(window, columns)
        area = down * across
        padded = (-(-rows // down)) * (-(-columns // across)) * area
        block = (width * 3 * width + 3 * width) + (width * width + width) + 2 * (2 * width)
        block += (width * ratio * width + ratio * width) + (ratio * width * width + width)
        # A number for every distance of two places in a window, for each head.
        block += (2 * down - 1) * (2 * across - 1) * count
        parameters += depth * block
        spatial = 4 * batch * padded * width * width + 2 * batch * padded * area * width
        layers = 2 * batch * rows * columns * width * ratio * width
        forward += depth * (spatial + layers)
        weights += depth * batch * count * padded * area
    parameters += 2 * width + (width * classes + classes)
    forward += batch * width * classes
    return Derived(parameters, forward, 2 * forward - first, weights)


def t5(
    batch: int,
    context: int,
    tokens: int,
    *,
    width: int = 512,
    hidden: int = 2048,
    layers: int = 6,
    decoder_layers: int | None = None,
    heads: int = 8,
    size: int = 64,
    vocab_size: int = 32128,
    buckets: int = 32,
) -> Derived:
    """transformers' T5ForConditionalGeneration: an encoder of `context` words, a decoder of `tokens`. Raffel (2020)."""
    decoders = layers if decoder_layers is None else decoder_layers
    inner = heads * size  # need not be the width
    # No bias anywhere, and norms that only scale. Distances are sorted into buckets, a number for each of them and each
    # head, in the first block of the encoder and of the decoder. One table of words serves as both embeddings and head.
    attention = 4 * width * inner + width
    feed_forward = 2 * width * hidden + width
    parameters = vocab_size * width + 2 * buckets * heads
    parameters += layers * (attention + feed_forward) + width
    parameters += decoders * (2 * attention + feed_forward) + width

    target_rows, source_rows = batch * tokens, batch * context
    encoder = 4 * source_rows * width * inner + 2 * batch * context * context * inner + 2 * source_rows * width * hidden
    decoder = 4 * target_rows * width * inner + 2 * batch * tokens * tokens * inner
    # Keys and values of the other text are made anew in every block.
    decoder += 2 * target_rows * width * inner + 2 * source_rows * width * inner + 2 * batch * tokens * context * inner
    decoder += 2 * target_rows * width * hidden
    forward = layers * encoder + decoders * decoder + target_rows * width * vocab_size
    weights = layers * context * context + decoders * tokens * (tokens + context)
    return Derived(parameters, forward, 2 * forward, batch * heads * weights)
