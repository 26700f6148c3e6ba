"""The kernel of causal linear attention against its definition: the square, in float64."""

import math

import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import Causal, Padding, attend, step
from regard.features import Elu1
from regard.kernels import library
from regard.kernels import linear_attention as kernel
from regard.kernels.linear_attention import Phi, attention, try_attention

PLAIN, ELU1 = Phi(), Phi(1, -0.7, 1.3)
# batch, heads, kv_heads, tokens, dim, value_dim: one token, fewer and more than a chunk, whole vectors and parts of one
SIZES = [
    (1, 1, 1, 1, 1, 1),
    (2, 3, 3, 23, 5, 7),
    (1, 4, 2, 24, 8, 16),
    (2, 6, 2, 131, 13, 33),
    (1, 2, 1, 75, 64, 65),
    (1, 1, 1, 49, 72, 31),
]


jit_is_old = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Tensors this small only make threads wait for one another; the tests of threads ask for more themselves."""
    threads(1)


@pytest.fixture(params=["best", "plain", "scalar"])
def chosen(request, using):
    """The kernels of this machine, those of any machine, and the scalar twins."""
    with using(library.name() if request.param == "best" else request.param):
        yield request.param


def problem(size, phi=PLAIN, *, with_state=False, dtype=torch.float64, seed=0):
    """Query, key, value, state and norm; features are positive, as those of a kernel should be."""
    batch, heads, kv_heads, tokens, dim, value_dim = size
    make = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(shape, generator=make, dtype=torch.float64)
        for shape in (
            (batch, heads, tokens, dim),
            (batch, kv_heads, tokens, dim),
            (batch, kv_heads, tokens, value_dim),
        )
    )
    if not phi.map:
        query, key = query.abs(), key.abs()
    state = norm = None
    if with_state:
        state = torch.randn(batch, kv_heads, dim, value_dim, generator=make, dtype=torch.float64).to(dtype)
        norm = torch.rand(batch, kv_heads, dim, generator=make, dtype=torch.float64).to(dtype)
    return query.to(dtype), key.to(dtype), value.to(dtype), state, norm


def features(query, key, phi):
    return (Elu1()(query * phi.query_scale), Elu1()(key * phi.key_scale)) if phi.map else (query, key)


def definition(query, key, value, state, norm, phi):
    """Output, next state and next norm from the square of queries and keys."""
    query, key = features(query, key, phi)
    group = query.shape[1] // key.shape[1]
    each = [tensor if tensor is None else tensor.repeat_interleave(group, 1) for tensor in (key, value, state, norm)]
    weight = (query @ each[0].mT).tril()
    summed, total = weight @ each[1], weight.sum(-1, keepdim=True)
    next_state, next_norm = key.mT @ value, key.sum(2)
    if state is not None:
        summed, total = summed + query @ each[2], total + query @ each[3].unsqueeze(-1)
        next_state, next_norm = next_state + state, next_norm + norm
    return summed / torch.where(total == 0, 1, total), next_state, next_norm


def wide(tensors):
    return [tensor if tensor is None else tensor.detach().double() for tensor in tensors]


def roundings(query, value, dtype):
    """How often a result may have been rounded, relative to the sum of its terms' sizes."""
    tokens, dim, value_dim = query.shape[2], query.shape[3], value.shape[3]
    return torch.finfo(dtype).eps * (4 * (tokens + dim + value_dim) + 32)


def output_limit(inputs, phi, dtype):
    """Sums of products move by a rounding of each term: the same sums over sizes, times the number of roundings."""
    query, key, value, state, norm = wide(inputs)
    sized = definition(query, key, value.abs(), state if state is None else state.abs(), norm, phi)
    return [roundings(query, value, dtype) * size for size in sized]


def gradients(run, inputs, above):
    leaves = [tensor if tensor is None else tensor.detach().clone().requires_grad_() for tensor in inputs]
    results = run(*leaves)
    return torch.autograd.grad(results, [leaf for leaf in leaves if leaf is not None], above)


