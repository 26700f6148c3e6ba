"""Multi-head attention against torch's own, its formulas, and its own description."""

import copy
import math

import pytest
import torch
from torch import nn

from regard import (
    Alibi,
    Attention,
    Causal,
    Full,
    Padding,
    Quadratic,
    RegardError,
    RelativeTable,
    Strided,
    TransformerXL,
    Window,
    attend,
    weights,
)
from regard.errors import CheckpointError, ConfigError
from regard.layers import AttentionSizes, MultiHeadAttention, Rotary

F64 = torch.float64


EXACT = 1e-12


# A channel of the output is a chain of four sums of at most `WIDTH` products of numbers of size one.
WIDTH = 24


TOLERANCE = {F64: EXACT, torch.float32: 8 * WIDTH * 2.0**-23}


FREE = AttentionSizes(13, heads=6, kv_heads=2, key=4, value=5, context=7, values=11, output=17)


def random(*shape, seed=0, dtype=F64):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(layer, dtype=F64, scale=0.4):
    """A layer with numbers of its own everywhere, the biases too."""
    layer = layer.to(dtype).eval()
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.copy_(random(*parameter.shape, seed=50 + index) * scale)
    return layer


def assert_close(found, expected, tolerance=EXACT):
    assert found.shape == expected.shape
    difference = float((found.detach().double() - expected.detach().double()).abs().max())
    assert difference <= tolerance, f"off by {difference:.3g}, bound {tolerance:.3g}"


def assert_four_parts(error):
    assert isinstance(error, RegardError)
    assert error.headline.endswith(".")
    assert error.asked
    assert error.because
    assert error.instead


