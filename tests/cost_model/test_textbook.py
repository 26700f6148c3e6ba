"""Every count that the textbooks' questions have, to the unit."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard import Attention, Causal, GridWindow, Where, Window, cost
from regard.calculus import separable_attention
from regard.cost_model import textbook
from regard.errors import CostError
from regard.layers import AttentionSizes, MultiHeadAttention

# Prince, 12.1


@pytest.mark.parametrize(
    ("tokens", "width", "counts"),
    [
        (3, 4, (48, 12, 9, 144, 12)),
        (256, 512, (786_432, 1_536, 65_536, 17_179_869_184, 131_072)),
        (197, 768, (1_769_472, 2_304, 38_809, 22_890_479_616, 151_296)),
        (1024, 512, (786_432, 1_536, 1_048_576, 274_877_906_944, 524_288)),
    ],
)
def test_parameters_of_self_attention(tokens, width, counts):
    assert [row.quantity.value for row in textbook.attention(tokens, width).rows] == list(counts)


def test_parameters_are_those_of_the_layer():
    table = textbook.attention(3, 4)
    layer = MultiHeadAttention(4, 1).projections
    assert table["weights"].value + table["biases"].value == sum(p.numel() for p in layer.parameters())


# 12.5


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32])
def test_heads_cost_nothing_but_attention_weights(heads):
    table = textbook.mha(256, 512, heads)
    assert table["query, key and value weights"] == 786_432
    assert table["projection MAC"] == 201_326_592
    assert table["score MAC"] == 33_554_432
    assert table["score MAC of a head"] == 33_554_432 // heads
    assert table["stored attention weights"] == 65_536 * heads
    assert table["weights with full heads"] == 786_432 * heads
    assert table["score MAC with full heads"] == 33_554_432 * heads
    full = textbook.mha(256, 512, heads, head_dim=512)
    assert full["query, key and value weights"] == 786_432 * heads
    assert full["score MAC"] == 33_554_432 * heads


def test_the_heads_of_the_table_are_those_of_the_operator():
    attend = cost(Attention(), tokens=256, heads=8, dim=64).by_part()["scores"]
    assert textbook.mha(256, 512, 8)["score MAC"] == attend.macs
    with pytest.raises(CostError, match="no multiple"):
        textbook.mha(256, 512, 7)


# 12.7


@pytest.mark.parametrize(
    ("tokens", "width", "step", "scratch"),
    [(255, 512, 1_048_576, 268_435_456), (1023, 768, 3_342_336, 3_422_552_064)],
)
def test_one_token_more(tokens, width, step, scratch):
    table = textbook.append(tokens, width)
    assert table["one token more"] == step == 3 * width**2 + 2 * (tokens + 1) * width
    assert table["all from the beginning"] == scratch
    assert table["times as much"] == tokens + 1
    decode = cost(Attention(pattern=Causal()), step="decode", tokens=tokens, dim=width)
    assert decode.macs == step - 3 * width**2


# 12.8


@pytest.mark.parametrize(
    ("label", "pairs", "density", "macs", "layers"),
    [
        ("full", 65_536, 1, 67_108_864, 1),
        ("neighbours 1 away", 2_116, 0.03229, 2_166_784, 15),
        ("neighbours 2 away", 5_476, 0.08356, 5_607_424, 8),
        ("neighbours 3 away", 10_000, 0.15259, 10_240_000, 5),
        ("row and column", 7_936, 0.12109, 8_126_464, 2),
        ("windows of 4 x 4", 4_096, 0.0625, 4_194_304, None),
        ("windows of 8 x 8", 16_384, 0.25, 16_777_216, None),
        ("every 4th", 4_096, 0.0625, 4_194_304, None),
        ("windows of 4 x 4, then every 4th", 4_096, 0.0625, 4_194_304, 2),
        ("2 global tokens, neighbours 1 away", 3_144, 0.04723, 3_219_456, 2),
    ],
)
def test_patterns_on_patches(label, pairs, density, macs, layers, patches):
    assert patches.cell(label, "pairs") == pairs
    assert patches.cell(label, "density").value == pytest.approx(density, abs=5e-6)
    assert patches.cell(label, "MAC") == macs
    assert patches.cell(label, "layers until connected") == layers


@pytest.fixture(scope="module")
def patches():
    return textbook.patterns()


def test_a_grid_need_not_be_square():
    table = textbook.patterns((6, 9), 5)
    assert table.cell("windows of 4 x 4", "pairs") == GridWindow((6, 9), 4).pairs(54)
    assert str(table.cell("neighbours 1 away", "pairs").formula) == "(3*R - 2)*(3*W - 2)"


# 12.9


def test_patches_and_channels():
    table = textbook.davit((16, 16), 512)
    assert {row.label: row.quantity.value for row in table.rows} == {
        "patches: scores": 33_554_432,
        "patches: scores and values": 67_108_864,
        "patches: exponentials": 65_536,
        "channels: scores": 67_108_864,
        "channels: scores and values": 134_217_728,
        "channels: exponentials": 262_144,
        "channels to patches": 2,
        "projections": 268_435_456,
        "patches: with projections": 335_544_320,
        "channels: with projections": 402_653_184,
        "channels to patches, with projections": 1.2,
        "groups of channels: scores": 4_194_304,
        "groups of channels: scores and values": 8_388_608,
        "groups of channels: exponentials": 16_384,
        "windows": 9,
        "windows: scores": 11_063_808,
        "windows: scores and values": 22_127_616,
        "windows: projections": 462_422_016,
    }


@pytest.mark.parametrize(("window", "both"), [(8, 16_777_216), (4, 4_194_304), (7, 22_127_616)])
def test_windows_fill_the_grid_up(window, both):
    assert textbook.davit((16, 16), 512, window=window)["windows: scores and values"] == both


def test_ungrouped_attention_needs_neither_windows_nor_groups():
    table = textbook.davit((3, 5), 7, window=None, group_dim=None)
    assert table["patches: scores"] == 15**2 * 7
    with pytest.raises(CostError, match="no such row"):
        _ = table["windows"]


# 12.10


@pytest.mark.parametrize(
    ("tokens", "softmax", "linear", "times"),
    [(256, 8_388_608, 2_129_920, 256 / 65), (4096, 2_147_483_648, 34_078_720, 63.0)],
)
def test_linear_attention(tokens, softmax, linear, times):
    table = textbook.linear(tokens, 64)
    assert table["softmax MAC"] == softmax
    assert table["linear MAC"] == linear
    assert table["times as much"].value == pytest.approx(times, abs=0.05)
    assert table["equal at so many tokens"] == 65
    assert table["recurrent step MAC"] == 2 * 64**2
    assert table["state numbers"] == 64 * 65
    assert cost(Attention(feature_map="elu1"), tokens=tokens, dim=64).macs == linear
    assert textbook.linear(65, 64)["softmax MAC"] == textbook.linear(65, 64)["linear MAC"]


# TTIC 1 and 2


@pytest.mark.parametrize(
    ("tokens", "width", "heads", "row", "layer"),
    [
        (1024, 512, 8, (19, 30), (40, 51)),
        (16, 64, 4, (11, 16), (23, 28)),
        (512, 768, 12, (18, 28), (39, 49)),
        (4096, 1024, 16, (21, 34), (45, 58)),
    ],
)
def test_steps_of_self_attention(tokens, width, heads, row, layer):
    table = textbook.parallel(tokens, width, heads)
    assert (table["a row of weights"], table["a row of weights, stable"]) == row
    assert (table["the layer"], table["the layer, stable"]) == layer
    # The layer is one inner product over the channels deeper than the operator.
    for stable, steps in zip((False, True), layer, strict=True):
        operator = cost(Attention(), tokens=tokens, dim=width // heads, stable=stable)
        assert operator.depth == steps - 1 - math.ceil(math.log2(width))


def test_work_and_chains():
    table = textbook.parallel(1024, 512, 8)
    assert table["work (MAC)"] == 1_879_048_192 == 3 * 1024 * 512**2 + 2 * 1024**2 * 512
    assert table["sums as chains"] == 2_624
    operator = cost(Attention(), tokens=1024, dim=64, stable=False, serial=True)
    assert table["sums as chains, with the division"] == 512 + operator.depth.value


def test_twice_the_heads_change_the_depth_through_their_channels_only():
    depths = [textbook.parallel(1024, 512, heads)["the layer"].value for heads in (4, 8, 16)]
    assert depths == [41, 40, 39]
    fixed = {textbook.parallel(1024, 512, heads, head_dim=64)["the layer"].value for heads in (4, 8, 16)}
    assert fixed == {40}


def test_a_grid_has_one_tree_over_all_its_tokens():
    # 5 * 13 = 65 tokens need 7 levels, not 3 + 4; and 5 * 6 = 30 need 5, where rows and columns would need 3 + 3.
    assert textbook.parallel((5, 13), 64, 4)["the layer"] == textbook.parallel(65, 64, 4)["the layer"].value
    assert textbook.parallel((5, 6), 64, 4)["the layer"] == textbook.parallel(30, 64, 4)["the layer"].value
    assert textbook.parallel((5, 6), 64, 4)["a row of weights"] == (1 + 4) + 1 + 5 + 1


# Cordonnier, Loukas and Jaggi: a1 and b2


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ((8, 512, 64, 64, 512), 1_049_088),
        ((12, 768, 64, 64, 768), 2_360_064),
        ((16, 1024, 64, 64, 1024), 4_195_328),
        ((9, 400, 400, 400, 400), 5_760_400),
        ((4, 10, 3, 5, 7), 587),
    ],
)
def test_parameters_of_multi_head_attention(sizes, count):
    heads, channels, hidden, value, output = sizes
    assert textbook.parameters(*sizes)["parameters"] == count
    layer = MultiHeadAttention(AttentionSizes(channels, heads, key=hidden, value=value, output=output), bias="o")
    assert sum(parameter.numel() for parameter in layer.parameters()) == count


def test_operations_of_relative_scores():
    table = textbook.encoding(1024, 64)
    assert table["one entry, naively"] == 65_535 == 16 * 64**2 - 1
    assert table["exponent of D"].value == pytest.approx(2.00, abs=0.02)
    assert table["all entries, naively"] == 68_719_476_736
    assert table["queries and keys made once"] == 150_994_944
    assert table["times as much"].value == pytest.approx(455, abs=0.2)


def test_a_quadratic_encoding_falls_apart_into_rows_and_columns():
    table = textbook.encoding((32, 32), 64)
    assert table["queries and keys made once"] == 150_994_944  # as 1,024 tokens in a row
    assert table["quadratic encoding, lookups"] == 1024**2
    assert table["quadratic encoding, different scores"] == 63**2
    assert table["sums over values, pair by pair"] == 2 * 1024**2 * 64
    assert table["sums over values, rows and columns apart"] == 2 * 1024 * 64 * 64
    # What runs, for one head of 64 channels on a grid that is not square.
    rows, columns = torch.randn(1, 3, 3), torch.randn(1, 5, 5)
    with FlopCounterMode(display=False) as theirs:
        separable_attention(rows, columns, torch.randn(1, 3, 5, 64))
    apart = textbook.encoding((3, 5), 64)
    assert apart["sums over values, rows and columns apart"] == theirs.get_total_flops()
    assert apart["quadratic encoding, different scores"] == 5 * 9
    # The power of N: four times the tokens, eight times the work.
    assert textbook.encoding((64, 64), 64)["sums over values, rows and columns apart"] == 8 * 2 * 1024 * 64 * 64


def test_queries_and_keys_made_once_are_what_torch_counts():
    x, query, key = torch.randn(37, 5), torch.randn(5, 5), torch.randn(5, 5)
    with FlopCounterMode(display=False) as theirs:
        (x @ query) @ (x @ key).mT
    assert textbook.encoding(37, 5)["queries and keys made once"] == theirs.get_total_flops()


# Prince, figure 12.15

PANELS = {
    "a": (144, 256, 4096, 65_536, 1_048_576),
    "b": (78, 136, 2080, 32_896, 524_800),
    "c": (34, 46, 190, 766, 3070),
    "d": (33, 45, 189, 765, 3069),
    "e": (30, 42, 186, 762, 3066),
    "f": (27, 39, 183, 759, 3063),
    "g": (41, 63, 639, 8703, 133_119),
    "h": (72, 100, 436, 1780, 7156),
}


@pytest.mark.parametrize(("place", "tokens"), list(enumerate((12, 16, 64, 256, 1024))))
def test_pairs_of_the_panels(place, tokens):
    table = textbook.panels(tokens)
    assert {row.label: row.quantity.value for row in table.rows} == {name: n[place] for name, n in PANELS.items()}


@pytest.mark.parametrize(("tokens", "width"), [(1, 3), (5, 3), (13, 2), (14, 6), (23, 7), (10, 40)])
def test_panel_g_is_its_mask(tokens, width):
    mask = Window(width - 1, 0) | (Causal() & Where(lambda i, j: (i % 4 == 0) & (j >= 0)))
    assert textbook.panels(tokens, width=width)["g"] == int(mask.matrix(tokens).sum())


# Tables


def test_tables_print_and_serialise():
    table = textbook.append(255, 512)
    assert "1,048,576  3*D**2 + 2*D*N + 2*D" in str(table)
    assert "N          255  tokens in the cache, before the new one" in str(table)
    plain = json.loads(json.dumps(table.to_dict()))
    assert plain["rows"]["one token more"]["count"] == {"formula": "3*D**2 + 2*D*N + 2*D", "value": 1_048_576}
    assert plain["letters"]["D"]["value"] == 512


def test_a_table_of_several_columns_says_never(patches):
    assert "never" in str(patches)
    assert patches.to_dict()["rows"]["every 4th"]["layers until connected"] is None
    assert dict((letter, number) for letter, _, number in patches.legend())["N"] is None  # 256 here, 258 there


def test_every_question_refuses_what_is_no_size():
    with pytest.raises(CostError, match="not a size"):
        textbook.attention(0, 4)
    with pytest.raises(CostError, match="not a size"):
        textbook.parallel((3, 0), 64, 4)
    assert set(textbook.QUESTIONS) >= {"attention", "mha", "append", "linear", "davit", "encoding", "parallel"}