def grad_output(inputs, results, dtype):
    make = torch.Generator().manual_seed(7)
    above = [torch.randn(r.shape, generator=make, dtype=torch.float64).to(dtype) for r in results]
    return above if inputs[3] is not None else [above[0], torch.zeros_like(above[1]), torch.zeros_like(above[2])]


def gradient_limits(inputs, phi, above, dtype):
    """The same for gradients: every difference in them taken as a sum of sizes."""
    query, key, value, state, norm = wide(inputs)
    above = [each.double().abs() for each in above]
    output, _, _ = definition(query, key, value.abs(), state if state is None else state.abs(), norm, phi)
    leaves = [query, key, value.abs(), *((state.abs(), norm) if state is not None else ())]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    phis = features(leaves[0], leaves[1], phi)
    group = query.shape[1] // key.shape[1]
    # d (summed / total) has the terms d summed / total and -output d total / total; here both are added.
    many = [tensor.repeat_interleave(group, 1) for tensor in (phis[1], *leaves[2:])]
    weight = (phis[0] @ many[0].mT).tril()
    summed, total = weight @ many[1], weight.sum(-1, keepdim=True)
    if state is not None:
        summed, total = summed + phis[0] @ many[2], total + phis[0] @ many[3].unsqueeze(-1)
    loss = (above[0] * (summed + output * total) / total.detach()).sum()
    loss = loss + (above[1] * (phis[1].mT @ leaves[2])).sum() + (above[2] * phis[1].sum(2)).sum()
    if state is not None:
        loss = loss + (above[1] * leaves[3]).sum() + (above[2] * leaves[4]).sum()
    sized = torch.autograd.grad(loss, leaves)
    return [roundings(query, value, dtype) * size.abs() for size in sized]


def assert_within(found, expected, limits):
    for number, (mine, truth, limit) in enumerate(zip(found, expected, limits, strict=True)):
        assert mine.shape == truth.shape
        excess = ((mine.detach().double() - truth.detach()).abs() - limit - torch.finfo(mine.dtype).tiny).max()
        assert mine.numel() == 0 or excess <= 0, f"result {number} is beyond its bound by {float(excess):.3g}"


# The numbers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("phi", [PLAIN, ELU1])
def test_it_is_what_it_is_defined_as(chosen, phi, with_state, dtype):
    for size in SIZES:
        inputs = problem(size, phi, with_state=with_state, dtype=dtype)
        expected = definition(*wide(inputs), phi)
        assert_within(attention(*inputs, phi), expected, output_limit(inputs, phi, dtype))
        above = grad_output(inputs, expected, dtype)
        grads = gradients(lambda *x, phi=phi: attention(*x, phi), inputs, above)
        truth = gradients(lambda *x, phi=phi: definition(*x, phi), wide(inputs), wide(above))
        assert_within(grads, truth, gradient_limits(inputs, phi, above, dtype))


def test_the_bounds_can_be_broken():
    inputs = problem(SIZES[3])
    expected, limits = definition(*inputs, PLAIN), output_limit(inputs, PLAIN, torch.float64)
    query, key, value, _, _ = inputs
    late = attention(query, key.roll(1, 2), value.roll(1, 2), None, None, PLAIN)
    with pytest.raises(AssertionError, match="beyond its bound"):
        assert_within(late, expected, limits)


def test_a_long_sequence_keeps_its_digits():
    size = (1, 1, 1, 5003, 3, 2)
    inputs = problem(size, ELU1, dtype=torch.float32)
    expected = definition(*wide(inputs), ELU1)
    found = attention(*inputs, ELU1)
    # Errors that add up like a random walk, not one by one.
    limit = 4 * math.sqrt(5003) * torch.finfo(torch.float32).eps
    assert float((found[0].double() - expected[0]).abs().max()) < limit * float(inputs[2].abs().max())