# torch.nn.MultiheadAttention


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kdim", "vdim"), [(None, None), (7, 11), (24, 11)])
def test_output_and_gradients_are_those_of_torch(dtype, bias, kdim, vdim):
    theirs = filled(nn.MultiheadAttention(24, 3, bias=bias, kdim=kdim, vdim=vdim, batch_first=True), dtype)
    ours = MultiHeadAttention.from_torch(theirs)
    x = random(2, 5, 24, dtype=dtype).requires_grad_()
    context = random(2, 9, kdim or 24, seed=1, dtype=dtype).requires_grad_()
    values = random(2, 9, vdim or 24, seed=2, dtype=dtype).requires_grad_()
    upstream = random(2, 5, 24, seed=3, dtype=dtype)
    hidden = torch.arange(9) >= torch.tensor([[6], [9]])
    expected = theirs(x, context, values, key_padding_mask=hidden, need_weights=False)[0]
    found = ours(x, context, values, pattern=Padding([6, 9]))
    assert_close(found, expected, TOLERANCE[dtype])
    inputs = [x, context, values]
    slopes = [torch.autograd.grad(y, inputs, upstream, retain_graph=True) for y in (found, expected)]
    for mine, truth in zip(*slopes, strict=True):
        assert_close(mine, truth, 40 * TOLERANCE[dtype])
    (found * upstream).sum().backward()
    (expected * upstream).sum().backward()
    moved = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.zero_()
    moved.load_state_dict({name: p.grad for name, p in theirs.named_parameters()})
    for mine, truth in zip(ours.parameters(), moved.parameters(), strict=True):
        assert_close(mine.grad, truth.detach(), 40 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
def test_a_causal_mask_is_the_causal_pattern(dtype):
    theirs = filled(nn.MultiheadAttention(24, 4, batch_first=True), dtype)
    ours = MultiHeadAttention.from_torch(theirs, Attention(pattern=Causal()))
    x = random(3, 7, 24, dtype=dtype)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    with torch.no_grad():
        expected, found = theirs(x, x, x, attn_mask=mask, average_attn_weights=False)
        assert_close(ours(x), expected, TOLERANCE[dtype])
        assert_close(ours.weights(x), found, TOLERANCE[dtype])


def test_torchs_state_is_read_by_load_state_dict_also_inside_a_model():
    theirs = filled(nn.MultiheadAttention(24, 3, batch_first=True))
    model = nn.Sequential(MultiHeadAttention(24, 3).double())
    state = {f"0.{name}": tensor for name, tensor in theirs.state_dict().items()}
    model.load_state_dict(state)
    assert "0.in_proj_weight" in state  # the caller's own dictionary stays
    x = random(2, 5, 24)
    assert_close(model(x), theirs(x, x, x)[0])
    # Separate matrices also fit where ours lie in one.
    query, key, value = theirs.in_proj_weight.chunk(3)
    separate = {"q_proj_weight": query, "k_proj_weight": key, "v_proj_weight": value}
    rest = {name: tensor for name, tensor in theirs.state_dict().items() if name != "in_proj_weight"}
    other = MultiHeadAttention(24, 3).double()
    other.load_state_dict(separate | rest)
    assert_close(other(x), model(x), 0)


def test_keys_that_belong_to_no_token_are_refused():
    for words in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(CheckpointError, match="no token") as caught:
            MultiHeadAttention.from_torch(nn.MultiheadAttention(24, 3, **words))
        assert_four_parts(caught.value)


# Formulas


def by_hand(layer, x, context, values, described):
    """Each head on its own, by the matrices that the layer says it has."""
    sizes = layer.sizes
    matrices, biases = layer.projections.weights(), layer.projections.biases()
    made = []
    for tokens, matrix, bias in zip((x, context, values), matrices, biases, strict=True):
        made.append(tokens @ matrix.T + (0 if bias is None else bias))
    heads = []
    for h in range(sizes.heads):
        g = h // sizes.group
        query = made[0][..., h * sizes.key : (h + 1) * sizes.key]
        key = made[1][..., g * sizes.key : (g + 1) * sizes.key]
        value = made[2][..., g * sizes.value : (g + 1) * sizes.value]
        score = query @ key.mT * (sizes.key**-0.5 if described.scale is None else described.scale)
        if isinstance(described.bias, torch.nn.Module):
            places = torch.arange(key.shape[-2])
            score = score + described.bias.scores(places[key.shape[-2] - query.shape[-2] :, None], places[None])[h]
        if described.pattern is not None:
            score = score.masked_fill(~described.pattern.matrix(query.shape[-2], key.shape[-2]), -math.inf)
        heads.append(score.softmax(-1) @ value)
    output = torch.cat(heads, -1) @ layer.output.weight.T
    return output if layer.output.bias is None else output + layer.output.bias


@pytest.mark.parametrize("bias", [True, False, "qo", "kv", "k", "qv", "o"])
@pytest.mark.parametrize(
    "sizes", [FREE, AttentionSizes(13, 6, 3, key=4, value=5, output=17), AttentionSizes(12, 4)], ids=str
)
def test_all_sizes_are_free_and_any_bias_may_be_absent(sizes, bias):
    layer = filled(MultiHeadAttention(sizes, bias=bias))
    x, context, values = random(2, 3, sizes.input), random(2, 19, sizes.context), random(2, 19, sizes.values)
    output = layer(x, context, values)
    assert output.shape == (2, 3, sizes.output)
    assert_close(output, by_hand(layer, x, context, values, layer.attention))
    if len({sizes.input, sizes.context, sizes.values}) == 1:
        assert_close(layer(x), by_hand(layer, x, x, x, layer.attention))
        assert_close(layer(x, context), by_hand(layer, x, context, context, layer.attention))
        assert_close(layer(x, values=x + 1), by_hand(layer, x, x, x + 1, layer.attention))
    with_bias = sum(
        width
        for letter, width in zip("qkvo", (*layer.projections.widths, sizes.output), strict=True)
        if letter in ("qkvo" if bias is True else bias or "")
    )
    matrices = sizes.input * sizes.heads * sizes.key + sizes.context * sizes.kv_heads * sizes.key
    matrices += sizes.values * sizes.kv_heads * sizes.value + sizes.heads * sizes.value * sizes.output
    assert sum(p.numel() for p in layer.parameters()) == matrices + with_bias


DESCRIPTIONS = {
    "causal": lambda: Attention(pattern=Causal()),
    "window": lambda: Attention(pattern=Window(3, 1) | Strided(4)),
    "scale": lambda: Attention(scale=1.7),
    "negative": lambda: Attention(pattern=Causal(), scale=-0.3),
    "alibi": lambda: Attention(bias=Alibi(6)),
    "table": lambda: Attention(pattern=Causal(), bias=RelativeTable(6, distance=4)),
    "quadratic": lambda: Attention(bias=Quadratic(6)),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_any_description_runs_in_the_heads(name):
    layer = filled(MultiHeadAttention(AttentionSizes(13, 6, 2, key=4, value=5), attention=DESCRIPTIONS[name]()))
    x = random(2, 11, 13).requires_grad_()
    expected = by_hand(layer, x, x, x, layer.attention)
    found = layer(x)
    assert_close(found, expected)
    wanted = [x, *layer.parameters()]
    slopes = [torch.autograd.grad(y.square().sum(), wanted) for y in (found, expected)]
    for mine, truth in zip(*slopes, strict=True):
        # Sums over 22 tokens of squares: some hundred times the output's rounding.
        assert_close(mine, truth, 1e-10)


@pytest.mark.parametrize("features", ["elu1", "taylor2", "favor+"])
def test_features_run_in_the_heads(features):
    layer = filled(MultiHeadAttention(12, 3, attention=Attention(pattern=Causal(), feature_map=features)))
    x = random(2, 9, 12)
    query, key, value = layer.projections(x)
    mixed = attend(query, key, value, pattern=Causal(), feature_map=features, backend="reference")
    assert_close(layer(x), layer.output(mixed.transpose(1, 2).flatten(2)))


def test_a_learned_bias_belongs_to_the_layer():
    for bias in (RelativeTable(3, distance=4), TransformerXL(3, 4)):
        layer = MultiHeadAttention(12, 3, attention=Attention(pattern=Causal(), bias=bias))
        names = {name for name, _ in layer.named_parameters()}
        assert {f"score_bias.{name}" for name, _ in bias.named_parameters()} <= names
        layer.double()(random(2, 5, 12)).sum().backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())
        twin = MultiHeadAttention(12, 3, attention=Attention(pattern=Causal(), bias=copy.deepcopy(bias))).double()
        twin.load_state_dict(layer.state_dict())
        assert_close(twin(random(2, 5, 12)), layer(random(2, 5, 12)), 0)


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
def test_grouped_heads_are_repeated_heads(dtype):
    grouped = filled(MultiHeadAttention(AttentionSizes(13, 6, 2, key=4, value=5)), dtype)
    alone = filled(MultiHeadAttention(AttentionSizes(13, 6, 6, key=4, value=5)), dtype)
    with torch.no_grad():
        for mine, theirs in zip(alone.projections.weights(), grouped.projections.weights(), strict=True):
            heads = theirs.shape[0] // (mine.shape[0] // 6)
            mine.copy_(theirs.unflatten(0, (heads, -1)).repeat_interleave(6 // heads, 0).flatten(0, 1))
        for mine, theirs in zip(alone.projections.biases(), grouped.projections.biases(), strict=True):
            heads = theirs.shape[0] // (mine.shape[0] // 6)
            mine.copy_(theirs.unflatten(0, (heads, -1)).repeat_interleave(6 // heads, 0).flatten())
        alone.output.load_state_dict(grouped.output.state_dict())
        x = random(2, 11, 13, dtype=dtype)
        assert_close(grouped(x), alone(x), TOLERANCE[dtype])


def test_index_notation_without_output_matrix_and_scale():
    tokens, channels, heads, size = 11, 12, 3, 4
    layer = filled(MultiHeadAttention(channels, heads, attention=Attention(scale=1.0), bias=False))
    with torch.no_grad():
        layer.output.weight.copy_(torch.eye(channels))
    x = random(tokens, channels)
    query, key, value = (weight.reshape(heads, size, channels) for weight in layer.projections.weights())
    projected_query = torch.einsum("kuj,tj->ktu", query, x)
    projected_key = torch.einsum("kuj,tj->ktu", key, x)
    alpha = torch.einsum("ktu,ksu->kts", projected_query, projected_key).softmax(-1)
    expected = torch.einsum("kts,kij,sj->tki", alpha, value, x).reshape(tokens, channels)
    assert_close(layer(x), expected)


def test_columns_are_rows_with_transposed_matrices():
    layer = filled(MultiHeadAttention(AttentionSizes(13, 2, key=5, value=3), bias=False))
    x = random(13, 7)  # (channel, token)
    heads = []
    for query, key, value in zip(*(w.chunk(2) for w in layer.projections.weights()), strict=True):
        scores = (key @ x).T @ (query @ x) * 5**-0.5
        heads.append((value @ x) @ scores.softmax(0))
    assert_close(layer(x.T).T, layer.output.weight @ torch.cat(heads))


def test_one_query_of_an_image_is_that_row_of_the_output():
    layer, image = filled(MultiHeadAttention(AttentionSizes(13, 3, key=4, value=5, output=7))), random(35, 13)
    whole = layer(image)
    for place in (0, 17, 34):
        assert_close(layer(image[place : place + 1], image), whole[place : place + 1])
        parts = layer.head_contributions(image[place : place + 1], image)
        assert_close(parts.sum(0) + layer.output.bias, whole[place : place + 1])


# Surgery (Bishop, problem 12.5)


def test_the_output_is_the_sum_of_what_the_heads_add():
    layer = filled(MultiHeadAttention(16, 4, bias=False), scale=0.25)
    x = random(7, 16)
    parts = layer.head_contributions(x)
    assert parts.shape == (4, 7, 16)
    assert_close(parts.sum(0), layer(x), 1e-14)
    by_merged = torch.einsum("hts,sd,hdo->hto", layer.weights(x), x, layer.merge_value_output())
    assert_close(parts, by_merged, 1e-14)
    assert torch.linalg.matrix_rank(layer.merge_value_output()).tolist() == [4, 4, 4, 4]


def test_contributions_of_free_sizes_groups_and_batches():
    layer = filled(MultiHeadAttention(FREE))
    x, context, values = random(2, 3, 5, 13), random(2, 3, 9, 7), random(2, 3, 9, 11)
    hidden = Padding([9, 4, 1, 9, 2, 7])
    parts = layer.head_contributions(x, context, values, pattern=hidden)
    assert parts.shape == (6, 2, 3, 5, 17)
    assert_close(parts.sum(0) + layer.output.bias, layer(x, context, values, pattern=hidden))


@pytest.mark.parametrize("bias", [True, False, "kv", "qo"])
@pytest.mark.parametrize(
    "sizes", [AttentionSizes(16, 4), AttentionSizes(13, 6, 2, key=4, value=3, output=11), FREE], ids=str
)
@pytest.mark.parametrize("more", [0, 2])
def test_merging_and_splitting_changes_nothing(sizes, bias, more):
    layer = filled(MultiHeadAttention(sizes, bias=bias, attention=Attention(scale=0.7)))
    made = layer.split(sizes.value + more)
    assert made.sizes.value == sizes.value + more
    x, context, values = random(2, 7, sizes.input), random(2, 7, sizes.context), random(2, 7, sizes.values)
    assert_close(made(x, context, values), layer(x, context, values))
    assert_close(made.merge_value_output(), layer.merge_value_output())
    assert not made.training


def test_a_split_below_the_rank_is_the_best_approximation():
    layer = filled(MultiHeadAttention(AttentionSizes(13, 4, 2, key=3, value=5, output=11)))
    merged, cut = layer.merge_value_output().detach(), layer.split(2).merge_value_output().detach()
    left, scale, right = torch.linalg.svd(merged, full_matrices=False)
    best = left[..., :2] * scale[:, None, :2] @ right[:, :2]
    assert_close(cut, best)
    distance = torch.linalg.matrix_norm(merged - cut)
    assert_close(distance, scale[:, 2:].square().sum(-1).sqrt())
    assert float(distance.min()) > 1e-2
    with pytest.raises(ConfigError, match="at least one channel") as caught:
        layer.split(0)
    assert_four_parts(caught.value)


@pytest.mark.parametrize("pattern", [Full(), Causal()], ids=repr)
@pytest.mark.parametrize("bias", [True, "kv", "k", "v", "qo", False])
def test_folding_biases_keeps_the_output(bias, pattern):
    sizes = AttentionSizes(13, 6, 2, key=4, value=3, output=11)
    described = Attention(pattern=pattern, bias=RelativeTable(6, distance=3))
    layer = filled(MultiHeadAttention(sizes, bias=bias, attention=described))
    made = layer.fold_biases()
    assert set(made.letters) <= {"q", "o"}
    x = random(2, 7, 13)
    assert_close(made(x), layer(x))
    # The learned bias is a copy: training one layer leaves the other.
    with torch.no_grad():
        made.score_bias.table.add_(1.0)
    assert not torch.equal(made.score_bias.table, layer.score_bias.table)


@pytest.mark.parametrize("pattern", [Full(), Causal()], ids=repr)
def test_the_bias_of_the_key_has_no_gradient(pattern):
    layer = filled(MultiHeadAttention(12, 3, attention=Attention(pattern=pattern)))
    layer(random(2, 7, 12)).square().sum().backward()
    query, key, value = layer.projections.bias.grad.chunk(3)
    # Zero by algebra; each entry is a sum of 14 * 7 products of size one, rounded.
    assert float(key.abs().max()) <= 14 * 7 * 2.0**-52 * 10
    assert float(query.abs().min()) > 1e-6
    assert float(value.abs().min()) > 1e-6


def test_biases_that_do_something_are_not_folded():
    turning = MultiHeadAttention(12, 3, rotary=Rotary(4))
    features = MultiHeadAttention(12, 3, attention=Attention(feature_map="elu1"))
    for layer in (turning, features):
        with pytest.raises(ConfigError, match="does something") as caught:
            layer.fold_biases()
        assert_four_parts(caught.value)
    # And indeed: with rotary positions the key's bias has a gradient.
    filled(turning)(random(2, 7, 12)).square().sum().backward()
    assert float(turning.projections.bias.grad[12:24].abs().max()) > 1e-6


# Weights


@pytest.mark.parametrize("rotary", [None, Rotary(4)], ids=str)
def test_weights_sum_to_one_and_make_the_output(rotary):
    layer = filled(MultiHeadAttention(12, 3, attention=Attention(pattern=Causal(), scale=1.3), rotary=rotary))
    x = random(2, 7, 12)
    found = layer.weights(x, pattern=Window(3, 0))
    assert found.shape == (2, 3, 7, 7)
    assert_close(found.sum(-1), torch.ones(2, 3, 7, dtype=F64))
    assert float(found.detach().triu(1).abs().max()) == 0
    value = layer.projections(x)[2]
    assert_close(layer.output((found @ value).transpose(1, 2).flatten(2)), layer(x, pattern=Window(3, 0)))


def test_weights_need_no_values():
    layer = filled(MultiHeadAttention(FREE))
    x, context = random(2, 5, 13), random(2, 9, 7)
    found = layer.weights(x, context)
    query, key = layer.projections.query(x), layer.projections.key(context)
    assert_close(found, weights(query, key))


# Dropout


def test_dropout_is_off_in_eval_and_unbiased_in_training():
    layer = filled(MultiHeadAttention(AttentionSizes(13, 6, 2, key=4, value=5), dropout=0.3))
    x = random(1, 5, 13)
    quiet = filled(MultiHeadAttention(AttentionSizes(13, 6, 2, key=4, value=5)))(x)
    assert torch.equal(layer(x), quiet)
    layer.train()
    torch.manual_seed(0)
    runs = 4000
    with torch.no_grad():
        drawn = layer(x.expand(runs, -1, -1))
    assert float((drawn[0] - drawn[1]).abs().max()) > 1e-3
    error = drawn.std(0) / math.sqrt(runs)
    assert (
        float(((drawn.mean(0) - quiet[0].detach()).abs() / error).max()) < 5
    )  # 65 numbers: 5 sigma in 1 of 27 000 cases


# Shapes and torch's machinery


@pytest.mark.parametrize("rotary", [None, Rotary(4), Rotary(2, layout="pairs")], ids=str)
def test_a_batch_has_any_number_of_axes(rotary):
    layer = filled(MultiHeadAttention(12, 3, attention=Attention(pattern=Causal()), rotary=rotary))
    x = random(2, 3, 7, 12)
    whole = layer(x)
    assert whole.shape == x.shape
    assert_close(layer(x[1]), whole[1])
    assert_close(layer(x[1, 2]), whole[1, 2])
    assert layer(x[0, 0, :1]).shape == (1, 12)


def test_copies_and_state_round_trips_give_the_same_bits():
    bias = RelativeTable(3, distance=4)
    layer = filled(MultiHeadAttention(12, 3, attention=Attention(pattern=Causal(), bias=bias), bias="qo"))
    x = random(2, 7, 12)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    assert twin.attention.bias is twin.score_bias
    assert twin.score_bias is not layer.score_bias
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.1)
    assert not torch.equal(twin(x), layer(x))
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))
    theirs = nn.MultiheadAttention(12, 3, dtype=F64)
    copied = copy.deepcopy(MultiHeadAttention(12, 3).double())
    copied.load_state_dict(theirs.state_dict())  # a copy still reads torch's names
    assert_close(copied.output.weight, theirs.out_proj.weight, 0)


def test_functional_calls_use_the_given_parameters():
    layer = filled(MultiHeadAttention(12, 3, attention=Attention(bias=RelativeTable(3, distance=4))))
    x = random(2, 7, 12)
    moved = {name: parameter.detach() * 1.5 for name, parameter in layer.named_parameters()}
    expected = copy.deepcopy(layer)
    expected.load_state_dict(moved)
    assert_close(torch.func.functional_call(layer, moved, (x,)), expected(x))


def test_vmap_over_a_batch_is_the_batch():
    layer = filled(MultiHeadAttention(12, 3))
    x = random(5, 7, 12)
    with torch.no_grad():
        assert_close(torch.func.vmap(layer)(x), layer(x))


@pytest.mark.slow
def test_a_compiled_layer_gives_the_same():
    layer = filled(MultiHeadAttention(12, 3, attention=Attention(pattern=Causal())), torch.float32)
    x = random(2, 7, 12, dtype=torch.float32)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert_close(compiled(x), layer(x), TOLERANCE[torch.float32])


def test_half_precision_stays_half():
    layer = filled(MultiHeadAttention(12, 3, rotary=Rotary(4)), torch.bfloat16)
    assert layer(random(2, 7, 12, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_the_repr_of_a_layer():
    text = repr(MultiHeadAttention(12, 4, kv_heads=2, attention=Attention(pattern=Causal(), bias=Alibi(4))))
    assert "heads=4, kv_heads=2, pattern=Causal()" in text
    assert "Alibi" in text
