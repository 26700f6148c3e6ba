"""NaN and infinity: hidden values have no effect, visible ones spread as in the reference."""

import math
from itertools import product

import pytest
import torch
from catalog import GRID, ROWS, TOKENS, bias_tensors, bounds, make_bias, tensors

from regard import Causal, First, Full, Neighborhood, Padding, Random, Window, attend

DTYPES = [torch.float32, torch.float64]
BAD = [math.nan, math.inf, -math.inf]
PATTERNS = [
    Causal(),  # whole runs and ragged ones
    Window(9, 3),
    Window(3, 1, step=4) | First(1),  # two parts
    Random(2, 1, block=4),
    Padding([TOKENS, 9]),
    Neighborhood(GRID, 1),
    Full(),
]
NAMES = ["output", "query", "key", "value", "bias"]
# All bits set, as in memory that was never written: arithmetic keeps such a NaN as it is.
ONES = {torch.float32: torch.int32, torch.float64: torch.int64}


def run(backend, inputs, grad_output=None, bias=None, **words):
    """Output and gradients of query, key, value and bias."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = attend(*inputs, bias=bias, backend=backend, **words)
    if grad_output is None:
        grad_output = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape).cos()
    wanted = [*inputs, *bias_tensors(bias)]
    wanted = [tensor for tensor in wanted if tensor.requires_grad]
    grads = torch.autograd.grad(output, wanted, grad_output, allow_unused=True)
    grads = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, grads, strict=True)]
    return [output.detach(), *grads]


def assert_like_reference(inputs, *, clean=None, scale=None, **words):
    """The same places are NaN, in the output and in every gradient; all other numbers agree."""
    found, expected = (run(backend, inputs, scale=scale, **words) for backend in ("native", "reference"))
    limits = bounds(*(inputs if clean is None else clean), scale, inputs[0].dtype)
    for name, mine, truth in zip(NAMES, found, expected, strict=False):
        same = torch.equal(mine.isnan(), truth.isnan())
        assert same, f"{name}: {places(mine)} are NaN, in the reference {places(truth)}"
        off = (mine - truth).abs().nan_to_num(0, posinf=math.inf)
        assert bool((off <= limits[name]).all()), f"{name} is off by {float(off.max()):.3g}"
    return expected


def places(tensor):
    """Tokens with a NaN, for messages."""
    return tensor.isnan().flatten(0, -2).any(-1).nonzero().flatten().tolist()[:20]


def spoil(tensor, index, bad):
    spoiled = tensor.detach().clone()
    spoiled[index] = bad
    return spoiled


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_broken_keys_and_values_spread_nan_as_in_the_reference(pattern):
    places = [(0, 1, 7), (1, 0, 30, 2), (0, 2, slice(20, 26)), (1, 1, TOKENS - 1)]
    for turn, place in enumerate(places * 2):
        dtype, bad, other = DTYPES[turn // 4], BAD[turn % 3], BAD[turn % 3 - 1]
        query, key, value = clean = tensors((TOKENS, TOKENS), dtype=dtype)
        bias = make_bias(["none", "table"][turn // 2 % 2], 3, 5, dtype)
        words = dict(clean=clean, pattern=pattern, scale=[None, -0.7][turn % 2], bias=bias)
        assert_like_reference([query, spoil(key, place, bad), value], **words)
        assert_like_reference([query, key, spoil(value, place, bad)], **words)
        assert_like_reference([query, spoil(key, place, bad), spoil(value, places[turn % 4 - 1], other)], **words)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", ["none", "table", "tensor"])
def test_without_content_broken_tokens_spread_nan_as_in_the_reference(bias, dtype):
    """scale = 0: queries and keys are not read, with a bias or without."""
    clean = tensors((TOKENS, TOKENS), dtype=dtype)
    for pattern in (Causal(), Window(9, 3), Padding([TOKENS, 9])):
        for which in range(3):
            broken = list(clean)
            broken[which] = spoil(clean[which], (0, 1, 30), math.nan)
            made = torch.zeros(TOKENS, TOKENS, dtype=dtype).requires_grad_()
            chosen = made if bias == "tensor" else make_bias(bias, 3, 5, dtype)
            expected = assert_like_reference(broken, clean=clean, pattern=pattern, scale=0.0, bias=chosen)
            assert expected[0].isnan().any() == (which == 2)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_tokens_change_no_bit(dtype, bad):
    """Padding is often uninitialised memory: outputs and gradients are those of clean tensors, bit by bit."""
    query, key, value = tensors((TOKENS, TOKENS), dtype=dtype)
    pattern = Window(9, 3) & Padding([TOKENS, 9])
    for bias in ("none", "table"):
        for scale in (None, 0.0, 30.0):
            words = dict(pattern=pattern, scale=scale, bias=make_bias(bias, 3, 5, dtype))
            expected = run("native", [query, key, value], **words)
            hidden = (1, slice(None), slice(9, None))
            broken = [query, spoil(key, hidden, bad), spoil(value, hidden, bad)]
            for mine, truth in zip(run("native", broken, **words), expected, strict=True):
                assert torch.equal(mine, truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_hidden_pair_of_the_bias_touches_nothing(dtype):
    inputs = tensors((TOKENS, TOKENS), dtype=dtype)
    pattern = Window(9, 3)
    hidden = ~pattern.matrix(TOKENS, TOKENS)
    bias = torch.randn(TOKENS, TOKENS, dtype=dtype, generator=torch.Generator().manual_seed(2)).requires_grad_()
    expected = run("native", inputs, pattern=pattern, bias=bias)
    for bad in BAD:
        broken = torch.where(hidden, bad, bias.detach()).requires_grad_()
        for mine, truth in zip(run("native", inputs, pattern=pattern, bias=broken), expected, strict=True):
            assert torch.equal(mine, truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", BAD)
def test_a_seen_pair_of_the_bias_spoils_its_row(dtype, bad):
    """Minus infinity only hides the pair."""
    query, key, value = (tensor.detach() for tensor in tensors((TOKENS, TOKENS), dtype=dtype))
    for pattern in (Causal(), Window(3, 1, step=4) | First(1)):
        bias = spoil(torch.zeros(TOKENS, TOKENS, dtype=dtype), (20, 16), bad)
        mine, truth = (
            attend(query, key, value, pattern=pattern, bias=bias, backend=backend)
            for backend in ("native", "reference")
        )
        assert truth[:, :, 20].isnan().all() == (bad != -math.inf)
        assert torch.equal(mine.isnan(), truth.isnan())


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_broken_query_spoils_its_own_output_only(pattern):
    for dtype, bad in product(DTYPES, BAD):
        query, key, value = (tensor.detach() for tensor in tensors((TOKENS, TOKENS), dtype=dtype))
        broken = [spoil(query, (1, 2, 11), bad), key, value]
        assert_spares_what_the_reference_spares(broken, pattern=pattern)
        output = attend(*broken, pattern=pattern, backend="native")
        sees = bool(pattern.matrix(TOKENS, TOKENS).expand(ROWS, -1, -1)[1, 11].any())
        assert bool(output[1, 2, 11].isnan().any()) == sees
        assert int(output.isnan().any(-1).sum()) == int(sees)


def assert_spares_what_the_reference_spares(inputs, grad_output=None, **words):
    """The same outputs are NaN. A gradient that is finite in the reference is finite, and the same."""
    found, expected = (run(backend, inputs, grad_output, **words) for backend in ("native", "reference"))
    assert torch.equal(found[0].isnan(), expected[0].isnan())
    for name, mine, truth in zip(NAMES, found, expected, strict=False):
        kept = truth.isfinite()
        spared = bool(mine[kept].isfinite().all())
        assert spared, f"{name}: {places(mine)} are NaN, in the reference {places(truth)}"
        assert torch.allclose(mine[kept], truth[kept], rtol=1e-3, atol=1e-3), name


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_nonfinite_grad_output_reaches_what_its_query_sees(pattern):
    visible = pattern.matrix(TOKENS, TOKENS).expand(ROWS, -1, -1)[1, 11]
    for dtype, bad in product(DTYPES, BAD):
        inputs = tensors((TOKENS, TOKENS), dtype=dtype)
        grad_output = spoil(torch.ones(ROWS, 3, TOKENS, 7, dtype=dtype), (1, 2, 11), bad)
        square = torch.zeros(ROWS, 1, TOKENS, TOKENS, dtype=dtype).requires_grad_()
        for bias in (None, make_bias("table", 3, 5, dtype), square):
            assert_spares_what_the_reference_spares(inputs, grad_output, pattern=pattern, bias=bias)
        _, query, key, value = run("native", inputs, grad_output, pattern=pattern)
        assert bool((~query[1, 2, 11].isfinite()).any()) == bool(visible.any())
        assert not value[1, 2, visible].isfinite().any()
        assert not key[1, 2, visible].isfinite().any()
        for grad in (query, key, value):  # other rows and heads are other worlds
            assert grad[0].isfinite().all()
            assert grad[1, :2].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_nan_is_one_whatever_its_bits(dtype):
    """Memory that was never written holds other NaNs than arithmetic makes; they spoil the same places."""
    unwritten = torch.tensor(-1, dtype=ONES[dtype]).view(dtype)
    for offset in (1, 3, 256):
        for bad in (unwritten, torch.tensor(math.nan, dtype=dtype).view(ONES[dtype]).add(offset).view(dtype)):
            assert bad.isnan()
            for which in range(3):
                broken = [tensor.detach() for tensor in tensors((TOKENS, TOKENS), dtype=dtype)]
                broken[which] = spoil(broken[which], (0, 1, 12), bad)
                outputs = [attend(*broken, pattern=Causal(), backend=b) for b in ("native", "reference")]
                same = torch.equal(*(output.isnan() for output in outputs))
                assert same, ("query", "key", "value")[which]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_query_that_sees_nothing_gives_zeros_whatever_it_is(dtype):
    query, key, value = tensors((TOKENS, TOKENS), dtype=dtype)
    blind = [Padding([TOKENS, 0]), Window(3, 3) & ~Window(5, 5), Window(2, 2, step=3) & Padding([TOKENS, 0])]
    for bad, pattern in product(BAD, blind):
        broken = [spoil(query, 1, bad), key, value]
        assert not attend(*broken, pattern=pattern, backend="native")[1].any()
        assert_spares_what_the_reference_spares(broken, pattern=pattern)


def test_without_any_key_a_query_gives_zeros_whatever_it_is():
    query, key, value = tensors((TOKENS, 0))
    broken = spoil(query, (0, 1, 3), math.nan)
    for query_rows in (broken, broken.clone().requires_grad_()):
        assert not attend(query_rows, key, value, backend="reference").any()
        assert not attend(query_rows, key, value, backend="native").any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_that_overflow_spread_nan_as_in_the_reference(dtype):
    """One channel, so that a score is one product: no sum of infinities depends on an order."""
    largest = torch.finfo(dtype).max
    inputs = tensors((TOKENS, TOKENS), dim=1, dtype=dtype)
    for scale in (1.0, -1.0):
        for factor in (largest / 64, largest**0.75):
            query = inputs[0].detach() * factor
            key = inputs[1].detach() * factor
            outputs = [
                attend(query, key, inputs[2], pattern=Causal(), scale=scale, backend=b) for b in ("native", "reference")
            ]
            assert outputs[1].isnan().any()
            assert torch.equal(*(output.isnan() for output in outputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_is_at_most_one_however_large_the_score(dtype):
    """Backward too, where it is computed again: the gradient of a value is at most the number of its readers."""
    for exponent in range(2, 36, 3):
        query, key, value = (tensor.detach() for tensor in tensors((TOKENS, TOKENS), dim=1, dtype=dtype))
        size = 10.0 ** (exponent / 2)
        grads = run(
            "native",
            [query.abs() * size, key.abs() * size, value],
            torch.ones(ROWS, 3, TOKENS, 7, dtype=dtype),
            pattern=Window(5, 0),
            scale=1.0,
        )
        assert grads[0].isfinite().all()
        assert float(grads[3].abs().max()) <= 6.0001, f"scores around 1e{exponent}"


def test_a_broken_row_leaves_the_bits_of_the_others():
    query, key, value = tensors((TOKENS, TOKENS), dtype=torch.float32)
    expected = run("native", [query, key, value], pattern=Causal())
    found = run("native", [query, spoil(key, (1, 0, 3), math.nan), spoil(value, (1, 2, 3), math.inf)], pattern=Causal())
    for mine, truth in zip(found, expected, strict=True):
        assert torch.equal(mine[0], truth[0])


def test_the_comparison_with_the_reference_can_fail(monkeypatch):
    query, key, value = tensors((TOKENS, TOKENS))
    broken = [query, spoil(key, (0, 1, 7), math.nan), value]
    honest = attend

    def careless(*inputs, pattern, backend, **words):
        return honest(*inputs, pattern=Window(9, 3) if backend == "native" else pattern, backend=backend, **words)

    monkeypatch.setitem(globals(), "attend", careless)
    with pytest.raises(AssertionError, match="are NaN"):
        assert_like_reference(broken, clean=[query, key, value], pattern=Causal())
