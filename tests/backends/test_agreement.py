"""Every backend that accepts a request agrees with the reference in float64, values and gradients."""

import math

import pytest
import torch
from catalog import (
    BETAS,
    LENGTHS,
    PATTERNS,
    ROWS,
    TILED,
    TOKENS,
    assert_agree,
    biases,
    bounds,
    fits,
    make_bias,
    results,
    tensors,
)

from regard import Causal, First, Full, Padding, Window, attend
from regard.backends import BACKENDS, find
from regard.backends.base import Request
from regard.backends.tiles import group_tiles

OTHERS = [backend.name for backend in BACKENDS if backend.name not in ("reference", "linear", "flex")]


def accepts(backend, pattern, *, lengths=(TOKENS, TOKENS), scale=None, bias="none"):
    """Whether a backend takes a cell on at all; its refusals are tested where its reasons are."""
    query, key, value = tensors(lengths)
    request = Request(query, key, value, pattern, 0.4 if scale is None else scale, make_bias(bias, 3, 5))
    return find(backend).refuse(request) is None


def assert_cell_agrees(
    backend,
    pattern,
    *,
    lengths=(TOKENS, TOKENS),
    scale=None,
    bias="none",
    kv_heads=3,
    dtype=torch.float64,
    heads=3,
    value_dim=7,
):
    """Compare one cell."""
    # torch has one kernel for values as wide as keys and another for the rest
    shape = dict(heads=heads, kv_heads=kv_heads, batch=ROWS, value_dim=value_dim)
    truth_inputs = tensors(lengths, **shape)
    inputs = tensors(lengths, dtype=dtype, **shape)
    truth_bias, mine_bias = make_bias(bias, heads, 5), make_bias(bias, heads, 5, dtype)
    words = dict(pattern=pattern, scale=scale)
    found = results(attend, *inputs, bias=mine_bias, backend=backend, **words)
    expected = results(attend, *truth_inputs, bias=truth_bias, backend="reference", **words)
    assert_agree(found, expected, bounds(*truth_inputs, scale, dtype))


CELLS = [
    (backend, pattern, lengths, scale)
    for pattern in PATTERNS
    for lengths in LENGTHS
    if fits(pattern, lengths)
    for scale in BETAS
    for backend in OTHERS
    if accepts(backend, pattern, lengths=lengths, scale=scale)
]


