"""The operator: conventions, limits, layouts and error messages."""

import math

import pytest
import torch
from catalog import PATTERNS, ROWS, TILED, TOKENS, tensors

from regard import (
    Alibi,
    Attention,
    BackendError,
    BiasError,
    Causal,
    First,
    Full,
    Padding,
    PatternError,
    RegardError,
    RelativeTable,
    Segments,
    ShapeError,
    Window,
    attend,
    explain,
    weights,
)
from regard.backends import BACKENDS
from regard.calculus import append_key, logsumexp

F64 = torch.float64
EXACT = 1e-12


def random(*shape, seed=0):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


# Weights (Bishop, problem 12.2)


def test_weights_are_a_probability_distribution_in_every_row():
    x = random(1, 64, 32)
    weight = weights(x, x, scale=1.0)
    assert float(weight.min()) >= 0
    assert float((weight.sum(-1) - 1).abs().max()) <= 4e-16 * 64


@pytest.mark.parametrize("backend", ["reference", *TILED, "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_huge_scores_neither_overflow_nor_vanish(backend, dtype):
    query = torch.tensor([[[1.0]]], dtype=dtype)
    key = torch.tensor([[[1000.0], [0.0], [-1000.0]]], dtype=dtype)
    value = torch.eye(3, dtype=dtype)[None]
    assert attend(query, key, value, scale=1.0, backend=backend).tolist() == [[[1.0, 0.0, 0.0]]]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_weights_are_positive_exactly_where_the_pattern_allows(pattern):
    query, key, _ = (tensor.detach() for tensor in tensors((TOKENS, TOKENS)))
    mask = pattern.matrix(TOKENS)
    visible = weights(query, key, pattern=pattern) > 0
    assert torch.equal(visible, (mask[:, None] if mask.ndim == 3 else mask).expand_as(visible))


# The limits of temperature (requirements of a soft, a uniform and a hard attention)


@pytest.mark.parametrize("backend", ["reference", *TILED])
def test_beta_zero_is_the_mean_over_the_visible_keys(backend):
    query, key, value = random(1, 5, 3), random(1, 7, 3, seed=1), random(1, 7, 4, seed=2)
    output = attend(query, key, value, scale=0, backend=backend)
    assert float((output - value.mean(-2, keepdim=True)).abs().max()) <= 1e-15
    causal = attend(key, key, value, scale=0, pattern=Causal(), backend=backend)
    expected = value.cumsum(-2) / torch.arange(1, 8, dtype=F64)[:, None]
    assert float((causal - expected).abs().max()) <= 1e-15


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_beta_infinity_is_a_gather_bit_by_bit(backend):
    query, key, value = random(2, 5, 3), random(2, 7, 3, seed=1), random(2, 7, 4, seed=2)
    best = (query @ key.transpose(-1, -2)).argmax(-1)
    expected = torch.stack([value[head, best[head]] for head in range(2)])
    assert torch.equal(attend(query, key, value, scale=math.inf, backend=backend), expected)
    worst = (query @ key.transpose(-1, -2)).argmin(-1)
    expected = torch.stack([value[head, worst[head]] for head in range(2)])
    assert torch.equal(attend(query, key, value, scale=-math.inf, backend=backend), expected)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_ties_share_equally_and_a_bias_decides_between_them(backend):
    query, key = torch.ones(1, 1, 1, dtype=F64), torch.tensor([[[2.0], [1.0], [2.0]]], dtype=F64)
    value = torch.eye(3, dtype=F64)[None]
    assert attend(query, key, value, scale=math.inf, backend=backend)[0, 0].tolist() == [0.5, 0, 0.5]
    # The limit of softmax(scale s + b): mass on the tied maxima, in the proportions exp(b).
    bias = torch.tensor([[0.0, 50.0, math.log(3)]], dtype=F64)
    found = attend(query, key, value, scale=math.inf, bias=bias, backend=backend)[0, 0]
    assert found.tolist() == pytest.approx([0.25, 0, 0.75])
    near = attend(query, key, value, scale=1e6, bias=bias, backend=backend)[0, 0]
    assert near.tolist() == pytest.approx([0.25, 0, 0.75])


def test_soft_attention_approaches_the_hard_one_at_the_promised_rate():
    query, key, value = random(1, 1, 3), random(1, 7, 3, seed=1), random(1, 7, 4, seed=2)
    scores = (query @ key.transpose(-1, -2)).flatten().sort(descending=True).values
    gap, diameter = float(scores[0] - scores[1]), float(torch.cdist(value, value).max())
    hard = attend(query, key, value, scale=math.inf)
    for scale in (3.0, 10.0, 40.0):
        leak = 6 * math.exp(-scale * gap)
        assert float((attend(query, key, value, scale=scale) - hard).norm()) <= leak * diameter + 1e-15


def test_a_temperature_on_the_query_is_a_temperature():
    query, key, value = random(2, 5, 3), random(2, 7, 3, seed=1), random(2, 7, 4, seed=2)
    assert torch.allclose(attend(3 * query, key, value, scale=0.2), attend(query, key, value, scale=0.6), atol=EXACT)


# Layouts and index notation


def test_the_column_layout_is_the_transpose_of_the_row_layout():
    query, key, value = random(2, 5, 3), random(2, 7, 3, seed=1), random(2, 7, 4, seed=2)
    rows = attend(query, key, value, scale=0.7)
    columns = attend(query.mT, key.mT, value.mT, scale=0.7, layout="columns")
    assert torch.equal(columns, rows.mT)
    weight = weights(query.mT, key.mT, scale=0.7, layout="columns")
    assert weight.shape == (2, 7, 5)
    assert torch.allclose(weight.sum(-2), torch.ones(2, 5, dtype=F64))


@pytest.mark.parametrize("backend", ["reference", *TILED, "sdpa"])
def test_attention_in_index_notation_gives_the_same(backend):
    # alpha[k,t1,t2] = softmax_t2 sum_u Query[k,t1,u] Key[k,t2,u]; Out[k,t1,i] = sum_t2 alpha Value[k,t2,i]; no scale.
    states = random(11, 6)
    project = [random(2, 6, 3, seed=seed) for seed in (1, 2, 3)]
    query, key, value = (torch.einsum("tj,kju->ktu", states, matrix) for matrix in project)
    score = torch.einsum("ktu,ksu->kts", query, key).exp()
    alpha = score / score.sum(-1, keepdim=True)
    expected = torch.einsum("kts,ksi->kti", alpha, value)
    assert float((attend(query, key, value, scale=1.0, backend=backend) - expected).abs().max()) <= EXACT


def test_without_positions_permuting_keys_and_values_changes_nothing():
    query, key, value = random(2, 5, 3), random(2, 7, 3, seed=1), random(2, 7, 4, seed=2)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    moved = attend(query, key[:, order], value[:, order])
    assert float((moved - attend(query, key, value)).abs().max()) <= EXACT
    biased = attend(query, key[:, order], value[:, order], bias=Alibi(2))
    assert float((biased - attend(query, key, value, bias=Alibi(2))).abs().max()) > 1e-2


# Conventions


@pytest.mark.parametrize("backend", ["reference", *TILED])
@pytest.mark.parametrize("count", range(1, 8))
def test_the_last_queries_alone_get_what_they_got_among_all(backend, count):
    query, key, value = random(2, 7, 3), random(2, 7, 3, seed=1), random(2, 7, 4, seed=2)
    for pattern in (Causal(), Window(2, 0), First(1) | Window(1, 1)):
        every = attend(query, key, value, pattern=pattern, backend=backend)
        some = attend(query[:, -count:], key, value, pattern=pattern, backend=backend)
        assert float((some - every[:, -count:]).abs().max()) <= EXACT


def test_grouped_heads_repeat_group_wise():
    query, key, value = random(6, 5, 3), random(2, 7, 3, seed=1), random(2, 7, 4, seed=2)
    spread = [tensor.repeat_interleave(3, dim=0) for tensor in (key, value)]
    for backend in ("reference", *TILED, "sdpa"):
        found = attend(query, key, value, backend=backend)
        assert float((found - attend(query, *spread, backend=backend)).abs().max()) <= EXACT


@pytest.mark.parametrize("backend", ["reference", *TILED])
@pytest.mark.parametrize("scale", [None, 0.0, math.inf])
def test_a_query_that_sees_nothing_yields_zeros_and_zero_gradient(backend, scale):
    query, key, value = tensors((TOKENS, TOKENS))
    scale = -2.1 if backend == "native" and scale == math.inf else scale
    pattern = Padding([0, 20]) & Causal()
    output = attend(query, key, value, pattern=pattern, scale=scale, backend=backend)
    assert not output[0].any()
    output.sum().backward()
    for tensor in (query, key, value):
        grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        assert torch.isfinite(grad).all()
        assert not grad[0].any()


BAD = [math.nan, math.inf, -math.inf, 1e300]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("scale", [None, 0.0, 1.5, math.inf])
@pytest.mark.parametrize("backend", ["reference", *TILED, "sdpa"])
@pytest.mark.parametrize("place", ["key", "value"])
def test_what_is_hidden_never_touches_the_output_nor_a_gradient(backend, scale, bad, place):
    hidden = 20
    for pattern in (Causal(), Window(3, 3), Window(2, 2, step=3), Padding([hidden, hidden])):
        inputs = tensors((TOKENS, TOKENS))
        clean = tensors((TOKENS, TOKENS))
        with torch.no_grad():
            (inputs[1] if place == "key" else inputs[2])[:, :, hidden:] = bad
        try:
            output = attend(*inputs, pattern=pattern, scale=scale, backend=backend)
        except BackendError:
            continue
        expected = attend(*clean, pattern=pattern, scale=scale, backend=backend)
        mask = pattern.matrix(TOKENS)
        mask = mask if mask.ndim == 3 else mask[None].expand(ROWS, -1, -1)
        blind = ~mask[:, :, hidden:].any(-1)[:, None, :].expand(-1, 3, -1)
        assert blind.any()
        assert torch.allclose(output[blind], expected[blind], rtol=0, atol=1e-13)
        if not output.requires_grad or bad == 1e300:
            continue
        grads = torch.autograd.grad(output[blind].sum(), inputs, allow_unused=True)
        truths = torch.autograd.grad(expected[blind].sum(), clean, allow_unused=True)
        for grad, truth in zip(grads, truths, strict=True):
            if grad is not None and truth is not None:
                assert torch.allclose(grad, truth, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", *TILED, "sdpa"])
def test_what_is_seen_and_not_finite_shows(backend):
    query, key, value = (tensor.detach() for tensor in tensors((TOKENS, TOKENS)))
    value[0, 0, 4, 2] = math.nan
    key[0, 1, 6, 0] = math.inf
    output = attend(query, key, value, pattern=Causal(), backend=backend)
    assert torch.isnan(output[0, 0, 4:, 2]).all()
    assert torch.isfinite(output[0, 0, :, :2]).all()
    assert torch.isfinite(output[0, 1, :6]).all()
    assert torch.isnan(output[0, 1, 6:]).all()
    assert torch.isfinite(output[1]).all()


def test_hard_attention_does_not_read_the_values_of_losers():
    query, key, value = random(1, 3, 2), random(1, 5, 2, seed=1), random(1, 5, 2, seed=2)
    best = (query @ key.mT).argmax(-1).flatten().tolist()
    loser = next(number for number in range(5) if number not in best)
    value[0, loser] = math.nan
    for backend in ("reference", "blocked"):
        assert torch.isfinite(attend(query, key, value, scale=math.inf, backend=backend)).all()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("pattern", [Full(), Causal(), Window(7, 7), Window(3, 3, step=7) | First(2)], ids=str)
def test_equal_keys_are_ties_whatever_the_rounding_of_their_products(pattern, dtype):
    # Copies of one key get products that differ in the last bits, by their place in the matrix.
    key = random(1, 2, 1, 64).expand(1, 2, 300, 64).contiguous().to(dtype)
    query, value = random(1, 2, 300, 64, seed=1).to(dtype), random(1, 2, 300, 4, seed=2).to(dtype)
    mask = pattern.matrix(300).to(F64)
    expected = mask @ value.double() / mask.sum(-1, keepdim=True)
    for backend in ("reference", "blocked"):
        for scale in (math.inf, -math.inf):
            found = attend(query, key, value, pattern=pattern, scale=scale, backend=backend)
            assert float((found - expected).abs().max()) <= 300 * torch.finfo(dtype).eps * float(value.abs().max())


@pytest.mark.parametrize("backend", ["reference", *TILED, "sdpa"])
@pytest.mark.parametrize("scale", [None, math.inf])
def test_a_nan_query_does_not_give_zeros(backend, scale):
    query, key, value = random(2, 5, 3), random(2, 5, 3, seed=1), random(2, 5, 3, seed=2)
    query[0, 2] = math.nan
    for pattern in (Full(), Causal()):
        try:
            output = attend(query, key, value, pattern=pattern, scale=scale, backend=backend)
        except BackendError:
            assert backend == "sdpa" or scale == math.inf
            continue
        assert torch.isnan(output[0, 2]).all()
        assert torch.isfinite(output[0, [0, 1, 3, 4]]).all()
        assert torch.isfinite(output[1]).all()


@pytest.mark.parametrize("scale", [0.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_no_kernel_is_chosen_that_cannot_bear_a_beta_of_zero_or_less(scale, dtype):
    query, key, value = (random(2, 9, 4, seed=seed).to(dtype) for seed in range(3))
    for pattern in (Full(), Causal()):
        output = attend(query, key, value, pattern=pattern, scale=scale)
        truth = attend(query.double(), key.double(), value.double(), pattern=pattern, scale=scale, backend="reference")
        assert float((output.double() - truth).abs().max()) <= 8 * torch.finfo(dtype).eps * float(truth.abs().max())


def test_a_bias_wider_than_the_tensors_is_not_rounded_to_them():
    inputs = [random(2, 6, 4, seed=seed).half() for seed in range(3)]
    bias = torch.tensor([2000.0, 2000.4, 2001.0, 2001.5, 1999.0, 2000.7]).expand(6, 6)
    truth = attend(*(x.double() for x in inputs), bias=bias.double(), backend="reference")
    assert float((attend(*inputs, bias=bias).double() - truth).abs().max()) <= 4e-3
    with pytest.raises(BackendError, match="round the bias"):
        attend(*inputs, bias=bias, backend="sdpa")


@pytest.mark.parametrize(
    ("backend", "scale"), [(tiled, scale) for tiled in TILED for scale in (None, 0.0)] + [("blocked", math.inf)]
)
def test_what_inference_has_cached_can_be_trained_with(backend, scale):
    pattern = Window(5, 11) & Padding([29, 31])
    words = dict(pattern=pattern, scale=scale, backend=backend)
    with torch.inference_mode():
        attend(*(tensor.detach() for tensor in tensors((31, 31))), **words)
    inputs = tensors((31, 31))
    attend(*inputs, **words).sum().backward()
    assert inputs[2].grad.any()


@pytest.mark.parametrize("backend", TILED)
def test_cached_tensors_do_not_live_on_the_callers_default_device(backend):
    inputs = tensors((23, 23))
    bias = RelativeTable(3, distance=4).double()
    for default in ("meta", "cpu"):
        with torch.device(default):
            output = attend(*inputs, pattern=Window(3, 8), bias=bias, backend=backend)
            output.sum().backward()
        assert torch.isfinite(output).all()


def test_appending_a_token_to_unmasked_attention_equals_starting_over():
    query, key, value = random(5, 3), random(8, 3, seed=1), random(8, 4, seed=2)
    scores = query @ key.T / math.sqrt(3)
    output = attend(query[None], key[None, :7], value[None, :7])[0]
    grown = append_key(output, logsumexp(scores[:, :7]), scores[:, 7], value[7])
    assert float((grown.output - attend(query[None], key[None], value[None])[0]).abs().max()) <= EXACT


def test_packed_segments_equal_separate_sequences():
    first, second = [tensor.detach() for tensor in tensors((5, 5))], [t.detach() for t in tensors((9, 9), seed=1)]
    packed = [torch.cat(pair, dim=2) for pair in zip(first, second, strict=True)]
    ids = torch.tensor([0] * 5 + [1] * 9).expand(ROWS, 14)
    together = attend(*packed, pattern=Causal() & Segments(ids))
    apart = torch.cat([attend(*first, pattern=Causal()), attend(*second, pattern=Causal())], dim=2)
    assert float((together - apart).abs().max()) <= EXACT


# Shapes


def test_any_number_of_batch_axes_and_broadcasting_between_them():
    query, key, value = random(2, 3, 4, 5, 6), random(1, 3, 4, 7, 6, seed=1), random(2, 1, 4, 7, 2, seed=2)
    output = attend(query, key, value, pattern=Window(2, 1))
    assert output.shape == (2, 3, 4, 5, 2)
    single = attend(query[1, 2], key[0, 2], value[1, 0], pattern=Window(2, 1))
    assert float((output[1, 2] - single).abs().max()) <= EXACT
    bias = random(3, 4, 5, 7, seed=3)
    biased = attend(query, key, value, bias=bias, pattern=Window(2, 1))
    single = attend(query[1, 2], key[0, 2], value[1, 0], bias=bias[2], pattern=Window(2, 1))
    assert float((biased[1, 2] - single).abs().max()) <= EXACT


def test_a_description_is_a_value_and_keywords_override_it():
    described = Attention(pattern=Causal(), scale=0.5)
    query, key, value = random(2, 5, 3), random(2, 5, 3, seed=1), random(2, 5, 4, seed=2)
    assert described == Attention(pattern=Causal(), scale=0.5)
    assert torch.equal(attend(query, key, value, described), attend(query, key, value, pattern=Causal(), scale=0.5))
    assert torch.equal(
        attend(query, key, value, described, scale=2.0), attend(query, key, value, pattern=Causal(), scale=2.0)
    )


# What it says


def test_explain_names_the_backend_the_reasons_the_plan_and_the_cost():
    query, key, value = (tensor.detach() for tensor in tensors((TOKENS, TOKENS)))
    said = explain(query, key, value, pattern=Window(3, 0))
    best = TILED[-1]
    assert said.backend == best
    assert set(said.reasons) == {backend.name for backend in BACKENDS} - {best}
    assert all(said.reasons.values())
    assert said.macs == ROWS * 3 * Window(3, 0).pairs(TOKENS) * (5 + 7)
    assert f"runs on  {best}" in str(said)
    assert f"{Window(3, 0).pairs(TOKENS):,} pairs allowed" in str(said)
    assert explain(query, key, value).backend == ("native" if "native" in TILED else "sdpa")
    assert explain(query, key, value, feature_map="elu1").backend == "linear"
    assert explain(query, key, value, scale=math.inf).backend == "blocked"
    assert explain(query, key, value, feature_map="elu1", pattern=Window(1, 1)).backend == "reference"


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (ShapeError, lambda q, k, v: attend(q[0, 0], k[0, 0], v[0, 0])),
        (ShapeError, lambda q, k, v: attend(q[..., :2], k, v)),
        (ShapeError, lambda q, k, v: attend(q, k, v[:, :, 1:])),
        (ShapeError, lambda q, k, v: attend(q, k[:, :2], v[:, :2])),
        (ShapeError, lambda q, k, v: attend(q, k, v.float())),
        (ShapeError, lambda q, k, v: attend(q.long(), k.long(), v.long())),
        (ShapeError, lambda q, k, v: attend(q, k[:1].expand(3, -1, -1, -1), v)),
        (ShapeError, lambda q, k, v: attend(q, k, v, pattern=Padding([1, 2, 3]))),
        (ShapeError, lambda q, k, v: attend(q, k, v, scale=math.nan)),
        (ShapeError, lambda q, k, v: attend(q, k, v, layout="diagonal")),
        (ShapeError, lambda q, k, v: attend(q, k, v, Causal())),
        (ShapeError, lambda q, k, v: attend(q, k, v, scale="1")),
        (ShapeError, lambda q, k, v: attend(q, k, v, scale=torch.ones(2))),
        (ShapeError, lambda q, k, v: attend(q.tolist(), k, v)),
        (ShapeError, lambda q, k, v: attend(q[:, :0], k, v)),
        (PatternError, lambda q, k, v: attend(q, k, v, pattern="Causal()")),
        (PatternError, lambda q, k, v: attend(q, k, v, pattern=Causal)),
        (PatternError, lambda q, k, v: attend(q, k, v, pattern=torch.ones(35, 35) > 0)),
        (PatternError, lambda q, k, v: attend(q, k, v, pattern=Segments([[0, 1], [0, 1]]))),
        (BiasError, lambda q, k, v: attend(q, k, v, bias=torch.zeros(35, 34))),
        (BiasError, lambda q, k, v: attend(q, k, v, bias=torch.ones(35, 35) > 0)),
        (BiasError, lambda q, k, v: attend(q, k, v, bias="alibi")),
        (BiasError, lambda q, k, v: attend(q, k, v, bias=Alibi(8))),
        (BackendError, lambda q, k, v: attend(q, k, v, backend="cuda")),
        (BackendError, lambda q, k, v: attend(q, k, v, backend="sdpa", pattern=Window(3, 0))),
        (BackendError, lambda q, k, v: attend(q, k, v, backend="sdpa", scale=math.inf)),
        (BackendError, lambda q, k, v: attend(q, k, v, backend="blocked", feature_map="relu")),
        (BackendError, lambda q, k, v: attend(q, k, v, backend="linear")),
        (BackendError, lambda q, k, v: attend(q, k, v, feature_map="relu", bias=Alibi(3))),
        (BackendError, lambda q, k, v: attend(q, k, v, feature_map="relu", scale=math.inf)),
        (RegardError, lambda q, k, v: attend(q, k, v, feature_map="gelu")),
    ],
)
def test_what_cannot_be_is_refused_in_four_parts(kind, call):
    with pytest.raises(kind) as refusal:
        call(*(tensor.detach() for tensor in tensors((TOKENS, TOKENS))))
    error = refusal.value
    assert error.asked
    assert error.because
    assert error.instead
    assert str(error).count("\n") >= 3


def test_a_named_backend_never_falls_back():
    query, key, value = (tensor.detach() for tensor in tensors((7, TOKENS)))
    with pytest.raises(BackendError, match="aligns its causal mask") as refusal:
        attend(query, key, value, pattern=Causal(), backend="sdpa")
    assert f'backend="auto", which would choose {TILED[-1]}' in str(refusal.value)


def test_importing_regard_changes_nothing_global():
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    __import__("regard")
    assert before == (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())


def test_a_learned_bias_is_a_module_that_learns_through_attend():
    bias = RelativeTable(2, distance=3)
    x = torch.randn(1, 2, 9, 4)
    attend(x, x, x, bias=bias, pattern=Full()).sum().backward()
    assert bias.table.grad is not None
    assert bias.table.grad.any()


@pytest.mark.parametrize("pattern", [Full(), Causal(), Causal() & Window(3, 0)], ids=repr)
def test_tensors_without_numbers_have_an_output_without_numbers(pattern):
    query, key, value = torch.empty(3, 2, 3, 9, 8, device="meta")
    output = attend(query, key, value[..., :5], pattern=pattern)
    assert output.is_meta
    assert output.shape == (2, 3, 9, 5)
