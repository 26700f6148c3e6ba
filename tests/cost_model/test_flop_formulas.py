"""torch's FlopCounterMode with the rest of the table: every count against one by hand."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import regard.layers  # noqa: F401  all of Regard's operators
from regard import Attention, Causal, Full, Window, attend
from regard.cost_model.flop_formulas import corrected, flop_counter, formulas, register, unregister
from regard.errors import CostError
from regard.kernels.decode import run_decode
from regard.kernels.library import missing
from regard.kernels.linear import gemm, gemv
from regard.layers import MultiHeadAttention
from regard.patterns import Padding

B, H, G, N, M, D, E = 2, 6, 3, 11, 13, 5, 7
native = pytest.mark.skipif(missing() is not None, reason=f"no native kernels here: {missing()}")


def counted(run, **words):
    with flop_counter(**words) as counter:
        run()
    return counter.get_total_flops()


def ones(*shape, **words):
    return torch.ones(*shape, **words)


# Products

PRODUCTS = {
    "mv": (lambda: ones(5, 7) @ ones(7), 5 * 7),
    "dot": (lambda: ones(7) @ ones(7), 7),
    "vdot": (lambda: torch.vdot(ones(7), ones(7)), 7),
    "addmv": (lambda: torch.addmv(ones(5), ones(5, 7), ones(7)), 5 * 7),
    "addmv_": (lambda: ones(5).addmv_(ones(5, 7), ones(7)), 5 * 7),
    "addmm": (lambda: torch.addmm(ones(3, 5), ones(3, 7), ones(7, 5)), 3 * 7 * 5),
    "addmm_": (lambda: ones(3, 5).addmm_(ones(3, 7), ones(7, 5)), 3 * 7 * 5),
    "baddbmm_": (lambda: ones(2, 3, 5).baddbmm_(ones(2, 3, 7), ones(2, 7, 5)), 2 * 3 * 7 * 5),
    "addbmm": (lambda: torch.addbmm(ones(3, 5), ones(2, 3, 7), ones(2, 7, 5)), 2 * 3 * 7 * 5),
    "addbmm_": (lambda: ones(3, 5).addbmm_(ones(2, 3, 7), ones(2, 7, 5)), 2 * 3 * 7 * 5),
    "addr": (lambda: torch.addr(ones(5, 7), ones(5), ones(7)), 5 * 7),
    "addr_": (lambda: ones(5, 7).addr_(ones(5), ones(7)), 5 * 7),
    "activation": (lambda: torch._addmm_activation(ones(5), ones(3, 7), ones(7, 5)), 3 * 7 * 5),
    "int8": (lambda: torch._int_mm(*(ones(*s, dtype=torch.int8) for s in ((3, 8), (8, 16)))), 3 * 8 * 16),
    "grouped": (lambda: torch._grouped_mm(*(ones(*s).bfloat16() for s in ((2, 3, 8), (2, 8, 16)))), 2 * 3 * 8 * 16),
    # x W is (3, 11, 7) from (3, 5) and (11, 5, 7); its product with y leaves (3, 11).
    "bilinear": (lambda: F.bilinear(ones(3, 5), ones(3, 7), ones(11, 5, 7)), 3 * 11 * 5 * 7 + 3 * 11 * 7),
    "time": (lambda: torch.conv_tbc(ones(13, 2, 5), ones(3, 5, 7), ones(7)), 11 * 2 * 3 * 5 * 7),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_two_operations_for_each_multiply_add(name):
    run, macs = PRODUCTS[name]
    assert counted(run) == 2 * macs


def test_rows_that_are_shared_out_among_groups_are_counted_once():
    ends = torch.tensor([2, 6], dtype=torch.int32)
    left, right = ones(6, 8).bfloat16(), ones(2, 8, 16).bfloat16()
    assert counted(lambda: torch._grouped_mm(left, right, offs=ends)) == 2 * 6 * 8 * 16


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_both_gradients_of_a_convolution_cost_as_much_as_the_way_forward(groups, transposed):
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(6, 12, (3, 5), stride=2, groups=groups)
    x = torch.randn(2, 6, 11, 13)
    places = 11 * 13 if transposed else 5 * 5
    forward = 2 * 2 * places * 3 * 5 * 6 * 12 // groups
    assert counted(lambda: layer(x)) == forward
    assert counted(lambda: layer(x).sum().backward()) == 2 * forward  # an input that needs no gradient
    assert counted(lambda: layer(x.clone().requires_grad_()).sum().backward()) == 3 * forward


def test_torch_itself_counts_too_much_for_grouped_convolutions():
    """The day this fails, torch has mended its formula, and ours is not needed any more."""
    layer, x = nn.Conv2d(6, 12, 3, groups=6), torch.randn(1, 6, 5, 5)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    forward = 2 * 9 * 9 * 12
    assert counter.get_total_flops() == forward + 6 * forward
    assert counted(lambda: layer(x).sum().backward()) == 2 * forward


def test_recurrent_layers_are_counted():
    layer, x = nn.LSTM(5, 7, batch_first=True), torch.randn(2, 9, 5)
    forward = 2 * 2 * 9 * 4 * 7 * (5 + 7)
    with torch.no_grad():
        assert counted(lambda: layer(x)) == forward
    assert counted(lambda: layer(x.requires_grad_())[0].sum().backward()) == 3 * forward


# Attention by torch


def attention_inputs(kv_heads=H, grad=False):
    query, key, value = torch.randn(B, H, N, D), torch.randn(B, kv_heads, M, D), torch.randn(B, kv_heads, M, D)
    return [tensor.requires_grad_(grad) for tensor in (query, key, value)]


def test_attention_is_two_products_forward_and_five_backward():
    inputs = attention_inputs(grad=True)
    product = 2 * B * H * N * M * D
    assert counted(lambda: F.scaled_dot_product_attention(*inputs)) == 2 * product
    assert counted(lambda: F.scaled_dot_product_attention(*inputs).sum().backward()) == (2 + 5) * product


def test_torch_itself_counts_nothing_for_attention_here():
    """The day this fails, torch knows the operator, and register() must not stand in its way."""
    with FlopCounterMode(display=False) as counter:
        F.scaled_dot_product_attention(*attention_inputs())
    assert counter.get_total_flops() == 0


def test_heads_that_share_keys_do_their_own_products():
    inputs = attention_inputs(kv_heads=G)
    run = lambda: F.scaled_dot_product_attention(*inputs, enable_gqa=True)  # noqa: E731
    assert counted(run) == 2 * 2 * B * H * N * M * D


def test_a_mask_hides_nothing_from_the_count():
    inputs, mask = attention_inputs(), torch.ones(N, M, dtype=torch.bool).tril()
    assert counted(lambda: F.scaled_dot_product_attention(*inputs, attn_mask=mask)) == 2 * 2 * B * H * N * M * D


@pytest.mark.parametrize(("queries", "keys"), [(11, 11), (11, 13), (13, 11), (1, 7)])
def test_causal_attention_is_the_square_or_the_triangle(queries, keys):
    query = torch.randn(B, H, queries, D, requires_grad=True)
    key, value = torch.randn(2, B, H, keys, D, requires_grad=True).unbind()
    left = int(torch.ones(queries, keys).tril().sum())

    def run():
        F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward(retain_graph=True)

    assert counted(run) == 7 * 2 * B * H * queries * keys * D
    assert counted(run, causal="triangle") == 7 * 2 * B * H * left * D


def test_there_is_no_third_way_to_count_causal_attention():
    with pytest.raises(CostError, match="cannot be counted as 'half'"):
        flop_counter(causal="half")


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_the_square_agrees_with_the_formulas_that_torch_has_for_gpus(kind):
    """And the triangle is found wherever an operator keeps its `is_causal`."""
    query, key, value = (torch.empty(B, H, N, D, device="meta") for _ in range(3))
    rest = {"flash": (0.0, True), "efficient": (None, True, 0.0, True), "cudnn": (None, True, 0.0, True)}[kind]
    packet = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    ours = formulas()[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu]
    assert (
        flop_registry[packet](query, key, value, *rest) == ours(query, key, value, 0.0, True) == 4 * B * H * N * N * D
    )
    assert formulas("triangle")[packet](query, key, value, *rest) == 4 * B * H * N * (N + 1) // 2 * D
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention_backward")
    names = [argument.name for argument in backward.default._schema.arguments]
    given = {"query": query, "key": key, "value": value, "is_causal": True}
    arguments = [query, *(given.get(name) for name in names[1:])]
    ours = formulas("triangle")[backward]
    assert 2 * N * ours(*arguments) == (N + 1) * flop_registry[backward](query, query, key, value)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
def test_torchs_multi_head_attention(mode, weights):
    layer, x = nn.MultiheadAttention(12, 3, batch_first=True).train(mode == "train"), torch.randn(2, 5, 12)
    by_hand = 2 * 2 * 5 * 4 * 12 * 12 + 2 * 2 * 2 * 5 * 5 * 12
    with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "train"):
        assert counted(lambda: layer(x, x, x, need_weights=weights)) == by_hand


def test_a_whole_layer_in_one_operator():
    layer, x = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True).eval(), torch.randn(2, 5, 12)
    by_hand = 2 * 2 * 5 * (4 * 12 * 12 + 2 * 12 * 20) + 2 * 2 * 2 * 5 * 5 * 12
    attention, norms = layer.self_attn, (layer.norm1, layer.norm2)
    weights = [attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias]
    rest = [tensor for module in (*norms, layer.linear1, layer.linear2) for tensor in (module.weight, module.bias)]

    def fused(tokens):
        torch._transformer_encoder_layer_fwd(tokens, 12, 3, *weights, False, False, 1e-5, *rest)

    with torch.no_grad():
        assert counted(lambda: layer(x)) == by_hand
        assert counted(lambda: fused(x)) == by_hand
        assert counted(lambda: torch._native_multi_head_attention(x, x, x, 12, 3, *weights)) == by_hand - 2 * 4800


# Regard's own operators

# Operators that multiply no matrices; there is none yet.
WITHOUT_PRODUCTS: set[str] = set()


def test_every_operator_of_ours_has_a_formula():
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("regard::")}
    names = {name.removeprefix("regard::").split(".")[0] for name in names}
    assert {"attention", "attention_backward", "decode", "gemv", "gemm", "linear_attention"} <= names
    known = {packet for packet in flop_registry if str(packet).startswith("regard.")}
    assert {getattr(torch.ops.regard, name) for name in names - WITHOUT_PRODUCTS} == known


@native
@pytest.mark.parametrize("kv_heads", [H, G])
@pytest.mark.parametrize("pattern", [Full(), Causal(), Window(2, 1), Causal() & Window(3, 0), Padding([M, 4])], ids=str)
def test_our_attention_is_counted_by_the_pairs_that_are_allowed(pattern, kv_heads):
    """Not the square, and not the tiles of the plan: `cost(..., backend="native")` has what those visit."""
    query = torch.randn(B, H, N, D, requires_grad=True)
    key, value = torch.randn(B, kv_heads, M, D), torch.randn(B, kv_heads, M, E)
    pairs = int(pattern.matrix(N, M).expand(B, N, M).sum())
    description = Attention(pattern=pattern)
    run = lambda: attend(query, key, value, description, backend="native")  # noqa: E731
    assert counted(run) == 2 * H * pairs * (D + E)
    assert counted(lambda: run().sum().backward()) == 2 * H * pairs * (4 * D + 3 * E)
    assert counted(run, causal="triangle") == 2 * H * pairs * (D + E)


def test_the_sdpa_backend_counts_as_torch_does():
    query, key, value = torch.randn(3, 1, 2, 64, 8).unbind()
    run = lambda: attend(query, key, value, pattern=Causal(), backend="sdpa")  # noqa: E731
    assert counted(run) == 4 * 8 * 2 * 64 * 64
    assert counted(run, causal="triangle") == 4 * 8 * 2 * (64 * 65 // 2)


@native
def test_decoding_is_counted_by_its_intervals():
    query, key, value = torch.randn(B, H, 1, D), torch.randn(B, G, M, D), torch.randn(B, G, M, E)
    start, stop = torch.tensor([[0], [4]]), torch.tensor([[M], [9]])
    assert counted(lambda: run_decode(query, key, value, start, stop, 0.5)) == 2 * H * (M + 5) * (D + E)


@native
@pytest.mark.parametrize("layer", [gemv, gemm])
def test_linear_layers_are_counted(layer):
    assert counted(lambda: layer(ones(2, 3, 7), ones(5, 7), ones(5))) == 2 * 6 * 5 * 7


@native
def test_linear_attention_is_counted_as_the_recurrence():
    """A state for each head of keys, read by each head of queries; a column beside the values is the normaliser."""
    query, key, value = torch.randn(B, H, N, D), torch.randn(B, G, N, D), torch.randn(B, G, N, E)
    found = counted(lambda: attend(query, key, value, pattern=Causal(), feature_map="elu1"))
    assert found == 2 * B * (H + G) * N * D * (E + 1)


@native
def test_a_layer_of_ours_is_its_projections_and_its_pairs():
    layer = MultiHeadAttention(12, 3, attention=Attention(pattern=Window(2, 0))).eval()
    pairs = 7 * 3 - 3
    assert counted(lambda: layer(torch.randn(2, 7, 12))) == 2 * 2 * 7 * 4 * 12 * 12 + 2 * 2 * 2 * pairs * 12


# Sizes for, and only then


@pytest.mark.slow
def test_importing_regard_leaves_torchs_table_alone_and_measures_nothing(tmp_path):
    code = """
