"""Errata of a deep-learning course's homework, problems 1.4 and 1.5: the Transformer and the vision transformer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from regard.book.errata.erratum import Trial, erratum

if TYPE_CHECKING:
    from regard.models import ViT

DOUBLE = torch.float64


@erratum(
    "nyu-1.4b:cross-attention",
    "NYU 1.4b, solution",
    "garbled",
    claim='The encoder gives the decoder "keys, values and queries".',
    correction=(
        "The encoder gives keys and values; queries are the decoder's: there is one output for each target token."
    ),
)
def _cross_attention() -> Iterator[Trial]:
    from regard.layers import MultiHeadAttention

    layer = MultiHeadAttention(4, 2).to(DOUBLE)
    for source, target in ((3, 3), (3, 2), (2, 5)):
        encoded, decoded = (torch.randn(1, length, 4, dtype=DOUBLE) for length in (source, target))
        with torch.no_grad():
            computed = layer(decoded, encoded)
        case = f"{source} source and {target} target tokens: number of outputs"
        yield Trial(case, source, computed.shape[1], target)


@erratum(
    "nyu-1.4d:heads",
    "NYU 1.4d, solution",
    "garbled",
    claim="The outputs $H_1 \\dots H_n$ are joined, $n$ the number of tokens.",
    correction="$H_1 \\dots H_h$: one output for each of the $h$ heads is joined.",
)
def _heads() -> Iterator[Trial]:
    from regard.layers import MultiHeadAttention

    for tokens, heads in ((2, 2), (3, 2), (5, 4)):
        layer = MultiHeadAttention(8, heads).to(DOUBLE)
        x = torch.randn(1, tokens, 8, dtype=DOUBLE)
        joined = layer.output.weight.shape[1] // (8 // heads)
        yield Trial(f"n = {tokens}, h = {heads}: joined parts", tokens, joined, layer.head_contributions(x).shape[0])


@erratum(
    "nyu-1.4e:layer-norm",
    "NYU 1.4e, solution",
    "garbled",
    claim="Layer norm uses the mean and variance of the previous layer, over all tokens.",
    correction=(
        "Each token is normalised by its own mean and variance over its features, then multiplied by $\\gamma$ "
        "and moved by $\\beta$."
    ),
)
def _layer_norm() -> Iterator[Trial]:
    for tokens in (1, 2, 5):
        x = torch.randn(tokens, 6, dtype=DOUBLE)
        claimed = (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt()
        own = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        yield Trial(f"{tokens} tokens of 6 features", claimed, F.layer_norm(x, (6,)), own)


@erratum(
    "nyu-1.5b:differences",
    "NYU 1.5b, solution",
    "incomplete",
    claim="A vision transformer differs from the Transformer by its missing decoder and its convolution.",
    correction=(
        "Also by norms before each part, GELU in place of ReLU, a class token, learned positions and a "
        "classification head."
    ),
)
def _differences() -> Iterator[Trial]:
    from regard.models import Transformer, TransformerConfig

    for size in (8, 16):
        vit, transformer = _make_vit(size), Transformer(TransformerConfig(vocab_size=7, dim=8, layers=1, heads=2))
        names, others = ({name.split(".")[0] for name, _ in each.named_parameters()} for each in (vit, transformer))
        more = tuple(sorted(names - others))
        has = tuple(sorted((*more, "norm before attention" if _is_pre_norm(vit) else "")))
        expected = ("blocks", "class_token", "head", "norm", "norm before attention", "patches", "positions")
        yield Trial(f"images of {size} pixels: what the Transformer lacks", ("blocks", "patches"), has, expected)


def _make_vit(size: int) -> ViT:
    from regard.models import ViT, ViTConfig

    return ViT(ViTConfig(image=(size, size), patch=4, dim=8, layers=1, heads=2, classes=3)).eval()


def _is_pre_norm(vit: ViT) -> bool:
    """True if a block whose parts give zero returns its input: norms are before the parts, not after the sum."""
    block = vit.blocks[0]
    for name, parameter in block.named_parameters():
        if name.startswith(("attention.output", "feed_forward.outer")):
            torch.nn.init.zeros_(parameter)
    tokens = torch.randn(1, 3, 8)
    with torch.no_grad():
        return torch.equal(block(tokens), tokens)


@erratum(
    "nyu-1.5c:positions",
    "NYU 1.5c, solution",
    "wrong",
    claim='The vision transformer "just uses the spatial position", and has nothing to learn there.',
    correction=(
        "It learns one vector for each place in raster order, added to the patch; without it, shuffled patches "
        "give the same logits."
    ),
)
def _positions() -> Iterator[Trial]:
    for size in (8, 12):
        vit = _make_vit(size)
        learned = sum(parameter.numel() for name, parameter in vit.named_parameters() if "position" in name)
        places = (size // 4) ** 2 + 1
        yield Trial(f"{size} pixels in patches of 4: learned numbers of positions", 0, learned, places * 8)


@erratum(
    "nyu-1.5d:class-token",
    "NYU 1.5d, solution",
    "garbled",
    claim='A "classification parameter" goes into an MLP.',
    correction=(
        "A learned class token is one more token; its final state goes into one hidden layer in pre-training, "
        "and into a single matrix in fine-tuning."
    ),
)
def _class_token() -> Iterator[Trial]:
    for size in (8, 12):
        vit = _make_vit(size)
        seen: list[int] = []
        vit.blocks[0].register_forward_hook(lambda block, inputs, output, seen=seen: seen.append(inputs[0].shape[-2]))
        with torch.no_grad():
            vit(torch.randn(1, 3, size, size))
        patches = (size // 4) ** 2
        yield Trial(f"{size} pixels in patches of 4: tokens", patches, seen[0], patches + 1)