@pytest.mark.parametrize(("dtype", "low"), [(torch.float32, -104.0), (torch.float64, -746.0)])
def test_the_map_is_exact_to_two_units_down_to_the_smallest_number(kernels, dtype, low):
    x = torch.linspace(low, 5.0, 20011, dtype=dtype).reshape(-1, 1, 1, 1)
    one = torch.ones_like(x)
    norm = attention(one, x, one, None, None, Phi(1))[2].flatten().double()
    exact = Elu1()(x.flatten().double())
    unit = torch.finfo(dtype).eps * exact + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert bool(((norm - exact).abs() <= 2 * unit).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_features_still_make_a_mean(dtype):
    low = -95.0 if dtype == torch.float32 else -735.0
    value = torch.linspace(1, 2, 7, dtype=dtype).reshape(1, 1, 7, 1)
    key, query = torch.full_like(value, low), torch.zeros_like(value)
    output, _, norm = attention(query, key, value, None, None, Phi(1))
    assert 0 < float(norm) < torch.finfo(dtype).smallest_normal
    means = value.cumsum(2) / torch.arange(1, 8).reshape(1, 1, 7, 1)
    # A subnormal number of this size has about four digits left.
    torch.testing.assert_close(output, means, rtol=1e-2, atol=0)


def test_a_normaliser_of_zero_divides_by_one():
    inputs = [tensor for tensor in problem((1, 1, 1, 30, 5, 3))[:3]]
    inputs[0][:, :, ::3] = 0
    output = attention(*inputs, None, None, PLAIN)[0]
    assert (output[:, :, ::3] == 0).all()
    above = torch.ones_like(output)

    def run(*tensors):
        return attention(*tensors, None, None, PLAIN)[0]

    found = gradients(run, inputs, above)
    expected = gradients(lambda *x: definition(*x, None, None, PLAIN)[0], inputs, above)
    for mine, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-12, atol=1e-12)


# What must not matter


@pytest.mark.parametrize("size", [(1, 1, 1, 150, 37, 70), (1, 6, 3, 50, 64, 64), (2, 2, 1, 30, 9, 5)])
def test_the_number_of_threads_changes_no_bit(threads, size):
    def everything(count):
        threads(count)
        inputs = problem(size, ELU1, with_state=True, dtype=torch.float32)
        results = attention(*inputs, ELU1)
        return [
            *results,
            *gradients(lambda *x: attention(*x, ELU1), inputs, grad_output(inputs, results, torch.float32)),
        ]

    alone = everything(1)
    for count in (2, 5):
        for mine, expected in zip(everything(count), alone, strict=True):
            assert torch.equal(mine, expected)


def test_a_row_does_not_depend_on_its_batch():
    inputs = problem((3, 4, 2, 53, 11, 13), with_state=True, dtype=torch.float32)
    whole = attention(*inputs, PLAIN)
    above = grad_output(inputs, whole, torch.float32)
    grads = gradients(lambda *x: attention(*x, PLAIN), inputs, above)
    one = [tensor[1:2] for tensor in inputs]
    for mine, expected in zip(attention(*one, PLAIN), whole, strict=True):
        assert torch.equal(mine, expected[1:2])
    alone = gradients(lambda *x: attention(*x, PLAIN), one, [each[1:2] for each in above])
    for mine, expected in zip(alone, grads, strict=True):
        assert torch.equal(mine, expected[1:2])


def test_strides_change_no_bit():
    inputs = problem((2, 4, 2, 53, 11, 13), dtype=torch.float32)
    expected = attention(*inputs, PLAIN)
    above = grad_output(inputs, expected, torch.float32)
    by_token = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs[:3]]
    by_column = [tensor.mT.contiguous().mT for tensor in inputs[:3]]
    plain = gradients(lambda *x: attention(*x, PLAIN), inputs, above)
    for other in (by_token, by_column):
        assert not other[0].is_contiguous()
        for mine, truth in zip(attention(*other, None, None, PLAIN), expected, strict=True):
            assert torch.equal(mine, truth)
        for mine, truth in zip(
            gradients(lambda *x: attention(*x, PLAIN), (*other, None, None), above), plain, strict=True
        ):
            assert torch.equal(mine, truth)