from torch.utils.flop_counter import flop_registry
before = {str(packet): id(formula) for packet, formula in flop_registry.items()}
import regard, regard.layers, regard.models, regard.cost_model.flop_formulas, regard.cost_model.measuring
after = {str(packet): id(formula) for packet, formula in flop_registry.items()}
ours = {name.removeprefix("regard.") for name in list(after) if name.startswith("regard.") and after.pop(name)}
assert before == after, set(after) ^ set(before)
attention = {"attention", "attention_backward", "decode", "linear_attention", "linear_attention_backward"}
assert ours == attention | {"gemm", "gemv", "quantized_linear"}, ours
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert not list(tmp_path.iterdir())


def own_counter():
    with FlopCounterMode(display=False) as counter:
        F.scaled_dot_product_attention(*attention_inputs())
    return counter.get_total_flops()


ALL = 2 * 2 * B * H * N * M * D


def test_a_block_corrects_other_counters_and_gives_back_what_was():
    before = dict(flop_registry)
    with corrected():
        assert own_counter() == ALL
        with corrected("triangle"):
            assert dict(flop_registry) != before
        assert own_counter() == ALL
    assert own_counter() == 0
    with pytest.raises(ZeroDivisionError), corrected():
        1 / 0  # noqa: B018
    assert flop_registry == before


def test_registering_lasts_until_it_is_undone():
    before = dict(flop_registry)
    try:
        register()
        register("triangle")  # in place of the first
        assert own_counter() == ALL
    finally:
        unregister()
    assert flop_registry == before
    unregister()  # nothing to undo
    assert flop_registry == before


def test_a_formula_registered_before_is_restored():
    packet = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    flop_registry[packet] = theirs = lambda *_, **__: 17
    try:
        with corrected():
            assert own_counter() == ALL
        assert flop_registry[packet] is theirs
        assert own_counter() == 17
    finally:
        del flop_registry[packet]


def test_a_counter_knows_modules_and_prints_only_on_request(capsys):
    layer = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    with flop_counter() as counter:
        layer(ones(2, 3))
    assert isinstance(counter, FlopCounterMode)
    assert sum(counter.get_flop_counts()["Sequential.1"].values()) == 2 * 2 * 5 * 7
    assert capsys.readouterr().out == ""
