"""Gradients against finite differences, in float64, and the transforms of torch."""

import math

import pytest
import torch
from catalog import PATTERNS, ROWS, TILED, TOKENS, assert_agree, biases, bounds, make_bias, results, tensors
from plain import slow, slow_rows

from regard import Causal, First, Full, Padding, Quadratic, RelativeTable, Window, attend
from regard.errors import BackendError

SMALL = [Window(2, 1), Causal(), Window(1, 2, step=2), First(1) | Window(1, 0), ~Causal()]


@pytest.mark.parametrize("backend", ["reference", *TILED])
@pytest.mark.parametrize("scale", [None, *slow(0.0, -1.3)])
@pytest.mark.parametrize("pattern", SMALL, ids=str)
def test_gradients_equal_finite_differences(backend, pattern, scale):
    query, key, value = tensors((5, 7), heads=2, kv_heads=1, dim=3, value_dim=2)

    def run(*inputs):
        return attend(*inputs, pattern=pattern, scale=scale, backend=backend)

    assert torch.autograd.gradcheck(run, (query, key, value))


@pytest.mark.parametrize("value_dim", [2, 3])
@pytest.mark.parametrize("pattern", [Causal(), Full()], ids=str)
def test_gradients_of_torchs_kernels_equal_finite_differences(pattern, value_dim):
    inputs = tensors((5, 5), heads=2, kv_heads=1, dim=3, value_dim=value_dim)
    assert torch.autograd.gradcheck(lambda *x: attend(*x, pattern=pattern, backend="sdpa"), inputs)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
@pytest.mark.parametrize("scale", [math.inf, -math.inf])
def test_hard_attention_is_constant_in_scores_and_linear_in_values(backend, scale):
    query, key, value = tensors((5, 7), heads=2, kv_heads=1, dim=3, value_dim=2)

    def run(v):
        return attend(query, key, v, pattern=Window(2, 2), scale=scale, backend=backend)

    assert torch.autograd.gradcheck(run, (value,))
    grads = torch.autograd.grad(run(value).sum(), (query, key), allow_unused=True)
    assert all(grad is None or not grad.any() for grad in grads)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (backend, name)
        for backend in ("reference", *TILED)
        for name in biases(2, 3)
        if name not in ("none", "alibi") and (backend, name) != ("native", "transformer-xl")
    ],
)
def test_learned_biases_get_the_slope_of_finite_differences(backend, name):
    bias = make_bias(name, 2, 3)
    query, key, value = (x.detach() for x in tensors((6, TOKENS), heads=2, kv_heads=1, dim=3, value_dim=2, batch=1))
    generator = torch.Generator().manual_seed(2)

    def loss():
        return attend(query, key, value, pattern=Window(4, 0), bias=bias, backend=backend).sin().sum()

    parameters = list(bias.parameters())
    grads = torch.autograd.grad(loss(), parameters)
    directions = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in parameters]
    derivative = sum(float((g * d).sum()) for g, d in zip(grads, directions, strict=True))
    step, found = 1e-5, []
    for sign in (1, -2):
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter += sign * step * direction
            found.append(float(loss()))
    # A central difference is off by step^2 times a third derivative, and by the rounding of two sums.
    assert derivative != 0
    assert (found[0] - found[1]) / (2 * step) == pytest.approx(derivative, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("backend", TILED)
def test_a_bias_that_is_not_learned_gets_no_gradient_and_costs_none(backend):
    query, key, value = tensors((9, 9))
    bias = RelativeTable(3, distance=2).double().requires_grad_(False)
    attend(query, key, value, bias=bias, pattern=Window(2, 2), backend=backend).sum().backward()
    assert query.grad is not None
    assert bias.table.grad is None


@pytest.mark.parametrize("backend", TILED)
def test_second_derivatives_are_refused_with_a_reason(backend):
    query, key, value = tensors((5, 5))
    output = attend(query, key, value, pattern=Window(1, 1), backend=backend)
    (derivative,) = torch.autograd.grad(output.sum(), query, create_graph=True)
    with pytest.raises(BackendError, match="once, not twice"):
        derivative.sum().backward()


@pytest.mark.parametrize(
    ("backend", "scale"), [(tiled, scale) for tiled in TILED for scale in (None, 0.0)] + [("blocked", math.inf)]
)
@pytest.mark.parametrize("pattern", [Window(3, 2), Window(2, 2, step=3), Padding([TOKENS, 20]), Causal()], ids=str)
def test_vmap_equals_a_loop(pattern, backend, scale):
    samples = [tensors((TOKENS, TOKENS), kv_heads=1, seed=seed) for seed in range(3)]
    query, key, value = (torch.stack([sample[n].detach() for sample in samples]) for n in range(3))
    shared = value[0]

    def run(q, k, v):
        return attend(q, k, v, pattern=pattern, scale=scale, backend=backend)

    together = torch.func.vmap(run, in_dims=(0, 0, None))(query, key, shared)
    apart = torch.stack([run(query[n], key[n], shared) for n in range(3)])
    assert float((together - apart).abs().max()) <= bounds(query[0], key[0], shared, scale, torch.float64)["output"]


@pytest.mark.parametrize("backend", ["reference", *TILED, "sdpa"])
def test_per_sample_gradients_by_vmap_of_grad_equal_a_loop(backend):
    samples = [tensors((TOKENS, TOKENS), seed=seed) for seed in range(3)]
    stacked = [torch.stack([sample[n].detach() for sample in samples]) for n in range(3)]

    def loss(q, k, v):
        return attend(q, k, v, pattern=Causal(), backend=backend).sin().sum()

    together = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*stacked)
    for number, sample in enumerate(samples):
        apart = torch.autograd.grad(loss(*sample), sample)
        limits = bounds(*sample, None, torch.float64)
        for name, mine, truth in zip(("query", "key", "value"), together, apart, strict=True):
            assert float((mine[number] - truth).abs().max()) <= limits[name]