def test_nothing_to_do_is_done():
    for size in [(2, 4, 2, 0, 3, 5), (0, 2, 2, 7, 3, 5), (1, 2, 2, 7, 3, 0)]:
        inputs = problem(size, with_state=True)
        results = attention(*inputs, PLAIN)
        expected = definition(*inputs, PLAIN)
        for mine, truth in zip(results, expected, strict=True):
            torch.testing.assert_close(mine, truth)
        above = [torch.ones_like(each) for each in results]
        found = gradients(lambda *x: attention(*x, PLAIN), inputs, above)
        for mine, truth in zip(found, gradients(lambda *x: definition(*x, PLAIN), inputs, above), strict=True):
            torch.testing.assert_close(mine, truth)


# What is not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_reported(bad):
    query, key, value, _, _ = problem((1, 2, 1, 40, 5, 3), ELU1)
    assert try_attention(query, key, value, None, None, ELU1) is not None
    broken_key, broken_value = key.clone(), value.clone()
    broken_key[0, 0, 17, 2] = broken_value[0, 0, 39, 1] = bad
    assert try_attention(query, broken_key, value, None, None, ELU1) is None
    assert try_attention(query, key, broken_value, None, None, ELU1) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_query_that_is_not_finite_loses_its_row_and_no_other(kernels, bad, dtype):
    # Features of minus infinity are zero: the other channels alone would make a finite output.
    query, key, value = torch.randn(3, 1, 2, 75, 5, dtype=dtype)
    query[0, 1, 70, 3] = bad
    found, expected = (
        attend(query, key, value, pattern=Causal(), feature_map="elu1", backend=name)
        for name in ("linear", "reference")
    )
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert torch.isnan(found).sum() == 5


def test_a_nan_that_carries_bits_of_its_own_is_one():
    query, key, value, _, _ = problem((1, 1, 1, 40, 5, 3), ELU1, dtype=torch.float32)
    for broken in (query, key):
        bits = broken.view(torch.int32)
        bits[0, 0, 17, 2], before = 0x7FC00001, int(bits[0, 0, 17, 2])
        assert try_attention(query, key, value, None, None, ELU1) is None
        bits[0, 0, 17, 2] = before
    assert try_attention(query, key, value, None, None, ELU1) is not None


def test_a_gradient_that_is_not_finite_is_that_of_the_formula():
    inputs = problem((1, 1, 1, 30, 3, 2))[:3]
    above = torch.zeros(1, 1, 30, 2, dtype=torch.float64)
    above[0, 0, 7, 1] = math.nan
    found = gradients(lambda *x: attention(*x, None, None, PLAIN)[0], inputs, above)
    assert torch.isnan(found[0][0, 0, 7]).all()
    assert torch.isfinite(found[0][0, 0, 8:]).all()


# Transforms and derivatives


@pytest.mark.parametrize("phi", [PLAIN, ELU1])
@pytest.mark.parametrize("with_state", [False, True])
def test_it_is_differentiable_twice(phi, with_state):
    inputs = [tensor for tensor in problem((1, 2, 1, 3, 2, 2), phi, with_state=with_state) if tensor is not None]
    leaves = [tensor.requires_grad_() for tensor in inputs]

    def run(*tensors):
        return attention(*tensors, *([None] * (5 - len(tensors))), phi)

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def run_backend(query, key, value):
    return attend(query, key, value, pattern=Causal(), feature_map="elu1", backend="linear")


@jit_is_old
def test_forward_mode_is_never_silently_zero():
    query, key, value, _, _ = problem((1, 2, 1, 5, 3, 2), ELU1)
    direction = torch.randn_like(query)

    def reference(x):
        return attend(x, key, value, pattern=Causal(), feature_map="elu1", backend="reference")

    _, found = torch.func.jvp(lambda x: run_backend(x, key, value), (query,), (direction,))
    _, expected = torch.func.jvp(reference, (query,), (direction,))
    torch.testing.assert_close(found, expected)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, direction)
        torch.testing.assert_close(forward_ad.unpack_dual(run_backend(dual, key, value)).tangent, expected)
        with pytest.raises(NotImplementedError, match="jvp"):
            attention(dual, key, value, None, None, ELU1)


