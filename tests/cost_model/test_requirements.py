"""Every count that the sources state or that was worked out from them, asked of `regard.cost`, to the unit.

Numbers are written out here, with where they come from: Prince, Understanding Deep Learning (UDL), chapter 12;
Cordonnier, Loukas and Jaggi (ETH); the published models.
"""

from __future__ import annotations

import pytest
import sympy
import torch
from plain import slow_rows

import regard
from regard import Attention, Axial, Causal, First, Full, GridStride, GridWindow, Neighborhood, Where, Window
from regard.cost_model import Cost, cost
from regard.cost_model.symbols import size_symbols
from regard.layers import AttentionSizes, ChannelAttention, MultiHeadAttention, WindowAttention
from regard.models import (
    GPT,
    Bert,
    BertConfig,
    DaViT,
    DaViTConfig,
    GPTConfig,
    SpatialConfig,
    SpatialTransformer,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)


def built(model, config):
    """A model that has shapes and no memory."""
    with torch.device("meta"):
        return model(config).eval()


def without(found: Cost, name: str) -> int:
    """Multiply-adds of all parts but those of this name."""
    parts = found.by_part()
    assert any(name in key.split(".") for key in parts), f"no part {name} among {', '.join(parts)}"
    return sum(int(part.macs) for key, part in parts.items() if name not in key.split("."))


# Models


@pytest.mark.parametrize(
    ("size", "alone", "with_heads"),
    [
        ("base", 109_482_240, 110_106_428),
        *slow_rows(
            ("tiny", 4_385_920, 4_433_468),
            ("mini", 11_170_560, 11_267_900),
            ("small", 28_763_648, 29_058_876),
            ("medium", 41_373_184, 41_668_412),
            ("large", 335_141_888, 336_226_108),
        ),
    ],
)
def test_bert(size: str, alone: int, with_heads: int) -> None:
    config = BertConfig.bert(size)
    assert cost(built(Bert, config)).parameters == alone
    heads = BertConfig.bert(size, masked_tokens=True, next_sentence=True)
    assert cost(built(Bert, heads)).parameters == with_heads


def test_bert_base_by_parts_and_cased() -> None:
    found = cost(built(Bert, BertConfig.bert("base")))
    parts = {name: int(part.parameters) for name, part in found.by_part(1).items()}
    assert (parts.pop("blocks"), parts.pop("pooler")) == (85_054_464, 590_592)
    assert sum(parts.values()) == 23_837_184  # words, positions, segments and their norm
    assert cost(built(Bert, BertConfig.bert("base", vocab_size=28996))).parameters == 108_310_272


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("small", 124_439_808), *slow_rows(("medium", 354_823_168), ("large", 774_030_080), ("xl", 1_557_611_200))],
)
def test_gpt2(size: str, parameters: int) -> None:
    assert cost(built(GPT, GPTConfig.gpt2(size))).parameters == parameters


@pytest.mark.parametrize(
    ("name", "image", "parameters", "giga", "tokens"),
    [
        ("S/32", 224, 22_878_952, 1.1429, 50),
        ("B/16", 224, 86_567_656, 17.5638, 197),
        *slow_rows(
            ("Ti/16", 224, 5_717_416, 1.2537, 197),
            ("S/16", 224, 22_050_664, 4.5989, 197),
            ("B/32", 224, 88_224_232, 4.4092, 50),
            ("L/16", 224, 304_326_632, 61.5547, 197),
            ("L/32", 224, 306_535_400, 15.3775, 50),
            ("H/14", 224, 632_045_800, 167.2951, 257),
            ("B/16", 384, 86_859_496, None, 577),
        ),
    ],
)
def test_vit(name: str, image: int, parameters: int, giga: float | None, tokens: int) -> None:
    config = ViTConfig.vit(name, image=(image, image))
    found = cost(built(ViT, config))
    assert found.parameters == parameters
    assert found.pairs == config.layers * config.heads * tokens**2
    if giga is not None:
        assert round(int(found.macs) / 1e9, 4) == giga


def test_vit_base_to_the_unit() -> None:
    assert cost(built(ViT, ViTConfig.vit("B/16"))).macs == 17_563_828_224