@pytest.mark.parametrize("backend", TILED)
def test_vmap_over_a_tensor_bias_equals_a_loop(backend):
    query, key, value = (tensor.detach() for tensor in tensors((9, 9)))
    biases = torch.randn(4, 3, 9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def run(bias):
        return attend(query, key, value, bias=bias, pattern=Window(3, 3), backend=backend)

    together = torch.func.vmap(run)(biases)
    assert torch.allclose(together, torch.stack([run(bias) for bias in biases]), rtol=0, atol=1e-13)


# Where blocked breaks the graph, torch itself looks at `.grad` of tensors in flight and warns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("backend", "fullgraph"),
    [(TILED[-1], TILED[-1] != "blocked"), *slow_rows(("reference", True), ("sdpa", True), ("blocked", False))],
)
def test_a_compiled_attention_equals_an_eager_one(backend, fullgraph):
    torch._dynamo.reset()
    inputs = tensors((TOKENS, TOKENS), dtype=torch.float32)

    def run(q, k, v, **words):
        return attend(q * 1.5, k, v, pattern=Causal(), backend=backend) * 2

    compiled = torch.compile(run, backend="aot_eager", fullgraph=fullgraph)
    assert_agree(results(compiled, *inputs), results(run, *inputs), bounds(*inputs, 1.5, torch.float32))


@pytest.mark.parametrize("backend", ["reference", *TILED, "sdpa"])
def test_autocast_does_not_lower_the_precision_inside(backend):
    inputs = [tensor.detach().float() for tensor in tensors((TOKENS, TOKENS))]
    truth = attend(*inputs, pattern=Causal(), backend="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attend(*inputs, pattern=Causal(), backend=backend)
        mixed = attend(inputs[0].bfloat16(), inputs[1].bfloat16(), inputs[2], pattern=Causal(), backend=TILED[-1])
    assert output.dtype == torch.float32
    assert torch.allclose(output, truth, atol=bounds(*inputs, None, torch.float32)["output"])
    assert torch.allclose(mixed, truth, atol=0.1)


@pytest.mark.parametrize("backend", TILED)
def test_strided_inputs_equal_contiguous_ones(backend):
    query, key, value = tensors((TOKENS, TOKENS))
    turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (query, key, value)]
    assert not turned[0].is_contiguous()
    for pattern in (Window(3, 3), Window(2, 2, step=3), Padding([9, 30])):
        expected = results(attend, query, key, value, pattern=pattern, backend=backend)
        found = results(attend, *turned, pattern=pattern, backend=backend)
        assert_agree(found, expected, bounds(query, key, value, None, torch.float64))


def test_a_row_does_not_depend_on_the_batch_around_it():
    query, key, value = (tensor.detach() for tensor in tensors((TOKENS, TOKENS)))
    for pattern in (Window(3, 3), Causal()):
        both = attend(query, key, value, pattern=pattern, backend="blocked")
        alone = attend(query[1:], key[1:], value[1:], pattern=pattern, backend="blocked")
        assert torch.allclose(both[1:], alone, rtol=0, atol=1e-14)


@pytest.mark.parametrize("backend", TILED)
@pytest.mark.parametrize("quadratic", [True, False])
def test_training_a_sparse_pattern_on_the_cpu_lowers_the_loss(quadratic, backend):
    torch.manual_seed(0)
    x, target = torch.randn(1, 2, 50, 4), torch.randn(1, 2, 50, 4)
    bias = Quadratic(2) if quadratic else RelativeTable(2, distance=3)
    project = torch.nn.Linear(4, 4)
    optimiser = torch.optim.Adam([*bias.parameters(), *project.parameters()], lr=0.1)
    losses = []
    for _ in range(25):
        optimiser.zero_grad()
        loss = (attend(x, x, project(x), pattern=Window(5, 5), bias=bias, backend=backend) - target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_ties_share_equally_whatever_the_pattern(pattern):
    zeros = torch.zeros(ROWS, 1, TOKENS, 3, dtype=torch.float64)
    value = torch.randn(ROWS, 1, TOKENS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    hard = attend(zeros, zeros, value, pattern=pattern, scale=math.inf, backend="blocked")
    mean = attend(zeros, zeros, value, pattern=pattern, scale=0, backend="reference")
    assert torch.allclose(hard, mean, rtol=0, atol=1e-14)