@pytest.mark.parametrize(
    ("number", "backend", "pattern", "lengths", "scale"), [(n, *cell) for n, cell in enumerate(CELLS)], ids=str
)
def test_every_pattern_at_every_temperature_and_length_agrees(number, backend, pattern, lengths, scale):
    assert_cell_agrees(
        backend,
        pattern,
        lengths=lengths,
        scale=scale,
        kv_heads=(3, 1)[number % 2],
        value_dim=(5, 7)[number // 4 % 2],
        dtype=(torch.float64, torch.float32)[number // 2 % 2],
    )


@pytest.mark.parametrize("backend", TILED)
@pytest.mark.parametrize("bias", [name for name in biases(3, 5) if name != "none"])
@pytest.mark.parametrize(("number", "pattern"), list(enumerate(PATTERNS)), ids=str)
def test_every_bias_on_every_pattern_agrees(pattern, bias, number, backend):
    lengths = LENGTHS[number % len(LENGTHS)]
    lengths = lengths if fits(pattern, lengths) else (TOKENS, TOKENS)
    scale = BETAS[number % len(BETAS)]
    if not accepts(backend, pattern, lengths=lengths, scale=scale, bias=bias):
        # native leaves the hard limit, and biases that read content, to blocked
        assert bias == "transformer-xl" or math.isinf(scale)
        scale, bias = -1.9, "table" if bias == "transformer-xl" else bias
    assert_cell_agrees(
        backend,
        pattern,
        lengths=lengths,
        scale=scale,
        bias=bias,
        kv_heads=(3, 1)[number // 3 % 2],
        dtype=(torch.float32, torch.float64)[number // 2 % 2],
    )


SHAPES = [(2, 3, 35, 35), (1, 3, 35, 35), (3, 1, 35), (35, 35), (2, 1, 1, 35), (35, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("backend", "pattern"),
    [("sdpa", Full())]
    + [(tiled, p) for tiled in TILED for p in (Full(), Window(4, 1), Window(3, 3, step=3), Padding([30, 11]))],
    ids=str,
)
def test_a_plain_tensor_as_bias_agrees_and_learns(backend, pattern, shape):
    inputs = tensors((35, 35))
    bias = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    words = dict(pattern=pattern, bias=bias)
    expected = results(attend, *inputs, backend="reference", **words)
    found = results(attend, *inputs, backend=backend, **words)
    assert_agree(found, expected, bounds(*inputs, None, torch.float64))


@pytest.mark.parametrize(
    ("backend", "scale"), [(tiled, scale) for tiled in TILED for scale in (None, 0.0)] + [("blocked", math.inf)]
)
def test_minus_infinity_in_a_bias_hides_pairs_and_may_empty_a_row(backend, scale):
    inputs = tensors((35, 35))
    bias = torch.where(torch.rand(35, 35, generator=torch.Generator().manual_seed(1)) < 0.5, -torch.inf, 0.3).double()
    bias[4] = -torch.inf
    words = dict(pattern=Window(6, 6), bias=bias, scale=scale)
    expected = results(attend, *inputs, backend="reference", **words)
    found = results(attend, *inputs, backend=backend, **words)
    assert bool((found[0][:, :, 4] == 0).all())
    assert_agree(found, expected, bounds(*inputs, scale, torch.float64))


@pytest.mark.parametrize("backend", [*TILED, "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32_and_returned_as_it_came(backend, dtype):
    inputs = [tensor.detach().to(dtype) for tensor in tensors((35, 35))]
    output = attend(*inputs, pattern=Causal(), backend=backend)
    truth = attend(*(tensor.double() for tensor in inputs), pattern=Causal(), backend="reference")
    assert output.dtype == dtype
    assert float((output.double() - truth).abs().max()) <= 4 * torch.finfo(dtype).eps * float(truth.abs().max())


@pytest.mark.parametrize("backend", [*TILED, "reference"])
@pytest.mark.parametrize("lengths", [(0, 35), (7, 0), (0, 0)])
@pytest.mark.parametrize("scale", BETAS)
def test_no_visible_keys_give_zeros_and_no_queries_give_an_empty_output(backend, lengths, scale):
    inputs = tensors(lengths)
    scale = 1.7 if backend == "native" and scale is not None and math.isinf(scale) else scale
    output, *grads = results(attend, *inputs, pattern=Window(2, 2), scale=scale, backend=backend)
    assert output.shape == (2, 3, lengths[0], 7)
    assert not output.any()
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize("together", [1, 1 << 30])
@pytest.mark.parametrize("scale", [None, math.inf])
@pytest.mark.parametrize("pattern", [Full(), Causal(), Window(20, 9), Window(9, 9, step=2) | First(2)], ids=str)
def test_tiles_whose_keys_are_split_agree_whether_they_run_one_by_one_or_at_once(monkeypatch, pattern, scale, together):
    monkeypatch.setattr("regard.backends.tiles.LONGEST", 8)
    monkeypatch.setattr("regard.backends.tiles.TILE_BUDGET", together)
    group_tiles.cache_clear()
    try:
        assert_cell_agrees("blocked", pattern, scale=scale, bias="table")
        assert_cell_agrees("blocked", pattern, scale=scale, kv_heads=1)
    finally:
        group_tiles.cache_clear()


def test_the_agreement_can_fail():
    inputs = tensors((35, 35))
    expected = results(attend, *inputs, pattern=Window(3, 2), backend="reference")
    found = results(attend, *inputs, pattern=Window(3, 3), backend="blocked")
    with pytest.raises(AssertionError, match="off by"):
        assert_agree(found, expected, bounds(*inputs, None, torch.float64))
    nudged = [expected[0], expected[1] * (1 + 1e-6), *expected[2:]]
    with pytest.raises(AssertionError, match="query is off"):
        assert_agree(nudged, expected, bounds(*inputs, None, torch.float64))


def test_a_request_reports_whether_gradients_are_needed():
    query, key, value = tensors((3, 3))
    request = Request(query, key, value, Full(), 1.0)
    assert request.needs_gradient
    with torch.no_grad():
        assert not request.needs_gradient


@pytest.mark.parametrize("backend", ["reference", *TILED, "sdpa", "flex"])
@pytest.mark.parametrize("what", ["value", "key"])
def test_minus_infinity_in_a_bias_hides_what_is_not_a_number(backend, what):
    query, key, value = (tensor.detach() for tensor in tensors((35, 35), value_dim=5))
    bias = torch.randn(3, 35, 35, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    bias[:, 3:, 17] = -torch.inf  # only the first three queries see token 17
    expected = attend(query, key, value, bias=bias, backend="reference")
    (value if what == "value" else key)[..., 17, 2] = torch.nan
    found = attend(query, key, value, bias=bias, backend=backend)
    assert torch.allclose(found[:, :, 3:], expected[:, :, 3:], rtol=1e-12, atol=1e-12)
    lost = found[:, :, :3].isnan()
    assert lost[..., 2].all()
    assert lost.all() if what == "key" else not lost[..., :2].any()