@pytest.mark.slow  # the fast tests count what one of them executes: tests/models/test_davit.py
@pytest.mark.parametrize(
    ("name", "image", "parameters", "macs", "published", "normalised"),
    [
        ("tiny", 224, 28_360_168, 4_521_801_216, 4_540_244_736, 3_688_704),
        pytest.param("small", 224, 49_745_896, 8_773_012_992, 8_800_488_192, 5_495_040, marks=pytest.mark.long),
        pytest.param("base", 224, 87_954_408, 15_473_797_120, 15_510_430_720, 7_326_720, marks=pytest.mark.long),
        pytest.param("large", 384, 196_811_752, 102_805_204_992, 102_966_676_992, 32_294_400, marks=pytest.mark.long),
    ],
)
def test_davit(name: str, image: int, parameters: int, macs: int, published: int, normalised: int) -> None:
    """The published counter adds five operations for each number that a norm reads."""
    found = cost(built(DaViT, DaViTConfig.variant(name)), image=(image, image))
    assert found.parameters == parameters
    assert found.macs == macs
    assert found.normalised == normalised
    assert found.macs + 5 * found.normalised == published


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "heads", "parameters"),
    [
        ("quadratic", 9, 12_086_844),
        ("gaussian", 9, 12_087_006),
        ("learned", 9, 12_278_682),
        ("content", 9, 29_484_282),
        ("quadratic", 16, 18_806_970),
    ],
)
def test_cordonnier_parameters(position: str, heads: int, parameters: int) -> None:
    assert cost(built(SpatialTransformer, SpatialConfig(position, heads=heads))).parameters == parameters


# The linear layers of 256 tokens: an embedding of 12 numbers; in each of six layers 9 heads of 400 joined to 400, once
# more 400 to 400, and to 512 and back; ten classes. Published as 2 x this = 6.18 G.
LINEAR = 256 * 12 * 400 + 6 * 256 * (3600 * 400 + 400 * 400 + 2 * 400 * 512) + 400 * 10


@pytest.mark.slow
def test_cordonnier_products() -> None:
    """What the paper counts, and the sums over values, which it does not."""
    assert round(2 * LINEAR / 1e9, 2) == 6.18
    separable = 176_947_200  # 6 layers, 9 heads, 256 places with 16 rows and 16 columns each, 400 channels
    square = 1_415_577_600  # 6 * 9 * 256^2 * 400
    made = {position: cost(built(SpatialTransformer, SpatialConfig(position))).macs for position in POSITIONS}
    assert made["quadratic"] == LINEAR + separable
    # Two tables of 31 distances, read by one vector for each head.
    assert made["learned"] == LINEAR + separable + 6 * 2 * 9 * 31 * 400
    # Queries and keys of full size; a query meets 16 rows and 16 columns by halves; scores over 400 + 32 features.
    queries_and_keys = 6 * 256 * 2 * 400 * 3600
    assert round(2 * (LINEAR + queries_and_keys) / 1e9, 2) == 15.02
    tables = 6 * 256 * 9 * 200 * (16 + 16)
    assert made["content"] == LINEAR + queries_and_keys + tables + 6 * 9 * 256**2 * (400 + 32) + square


POSITIONS = ("quadratic", "learned", "content")


@pytest.mark.slow
def test_the_transformer() -> None:
    assert cost(built(Transformer, TransformerConfig.base())).parameters == 63_082_496
    assert cost(built(Transformer, TransformerConfig.big())).parameters == 214_245_376
    assert cost(built(Transformer, TransformerConfig.base(attention_bias=False))).parameters == 63_045_632
    parts = {
        name: int(part.parameters)
        for name, part in cost(built(Transformer, TransformerConfig.base())).by_part(1).items()
    }
    assert parts["encoder"] == 6 * 3_152_384 == 18_914_304
    assert parts["decoder"] == 6 * 4_204_032 == 25_224_192
    assert sum(parts.values()) - 37_000 * 512 == 44_138_496
    with torch.device("meta"):  # torch's has two norms more
        theirs, thin = (torch.nn.Transformer(512, 8, n, n, 2048, batch_first=True) for n in (6, 1))
    assert sum(each.numel() for each in theirs.parameters()) == 44_140_544 == 44_138_496 + 2 * 2 * 512
    found = cost(thin, tokens=11, context_tokens=13)
    assert found.parameters == 44_140_544 - 5 * (3_152_384 + 4_204_032)
    # Four matrices of D^2 for each attention, two of D F; pairs of the square, also in the decoder.
    encoder = 13 * (4 * 512**2 + 2 * 512 * 2048) + 2 * 13**2 * 512
    decoder = 11 * (6 * 512**2 + 2 * 512 * 2048) + 13 * 2 * 512**2 + 2 * 11**2 * 512 + 2 * 11 * 13 * 512
    assert found.macs == encoder + decoder


# Layers


@pytest.mark.parametrize(
    ("heads", "width", "key", "value", "out", "parameters"),
    [
        (8, 512, 64, 64, 512, 1_049_088),
        (12, 768, 64, 64, 768, 2_360_064),
        (16, 1024, 64, 64, 1024, 4_195_328),
        (9, 400, 400, 400, 400, 5_760_400),
        (4, 10, 3, 5, 7, 587),
    ],
)
def test_parameters_of_multi_head_attention(heads, width, key, value, out, parameters) -> None:
    """ETH a1: H D (2 d + e) + H e O + O, with a bias at the output alone."""
    layer = MultiHeadAttention(AttentionSizes(width, heads, key=key, value=value, output=out), bias="o")
    assert cost(layer).parameters == parameters


