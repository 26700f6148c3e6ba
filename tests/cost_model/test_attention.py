"""The cost of a description: by hand, by torch's own counter, and by what is executed and saved."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from cost_model.counting import Counter, newly_saved, reference_only
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import (
    Alibi,
    Attention,
    Blocks,
    Causal,
    First,
    Full,
    Gaussian,
    Neighborhood,
    Padding,
    Quadratic,
    RelativeTable,
    Segments,
    TransformerXL,
    Window,
    cost,
)
from regard.backends import linear_attention as linear_backend
from regard.cost_model.attention.attention import count_attention
from regard.cost_model.attention.shape import Shape
from regard.cost_model.run_mode import RunMode
from regard.cost_model.symbols import size_symbols
from regard.errors import CostError
from regard.kernels import library
from regard.kernels.program import best_plan
from regard.patterns import Lengths

INF = math.inf
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "tokens": 11, "keys": 13, "dim": 6, "value_dim": 5}
needs_kernels = pytest.mark.skipif(library.missing() is not None, reason="the kernels were not built")


def tensors(dtype=torch.float64, *, batch, heads, kv_heads, tokens, keys, dim, value_dim):
    shapes = ((batch, heads, tokens, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def executed(attention: Attention, backend: str, backward: bool, **sizes) -> Counter:
    """What `attend` really multiplies. Only float64 counts: marks of what is not finite are multiplied in float32."""
    if isinstance(attention.bias, nn.Module):
        attention.bias.double()
    inputs, counter = tensors(**sizes), Counter(only=torch.float64)
    if not backward:
        with torch.no_grad(), counter:
            regard.attend(*inputs, attention, backend=backend)
        return counter
    output = regard.attend(*inputs, attention, backend=backend)
    slope = torch.randn_like(output)
    with counter:
        output.backward(slope)
    return counter


# By hand


def test_full_attention_costs_two_products_for_each_pair():
    predicted = cost(Attention(), tokens=256, dim=64)
    assert str(predicted.macs.formula) == "2*B*H*N**2*d"
    assert predicted.macs == 8_388_608
    assert predicted.flops == 2 * 8_388_608
    assert predicted.pairs == 65_536
    assert predicted.exponentials == 65_536
    assert list(predicted.by_part()) == ["scores", "softmax", "values"]
    assert [part.macs.value for part in predicted.by_part().values()] == [4_194_304, 0, 4_194_304]


def test_a_causal_pattern_costs_its_triangle():
    predicted = cost(Attention(pattern=Causal()), tokens=1024, dim=64, heads=8)
    assert predicted.macs == 537_395_200
    assert str(predicted.macs.formula) == "B*H*N*d*(N + 1)"


def test_a_window_costs_the_window():
    predicted = cost(Attention(pattern=Causal() & Window(127, 0)), tokens=4096, dim=64)
    assert predicted.pairs == 128 * 4096 - 127 * 128 // 2
    assert predicted.macs == 2 * 64 * predicted.pairs.value
    assert predicted.notes == ("pairs: 128*N - 8128 holds for N >= 127",)


def test_backward_costs_twice_the_products_and_kernels_compute_scores_again():
    sizes = {"tokens": 37, "dim": 6, "value_dim": 10}
    pairs = 37**2
    assert cost(Attention(), step="backward", **sizes).macs == 2 * pairs * (6 + 10)
    assert cost(Attention(), step="training", **sizes).macs == 3 * pairs * (6 + 10)
    for backend in ("native", "blocked"):
        again = cost(Attention(), step="backward", backend=backend, **sizes)
        assert again.macs == pairs * (3 * 6 + 2 * 10)
        assert again.exponentials == pairs


def test_decoding_reads_one_row_of_keys():
    predicted = cost(Attention(pattern=Causal()), step="decode", tokens=255, dim=64, heads=8)
    assert str(predicted.macs.formula) == "2*B*H*d*(N + 1)"
    assert predicted.macs == 2 * 8 * 64 * 256
    assert predicted.activation_bytes == 0
    window = cost(Attention(pattern=Window(7, 0)), step="decode", tokens=255, dim=64)
    assert window.pairs == 8
    assert cost(Attention(pattern=Window(7, 0)), step="decode", tokens=5, dim=64).pairs == 6


def test_bytes_are_operands_and_results_once():
    sizes = {"batch": 2, "heads": 3, "tokens": 5, "keys": 7, "dim": 11, "value_dim": 13}
    query, key, value, out, square = 2 * 3 * 5 * 11, 2 * 3 * 7 * 11, 2 * 3 * 7 * 13, 2 * 3 * 5 * 13, 2 * 3 * 5 * 7
    parts = cost(Attention(), **sizes).by_part()
    assert parts["scores"].bytes == 4 * (query + key + square)
    assert parts["softmax"].bytes == 4 * 2 * square
    assert parts["values"].bytes == 4 * (square + value + out)
    fused = cost(Attention(), backend="native", **sizes)
    assert fused.bytes == 4 * (query + key + value + out + 2 * 3 * 5)
    assert cost(Attention(), dtype=torch.float64, **sizes).bytes == 2 * cost(Attention(), **sizes).bytes.value


@pytest.mark.parametrize(("stable", "serial", "steps"), [(False, False, 30), (True, False, 41), (False, True, 2113)])
def test_depth_is_that_of_trees_or_chains(stable, serial, steps):
    # T = 1024, U = 64: a row of the softmax takes (1 + 6) + 1 + 10 + 1 steps, the values 1 + 10 more.
    predicted = cost(Attention(), tokens=1024, dim=64, stable=stable, serial=serial)
    assert predicted.depth == steps
    assert cost(Attention(), tokens=512, dim=64, stable=stable, serial=serial).depth < steps


def test_a_narrow_window_is_less_deep_than_the_square():
    assert cost(Attention(pattern=Window(3, 0)), tokens=1024, dim=64, stable=False).depth == (1 + 6) + 1 + 2 + 1 + 1 + 2


def test_a_size_that_is_not_given_stays_a_symbol():
    predicted = cost(Attention(pattern=Window(3, 0)))
    assert str(predicted.macs.formula) == "4*B*H*d*(2*N - 3)"
    assert "N >= 3" in predicted.notes[0]
    with pytest.raises(CostError, match="no number yet"):
        _ = predicted.macs.value


def test_rows_that_see_different_pairs_are_added_up():
    ids = [[0, 0, 1, 1, 1], [0, 1, 2, 3, -1]]
    predicted = cost(Attention(pattern=Segments(ids)), dim=7, heads=3)
    assert predicted.pairs == 3 * (4 + 9 + 4)
    assert predicted.macs == 2 * 7 * 3 * 17
    assert cost(Attention(pattern=Padding([5, 3, 11])), tokens=13, dim=7).pairs == 13 * 19
    with pytest.raises(CostError, match="another batch"):
        cost(Attention(pattern=Padding([5, 3, 11])), tokens=13, dim=7, batch=2)


def test_a_grid_knows_its_own_tokens():
    predicted = cost(Attention(pattern=First(2) | Neighborhood((16, 16), 1, start=2)), dim=512)
    assert predicted.pairs == 3_144
    assert predicted.macs == 3_219_456


# Against torch's own counter, on formulas written out in torch


@pytest.mark.parametrize("backward", [False, True])
def test_the_mathematics_is_what_torch_counts_in_plain_formulas(backward):
    sizes = {**SIZES, "kv_heads": 4}
    query, key, value = tensors(**sizes)
    step = "training" if backward else "forward"
    with FlopCounterMode(display=False) as theirs:
        output = (query @ key.mT / math.sqrt(6)).softmax(-1) @ value
        if backward:
            output.sum().backward()
    assert cost(Attention(), step=step, **sizes).flops == theirs.get_total_flops()


@pytest.mark.parametrize("backward", [False, True])
def test_linear_attention_is_what_torch_counts_in_plain_formulas(backward):
    sizes = {**SIZES, "kv_heads": 4}
    query, key, value = tensors(**sizes)
    step = "training" if backward else "forward"
    with FlopCounterMode(display=False) as theirs:
        read, met = query.relu(), key.relu()
        sums, norm = met.mT @ value, met.mT @ torch.ones_like(value[..., :1]).requires_grad_()
        output = (read @ sums) / (read @ norm)
        if backward:
            output.sum().backward()
    assert cost(Attention(feature_map="relu"), step=step, **sizes).flops == theirs.get_total_flops()


# Against what runs

DESCRIPTIONS = {
    "full": lambda: Attention(),
    "causal": lambda: Attention(pattern=Causal()),
    "window": lambda: Attention(pattern=Window(2, 1)),
    "padded": lambda: Attention(pattern=Padding([5, 13]) & Causal()),
    "mean": lambda: Attention(scale=0.0),
    "causal mean": lambda: Attention(scale=0.0, pattern=Causal()),
    "padded mean": lambda: Attention(scale=0.0, pattern=Padding([5, 13])),
    "hard": lambda: Attention(scale=INF),
    "hard, smallest": lambda: Attention(scale=-INF, pattern=Causal()),
    "alibi": lambda: Attention(bias=Alibi(4)),
    "learned table": lambda: Attention(bias=RelativeTable(4, 30)),
    "tensor": lambda: Attention(bias=torch.randn(4, 11, 13, dtype=torch.float64)),
    "transformer-xl": lambda: Attention(bias=TransformerXL(4, 6)),
    "bias alone": lambda: Attention(scale=0.0, bias=RelativeTable(4, 30)),
    "fixed bias alone": lambda: Attention(scale=0.0, bias=Alibi(4)),
    "hard, learned bias": lambda: Attention(scale=INF, bias=RelativeTable(4, 30)),
    "hard, fixed bias": lambda: Attention(scale=INF, bias=Alibi(4)),
    "elu1": lambda: Attention(feature_map="elu1"),
    "taylor2": lambda: Attention(feature_map="taylor2"),
    "favor+": lambda: Attention(feature_map="favor+"),
    "causal relu": lambda: Attention(feature_map="relu", pattern=Causal()),
    "relu in a window": lambda: Attention(feature_map="relu", pattern=Window(1, 1)),
    "relu, mean": lambda: Attention(feature_map="relu", scale=0.0),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_the_reference_executes_what_its_formula_says(name, backward):
    attention = DESCRIPTIONS[name]()
    predicted = cost(attention, backend="reference", step="backward" if backward else "forward", **SIZES)
    counted = executed(attention, "reference", backward, **SIZES)
    assert predicted.macs == counted.macs
    if attention.feature_map is None:
        assert predicted.exponentials == counted.exponentials


@given(
    name=st.sampled_from(["causal", "mean", "hard", "full", "taylor2", "relu in a window", "bias alone"]),
    sizes=st.tuples(*(st.integers(1, 9) for _ in range(6))),
    group=st.sampled_from([1, 2, 3]),
    backward=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_the_reference_executes_what_its_formula_says_at_any_size(name, sizes, group, backward):
    batch, kv_heads, tokens, more, dim, value_dim = sizes
    heads = kv_heads * group
    attention = DESCRIPTIONS.get(name, Attention)()
    if name == "bias alone":
        attention = Attention(scale=0.0, bias=RelativeTable(heads, 30))
    given_sizes = dict(zip(SIZES, (batch, heads, kv_heads, tokens, tokens + more - 1, dim, value_dim), strict=True))
    predicted = cost(attention, backend="reference", step="backward" if backward else "forward", **given_sizes)
    assert predicted.macs == executed(attention, "reference", backward, **given_sizes).macs


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("start", [0, 1])
def test_transformer_xl_on_a_grid_has_a_vector_for_each_step_between_cells(start, backward):
    attention = Attention(bias=TransformerXL(4, 6, grid=(3, 5), start=start))
    sizes = {**SIZES, "tokens": 15 + start, "keys": 15 + start}
    predicted = cost(attention, backend="reference", step="backward" if backward else "forward", **sizes)
    assert predicted.macs == executed(attention, "reference", backward, **sizes).macs


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", [name for name in DESCRIPTIONS if name != "transformer-xl"])
def test_tiles_execute_what_their_formula_says(name, backward):
    attention = DESCRIPTIONS[name]()
    predicted = cost(attention, backend="blocked", step="backward" if backward else "forward", **SIZES)
    if attention.feature_map is not None and not isinstance(attention.pattern, Window):
        with patch.object(linear_backend, "is_supported", lambda *_: False):  # in torch, where products are seen
            counted = executed(attention, "linear", backward, **SIZES)
    elif attention.feature_map is not None:
        counted = executed(attention, "reference", backward, **SIZES)
    else:
        counted = executed(attention, "blocked", backward, **SIZES)
    assert predicted.macs == counted.macs


@given(
    pattern=st.sampled_from([Causal(), Window(9, 0), Window(3, 5, step=2), Blocks(16), First(3) | Window(4, 4)]),
    tokens=st.integers(1, 150),
    group=st.sampled_from([1, 2]),
)
@settings(max_examples=8, deadline=None)
def test_tiles_of_any_length_execute_what_their_formula_says(pattern, tokens, group):
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2 // group, "tokens": tokens, "keys": tokens, "dim": 3, "value_dim": 2}
    predicted = cost(Attention(pattern=pattern), backend="blocked", **sizes)
    assert predicted.macs == executed(Attention(pattern=pattern), "blocked", False, **sizes).macs


@pytest.mark.parametrize("tokens", [40, 64, 65, 200])
def test_chunks_of_linear_attention_execute_what_their_formula_says(tokens):
    sizes = {**SIZES, "tokens": tokens, "keys": tokens}
    attention = Attention(feature_map="relu", pattern=Causal())
    with patch.object(linear_backend, "is_supported", lambda *_: False):
        counted = executed(attention, "linear", False, **sizes)
    assert cost(attention, backend="blocked", **sizes).macs == counted.macs


@needs_kernels
@pytest.mark.parametrize("pattern", [Full(), Causal(), Window(9, 2), Blocks(24)])
def test_the_kernels_visit_the_tiles_of_their_plan(pattern):
    predicted = cost(Attention(pattern=pattern), backend="native", tokens=100, dim=6, value_dim=5, heads=3)
    area = best_plan(pattern, Lengths(100, 100), library.lanes(torch.float32)).area
    assert predicted.macs == 3 * area * (6 + 5)
    assert predicted.pairs == 3 * pattern.pairs(100)
    back = cost(Attention(pattern=pattern), backend="native", step="backward", tokens=100, dim=6, value_dim=5, heads=3)
    assert back.macs == 3 * area * (3 * 6 + 2 * 5)


# The limits of temperature


def test_a_mean_adds_every_value_once_where_queries_share_their_sums():
    predicted = cost(Attention(scale=0.0, pattern=Causal()), tokens=100, dim=8, heads=4, kv_heads=2)
    assert predicted.macs == 2 * 100 * 8
    assert predicted.exponentials == 0
    assert cost(Attention(scale=0.0, pattern=Window(3, 3)), tokens=100, dim=8).macs == 300 * 8
    assert cost(Attention(scale=0.0, pattern=First(2)), tokens=100, dim=8).macs == (400 - 4) * 8
    assert cost(Attention(scale=0.0), step="decode", tokens=100, dim=8).macs == 8


def test_hard_attention_is_a_search():
    predicted = cost(Attention(scale=INF), tokens=100, dim=8, value_dim=3)
    assert (predicted.macs, predicted.exponentials) == (100 * 100 * 8, 0)
    assert cost(Attention(scale=INF), step="backward", tokens=100, dim=8, value_dim=3).macs == 0
    with pytest.raises(CostError, match="native"):
        cost(Attention(scale=INF), backend="native", tokens=100, dim=8)


# Linear attention


def test_linear_attention_costs_two_sums_and_no_pair():
    predicted = cost(Attention(feature_map="elu1"), tokens=256, dim=64)
    assert predicted.macs == 2_129_920 == 2 * 256 * 64**2 + 2 * 256 * 64
    assert predicted.pairs == 0
    assert list(predicted.by_part()) == ["features", "state", "readout"]
    assert cost(Attention(feature_map="elu1"), tokens=4096, dim=64).macs == 34_078_720
    causal = cost(Attention(feature_map="elu1", pattern=Causal()), tokens=256, dim=64)
    assert causal.macs == predicted.macs


def test_a_recurrent_step_does_not_depend_on_the_past():
    for tokens in (10, 1000):
        predicted = cost(Attention(feature_map="elu1", pattern=Causal()), step="decode", tokens=tokens, dim=64)
        assert predicted.macs == 2 * 64**2 + 2 * 64


def test_grouped_keys_make_fewer_states():
    predicted = cost(Attention(feature_map="relu"), tokens=11, keys=13, heads=4, kv_heads=2, dim=6, value_dim=5)
    assert predicted.macs == 13 * 2 * 6 * 6 + 11 * 4 * 6 * 6


@pytest.mark.parametrize(("name", "width"), [("elu1", 6), ("taylor2", 1 + 6 + 21), ("favor+", 256)])
def test_features_have_their_own_width(name, width):
    state = cost(Attention(feature_map=name), tokens=11, dim=6, value_dim=5).by_part()["state"]
    assert state.macs == 11 * width * 6
    wanted = 0 if name != "favor+" else 2 * 11 * 6 * 256
    assert cost(Attention(feature_map=name), tokens=11, dim=6).by_part()["features"].macs == wanted


def test_the_width_of_features_of_your_own_is_measured():
    predicted = cost(Attention(feature_map=lambda x: torch.cat((x, x * x), -1)), tokens=11, dim=6)
    assert predicted.by_part()["state"].macs == 11 * 12 * 7
    assert any("your own" in note for note in predicted.notes)


# Biases


@pytest.mark.parametrize(
    "bias",
    [Alibi(4), RelativeTable(4, 5), Gaussian(4), Quadratic(4), TransformerXL(4, 6)],
    ids=lambda b: type(b).__name__,
)
def test_the_parameters_are_those_of_the_bias(bias):
    predicted = cost(Attention(bias=bias), tokens=11, dim=6)
    assert predicted.parameters == sum(parameter.numel() for parameter in bias.parameters())
    assert predicted.pairs == 4 * 121  # and it brought its heads


def test_a_learned_tensor_counts_and_a_fixed_one_does_not():
    learned = nn.Parameter(torch.zeros(4, 7, 7))
    assert cost(Attention(bias=learned), tokens=7, dim=6, heads=4).parameters == 4 * 49
    assert cost(Attention(bias=learned.detach()), tokens=7, dim=6, heads=4).parameters == 0


def test_transformer_xl_multiplies_pairs_keys_and_distances():
    bias = TransformerXL(4, 6)
    part = cost(Attention(bias=bias, pattern=Causal()), tokens=11, dim=6).by_part()["bias"]
    assert part.macs == 4 * 66 * 6 + 4 * 21 * 24 * 6 + 4 * 11 * 6


def test_what_cannot_be_counted_is_said():
    with pytest.raises(CostError, match="tabulate"):
        cost(Attention(bias=TransformerXL(4, 6)), backend="native", tokens=11, dim=6)
    with pytest.raises(CostError, match="every tile"):
        cost(Attention(bias=TransformerXL(4, 6)), backend="blocked", tokens=11, dim=6)
    with pytest.raises(CostError, match="no scores to work on"):
        cost(Attention(bias=Alibi(4), feature_map="elu1"), tokens=11, dim=6)
    with pytest.raises(CostError, match="shared evenly"):
        cost(Attention(), tokens=11, dim=6, heads=3, kv_heads=2)
    with pytest.raises(CostError, match="4 heads"):
        cost(Attention(bias=Alibi(4)), tokens=11, dim=6, heads=3)
    with pytest.raises(CostError, match="tokens \\+ 1"):
        cost(Attention(), step="decode", tokens=11, keys=12, dim=6)


# Saved activations


def saved_bytes(attention: Attention, dtype: torch.dtype, *, inputs_too: bool = True, **sizes) -> int:
    """Bytes that autograd saves. What two runs share beside the inputs is a constant: programs, masks, parameters."""
    given_tensors = tensors(dtype, **sizes)

    def run():
        copies = [tensor.clone() for tensor in given_tensors]  # results of other operations, new in each run
        mine.update(tensor.untyped_storage().data_ptr() for tensor in copies)
        return copies, regard.attend(*copies, attention)

    mine: set[int] = set()
    return sum(size for at, size in newly_saved(run).items() if inputs_too or at not in mine)


ATTENTIONS = {
    "full": lambda: Attention(),
    "causal": lambda: Attention(pattern=Causal()),
    "window": lambda: Attention(pattern=Window(2, 1)),
    "padded": lambda: Attention(pattern=Padding([5, 13])),
    "alibi": lambda: Attention(bias=Alibi(4)),
    "learned table": lambda: Attention(bias=RelativeTable(4, 30)),
    "gaussian": lambda: Attention(bias=Gaussian(4)),
    "transformer-xl": lambda: Attention(bias=TransformerXL(4, 6)),
    "mean": lambda: Attention(scale=0.0),
    "causal mean": lambda: Attention(scale=0.0, pattern=Causal()),
    "padded mean": lambda: Attention(scale=0.0, pattern=Padding([5, 13])),
    "hard": lambda: Attention(scale=INF),
    "elu1": lambda: Attention(feature_map="elu1"),
    "relu": lambda: Attention(feature_map="relu"),
    "taylor2": lambda: Attention(feature_map="taylor2"),
    "favor+": lambda: Attention(feature_map="favor+"),
    "causal elu1": lambda: Attention(feature_map="elu1", pattern=Causal()),
    "causal relu": lambda: Attention(feature_map="relu", pattern=Causal()),
    "causal taylor2": lambda: Attention(feature_map="taylor2", pattern=Causal()),
    "relu, mean": lambda: Attention(feature_map="relu", scale=0.0),
    "causal relu, mean": lambda: Attention(feature_map="relu", scale=0.0, pattern=Causal()),
    "relu in a window": lambda: Attention(feature_map="relu", pattern=Window(1, 1)),
    "relu in a window, mean": lambda: Attention(feature_map="relu", pattern=Window(1, 1), scale=0.0),
    "elu1 in a window": lambda: Attention(feature_map="elu1", pattern=Window(2, 0)),
    "taylor2 from the first": lambda: Attention(feature_map="taylor2", pattern=First(1)),
    "favor+ in a padded window": lambda: Attention(feature_map="favor+", pattern=Window(2, 0) & Padding([5, 13])),
}


@needs_kernels
@pytest.mark.parametrize(("kv_heads", "keys"), [(2, 13), (4, 11)])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_saved_bytes_are_those_of_autograd_to_the_byte(name, kv_heads, keys):
    if "padded" in name and keys == 11:
        keys = 17
    sizes = {**SIZES, "keys": keys, "kv_heads": kv_heads}
    if keys == 11:
        del sizes["keys"]
    attention = ATTENTIONS[name]()
    measured = saved_bytes(attention, torch.float32, **{**sizes, "keys": keys})
    assert cost(attention, **sizes).activation_bytes == measured


@needs_kernels
def test_a_tensor_that_is_added_was_there_before():
    attention = Attention(bias=nn.Parameter(torch.randn(4, 11, 13)))
    assert cost(attention, **SIZES).activation_bytes == saved_bytes(attention, torch.float32, **SIZES)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_results_of_half_precision_are_saved_in_float32(name, dtype):
    attention = ATTENTIONS[name]()
    if isinstance(attention.bias, nn.Module):
        attention.bias.to(dtype)
    assert cost(attention, dtype=dtype, **SIZES).activation_bytes == saved_bytes(attention, dtype, **SIZES)


@needs_kernels
@pytest.mark.parametrize("name", ["relu in a window", "elu1", "favor+", "causal taylor2"])
def test_the_reference_keeps_its_squares_of_features(name):
    attention = ATTENTIONS[name]()
    predicted = cost(attention, backend="reference", **SIZES)
    with reference_only():
        assert predicted.activation_bytes == saved_bytes(attention, torch.float32, **SIZES)
    assert not any("saved activations" in note for note in predicted.notes)


@needs_kernels
def test_inside_a_layer_only_new_tensors_are_saved():
    B, N, H, D = size_symbols("B N H D")
    shape = Shape(B, N, N, H, H, D / H, D / H, values={B: 2, N: 11, H: 4, D: 24}, keeps=False)
    found = sum(part.saved for part in count_attention(Attention(), shape, RunMode()).parts).subs(shape.values)
    sizes = {**SIZES, "keys": 11, "kv_heads": 4, "value_dim": 6}
    assert found == saved_bytes(Attention(), torch.float32, inputs_too=False, **sizes)