@jit_is_old
def test_forward_over_reverse_is_reverse_over_reverse():
    query, key, value, _, _ = problem((1, 1, 1, 4, 2, 2), ELU1)

    def loss(x):
        return run_backend(x, key, value).square().sum()

    torch.testing.assert_close(torch.func.hessian(loss)(query), torch.func.jacrev(torch.func.jacrev(loss))(query))


@pytest.mark.parametrize("with_state", [False, True])
def test_the_operators_are_what_torch_expects(with_state):
    inputs = problem((2, 4, 2, 7, 3, 5), ELU1, with_state=with_state)
    leaves = [tensor if tensor is None else tensor.requires_grad_() for tensor in inputs]
    opcheck(torch.ops.regard.linear_attention.default, (*leaves, *ELU1))


def test_samples_can_be_mapped():
    many = [torch.stack([tensor, tensor.flip(0)]) for tensor in problem((3, 4, 2, 29, 3, 5), with_state=True)]
    expected = [attention(*(tensor[n] for tensor in many), PLAIN) for n in range(2)]
    for call in (lambda *x: attention(*x, PLAIN), lambda *x: torch.ops.regard.linear_attention(*x, *PLAIN)[::2]):
        found = torch.func.vmap(call)(*many)
        torch.testing.assert_close(found[0], torch.stack([each[0] for each in expected]))
    shared = torch.func.vmap(lambda value: attention(many[0][0], many[1][0], value, None, None, PLAIN)[0])(many[2])
    torch.testing.assert_close(shared[1], attention(many[0][0], many[1][0], many[2][1], None, None, PLAIN)[0])


def test_operations_are_counted():
    query, key, value, _, _ = problem((2, 6, 3, 40, 5, 7), ELU1)
    with FlopCounterMode(display=False) as counter:
        run_backend(query.requires_grad_(), key, value).sum().backward()
    forward = 2 * 2 * (6 + 3) * 40 * 5 * (7 + 1)
    assert counter.get_total_flops() == 4 * forward


# The backend


@pytest.mark.parametrize("feature_map", ["elu1", "relu", "taylor2"])
@pytest.mark.parametrize("pattern", [Causal(), Causal() & Padding([53, 20]), Causal() & Padding([7, 53], side="left")])
@pytest.mark.parametrize("lengths", [(53, 53), (20, 53), (70, 53)])
def test_the_backend_with_and_without_it_agree(monkeypatch, lengths, pattern, feature_map):
    make = torch.Generator().manual_seed(3)
    shapes = [(2, 4, lengths[0], 3), (2, 2, lengths[1], 3), (2, 2, lengths[1], 5)]
    inputs = [torch.randn(shape, generator=make, dtype=torch.float64) for shape in shapes]

    def run(*tensors):
        return attend(*tensors, pattern=pattern, feature_map=feature_map, scale=0.8, backend="linear")

    calls = []
    real = kernel._run
    monkeypatch.setattr(kernel, "_run", lambda *arguments: calls.append(1) or real(*arguments))
    above = torch.randn(2, 4, lengths[0], 5, generator=make, dtype=torch.float64)
    output, grads = run(*inputs), gradients(run, inputs, above)
    assert calls
    monkeypatch.setattr(regard.backends.linear_attention, "is_supported", lambda *_: False)
    calls.clear()
    torch.testing.assert_close(output, run(*inputs), rtol=1e-11, atol=1e-11)
    for mine, truth in zip(grads, gradients(run, inputs, above), strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-10, atol=1e-10)
    assert not calls


def test_a_step_runs_on_the_kernel(monkeypatch):
    calls = []
    real = kernel._run
    monkeypatch.setattr(kernel, "_run", lambda *arguments: calls.append(1) or real(*arguments))
    query, key, value, _, _ = problem((2, 4, 2, 9, 3, 5), ELU1, dtype=torch.float32)
    whole = run_backend(query, key, value)
    state = None
    for token in range(9):
        now = slice(token, token + 1)
        output, state = step(query[:, :, now], key[:, :, now], value[:, :, now], state, feature_map="elu1")
        torch.testing.assert_close(output, whole[:, :, now])
    assert len(calls) == 10