def test_all_four_biases() -> None:
    assert cost(MultiHeadAttention(512, 8)).parameters == 1_050_624


@pytest.mark.parametrize(
    ("tokens", "width", "weights", "biases", "pairs"),
    [
        (3, 4, 48, 12, 9),
        (256, 512, 786_432, 1_536, 65_536),
        (197, 768, 1_769_472, 2_304, 38_809),
        (1024, 512, 786_432, 1_536, 1_048_576),
    ],
)
def test_parameters_of_self_attention(tokens: int, width: int, weights: int, biases: int, pairs: int) -> None:
    """UDL 12.1: queries, keys and values, without a matrix that joins heads."""
    with torch.device("meta"):
        plain, biased = (MultiHeadAttention(width, 1, bias=bias) for bias in ("", "qkv"))
    joining = width * width
    assert cost(plain, tokens=tokens).parameters - joining == weights
    assert cost(biased, tokens=tokens).parameters - cost(plain, tokens=tokens).parameters == biases
    assert cost(biased, tokens=tokens).pairs == pairs


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
def test_heads_that_share_the_channels_cost_the_same(heads: int) -> None:
    """UDL 12.5, for 256 tokens of 512 channels: only the numbers in the weights grow."""
    shared = cost(MultiHeadAttention(512, heads, bias=""), tokens=256)
    projections, joining, scores = 201_326_592, 256 * 512**2, 33_554_432
    assert shared.parameters == 786_432 + 512**2
    assert shared.macs == projections + joining + 2 * scores
    assert shared.pairs == shared.exponentials == 65_536 * heads
    with torch.device("meta"):
        full = MultiHeadAttention(AttentionSizes(512, heads, key=512), bias="")
    found = cost(full, tokens=256)
    assert found.parameters == (786_432 + 512**2) * heads
    assert found.macs == heads * (projections + joining + 2 * scores)


@pytest.mark.parametrize(
    ("width", "tokens", "step", "scratch"), [(512, 256, 1_048_576, 268_435_456), (768, 1024, 3_342_336, 3_422_552_064)]
)
def test_one_more_token(width: int, tokens: int, step: int, scratch: int) -> None:
    """UDL 12.7: 3 D^2 + 2 (N + 1) D for the last of N + 1 tokens; N + 1 times as much for all, in whole squares."""
    layer = MultiHeadAttention(width, 8, attention=Attention(pattern=Causal()))
    assert without(cost(layer, tokens=tokens - 1, step="decode"), "output") == step
    assert without(cost(layer, tokens=tokens, backend="reference"), "output") == scratch


def test_tokens_or_channels() -> None:
    """UDL 12.9: 256 patches of 512 channels."""
    spatial = cost(Attention(), tokens=256, dim=512)
    assert spatial.macs == 67_108_864
    assert spatial.exponentials == 65_536
    layer = cost(MultiHeadAttention(512, 1), tokens=256)
    channel = cost(ChannelAttention(512, groups=1), tokens=256)
    assert layer.macs == 335_544_320
    assert channel.macs == 402_653_184
    assert channel.macs - 268_435_456 == 134_217_728
    assert channel.exponentials == 262_144
    assert float(channel.macs / layer.macs) == 1.2


@pytest.mark.slow
def test_formulas_of_the_two_attentions_of_davit() -> None:
    """P tokens of C channels: 2 P^2 C + 4 P C^2 over all patches and 6 P C^2 over all channels; with windows of P_w
    patches 2 P P_w C + 4 P C^2, with groups of C_g channels 2 P C_g C + 4 P C^2."""
    B, D, H, N, R, W = size_symbols("B D H N R W")
    patches, channels = cost(MultiHeadAttention(512, 1)), cost(ChannelAttention(512, groups=16))
    assert sympy.expand(patches.macs.formula - B * (2 * N**2 * D + 4 * N * D**2)) == 0
    assert sympy.expand(channels.macs.formula - B * (2 * N * (D / H) * D + 4 * N * D**2)) == 0
    assert sympy.expand(channels.macs.formula.subs(H, 1) - 6 * B * N * D**2) == 0
    windows = cost(WindowAttention(512, 16, 7), image=(21, 14)).macs
    assert windows == 2 * 21 * 14 * 49 * 512 + 4 * 21 * 14 * 512**2  # no padding
    padded = {R: 7 * sympy.ceiling(R / 7), W: 7 * sympy.ceiling(W / 7)}
    area = (padded[R] * padded[W]).subs({R: 16, W: 15})
    assert cost(WindowAttention(512, 16, 7), image=(16, 15)).macs == 2 * area * 49 * 512 + 4 * area * 512**2
    assert {str(symbol) for symbol in windows.formula.free_symbols} >= {"B", "D", "R", "W"}


def test_channels_in_groups_and_windows() -> None:
    """UDL 12.9, as DaViT does it: groups of 32 channels; windows of 7 on a grid of 16 that is padded to 21."""
    projections = 268_435_456
    grouped = cost(ChannelAttention(512, groups=16), tokens=256)
    assert (grouped.macs, grouped.exponentials) == (projections + 8_388_608, 16_384)
    assert cost(WindowAttention(512, 16, 7), image=(16, 16)).macs == 462_422_016 + 22_127_616
    assert cost(WindowAttention(512, 16, 8), image=(16, 16)).macs == projections + 16_777_216
    assert cost(WindowAttention(512, 16, 4), image=(16, 16)).macs == projections + 4_194_304


# Patterns

GRID = (16, 16)


@pytest.mark.parametrize(
    ("pattern", "tokens", "pairs", "macs"),
    [
        (Full(), 256, 65_536, 67_108_864),
        (Neighborhood(GRID, 1), 256, 2_116, 2_166_784),
        (Neighborhood(GRID, 2), 256, 5_476, 5_607_424),
        (Neighborhood(GRID, 3), 256, 10_000, 10_240_000),
        (Axial(GRID), 256, 7_936, 8_126_464),
        (GridWindow(GRID, 4), 256, 4_096, 4_194_304),
        (GridWindow(GRID, 8), 256, 16_384, 16_777_216),
        (GridStride(GRID, 4), 256, 4_096, 4_194_304),
        (First(2) | Neighborhood(GRID, 1, start=2), 258, 3_144, 3_219_456),
    ],
    ids=repr,
)
def test_cheaper_patterns_of_an_image(pattern, tokens: int, pairs: int, macs: int) -> None:
    """UDL 12.8: 16 x 16 patches of 512 channels."""
    found = cost(Attention(pattern=pattern), tokens=tokens, dim=512)
    assert (found.pairs, found.macs) == (pairs, macs)


@pytest.mark.parametrize(
    ("pattern", "pairs"),
    [
        (Full(), (144, 256, 4096, 65_536, 1_048_576)),
        (Causal(), (78, 136, 2080, 32_896, 524_800)),
        (Window(1, 1), (34, 46, 190, 766, 3070)),
        (Window(2, 0), (33, 45, 189, 765, 3069)),
        (Window(2, 0, step=2), (30, 42, 186, 762, 3066)),
        (Window(2, 0, step=3), (27, 39, 183, 759, 3063)),
        (First(2) | Window(1, 1), (72, 100, 436, 1780, 7156)),
    ],
    ids=repr,
)
def test_pairs_of_figure_12_15(pattern, pairs: tuple[int, ...]) -> None:
    for tokens, expected in zip((12, 16, 64, 256, 1024), pairs, strict=True):
        assert cost(Attention(pattern=pattern), tokens=tokens, dim=8).pairs == expected


@pytest.mark.parametrize(("tokens", "pairs"), [(12, 41), (16, 63), (64, 639), (256, 8703), (1024, 133_119)])
def test_pairs_of_selected_rows(tokens: int, pairs: int) -> None:
    """Panel g: every fourth token sees all before it, the others two."""
    chosen = Causal() & (Where(lambda i, j: i % 4 == 0) | Window(2, 0))
    assert cost(Attention(pattern=chosen), tokens=tokens, dim=8).pairs == pairs


# Linear attention


@pytest.mark.parametrize(
    ("tokens", "square", "linear"), [(256, 8_388_608, 2_129_920), (4096, 2_147_483_648, 34_078_720)]
)
def test_linear_attention(tokens: int, square: int, linear: int) -> None:
    """UDL 12.10: 2 N^2 D against 2 N D^2 + 2 N D, for 64 channels; equal for D + 1 tokens."""
    softmax = cost(Attention(), tokens=tokens, dim=64)
    kernel = cost(Attention(feature_map="elu1"), tokens=tokens, dim=64)
    assert (softmax.macs, kernel.macs) == (square, linear)
    assert softmax.solve("tokens", kernel) == [65]


def test_the_package_exports_the_question() -> None:
    from regard.cost_model.api import cost as defined

    assert "cost" in regard.__all__
    assert regard.cost is cost is defined
    found = regard.cost(Attention(), tokens=7, dim=5)
    assert isinstance(found, Cost)
    assert found.macs == 2 * 7 * 7 * 5
