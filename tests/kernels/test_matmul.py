"""The kernels that train against float64 in torch: products with everything fused into them, norms, and their bits."""

import pytest
import torch
import torch.nn.functional as F

from regard.kernels import matmul
from regard.kernels.training import PLAIN

# (tokens, in, out): one of each, odd ones, several chunks of steps, several strips and panels
SHAPES = [(1, 1, 1), (7, 5, 3), (13, 1, 31), (2, 331, 17), (53, 67, 131), (211, 523, 37), (389, 29, 97)]
ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh", "silu"]
DTYPES = [torch.float32, torch.float64]


def draw(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def assert_near(made, exact, size, steps):
    """Within the rounding of a sum of `steps` terms whose absolute values sum to `size`, and an activation."""
    eps = torch.finfo(made.dtype).eps
    bound = (steps + 8) * eps * (size + 1)
    assert made.shape == exact.shape
    excess = ((made.double() - exact).abs() - bound).max()
    assert excess <= 0, f"{float(excess):.3g} beyond the bound"


def activate(name, x):
    return x if name is None else PLAIN[name](x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_linear_layer_with_everything_fused_is_that_of_float64(kernels, shape, activation, dtype):
    tokens, inside, outside = shape
    x, weight, bias = draw(tokens, inside, dtype=dtype), draw(outside, inside, dtype=dtype), draw(outside, dtype=dtype)
    residual = draw(tokens, outside, dtype=dtype, seed=3)
    saved = torch.full((tokens, outside), torch.nan, dtype=dtype)
    output = matmul.linear_forward(x, weight, bias, activation, saved=saved, residual=residual)
    before = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs() + residual.double().abs()
    assert_near(saved, before, size, inside)
    assert_near(output, activate(activation, before) + residual.double(), size, inside)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_of_the_input_is_that_of_float64(kernels, shape, activation, dtype):
    tokens, inside, outside = shape
    grad, weight = draw(tokens, outside, dtype=dtype), draw(outside, inside, dtype=dtype)
    residual, before = draw(tokens, inside, dtype=dtype, seed=4), 3 * draw(tokens, inside, dtype=dtype, seed=5)
    exact = before.double().requires_grad_()
    (factor,) = torch.autograd.grad(activate(activation, exact).sum(), exact)
    made = matmul.linear_input_grad(
        grad, weight, activation=activation, factor=None if activation is None else before, residual=residual
    )
    size = 1.2 * (grad.double().abs() @ weight.double().abs()) + residual.double().abs()
    assert_near(made, grad.double() @ weight.double() * factor + residual.double(), size, outside)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradients_of_weight_and_bias_are_those_of_float64(kernels, shape, dtype):
    tokens, inside, outside = shape
    grad, x = draw(tokens, outside, dtype=dtype), draw(tokens, inside, dtype=dtype)
    weight_grad, bias_grad = matmul.linear_weight_grad(grad, x, True)
    assert_near(weight_grad, grad.double().T @ x.double(), grad.double().abs().T @ x.double().abs(), tokens)
    assert_near(bias_grad, grad.double().sum(0), grad.double().abs().sum(0), tokens)
    again, nothing = matmul.linear_weight_grad(grad, x, False)
    assert nothing is None
    assert torch.equal(again, weight_grad)


def test_rows_that_are_apart_in_memory_are_read_where_they_are(kernels):
    wide, grad, weight = (
        draw(41, 90, dtype=torch.float32),
        draw(41, 70, dtype=torch.float32),
        draw(83, 53, dtype=torch.float32),
    )
    x, part, some = wide[:, 20:73], grad[:, 11:], weight[2:61]
    assert torch.equal(matmul.linear_forward(x, some), matmul.linear_forward(x.contiguous(), some.contiguous()))
    assert torch.equal(matmul.linear_input_grad(part, some), matmul.linear_input_grad(part.contiguous(), some))
    for mine, theirs in zip(
        matmul.linear_weight_grad(part, x, True), matmul.linear_weight_grad(part.contiguous(), x.contiguous(), True),
        strict=True,
    ):  # fmt: skip
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_arguments_have_the_derivatives_of_torch(kernels, dtype):
    places = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-4, 5.3, -5.3, 12.0, -12.0, 90.0, -90.0, 1e18, -1e18, torch.nan], dtype=dtype
    )
    one = torch.eye(len(places), dtype=dtype)
    for name, function in PLAIN.items():
        exact = places.double().requires_grad_()
        (expected,) = torch.autograd.grad(function(exact).sum(), exact)
        made = matmul.linear_input_grad(
            torch.ones(1, len(places), dtype=dtype), one, activation=name, factor=places[None]
        )
        bound = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            made[0].double()[:-1],
            expected[:-1],
            rtol=bound,
            atol=bound * 8,
            msg=lambda text, name=name: f"{name}: {text}",
        )
        assert name == "relu" or made[0][-1].isnan()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("subtracts_mean", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (77, 16), (131, 67), (2503, 33)], ids=str)
def test_a_norm_and_its_gradients_are_those_of_float64(kernels, shape, subtracts_mean, dtype):
    rows, dim = shape
    x, grad, residual = (draw(rows, dim, dtype=dtype, seed=seed) for seed in range(3))
    x = x + 2
    weight, bias = draw(dim, dtype=dtype), draw(dim, dtype=dtype, seed=1) if subtracts_mean else None
    exact = [each.double().requires_grad_() for each in (x, weight, bias) if each is not None]
    norm = F.layer_norm if subtracts_mean else F.rms_norm
    expected = norm(exact[0], (dim,), *exact[1:], eps=1e-3)
    grads = torch.autograd.grad(expected, exact, grad.double())
    output, statistics = matmul.norm_forward(x, weight, bias, 1e-3, subtracts_mean)
    made = matmul.norm_backward(grad, x, weight, statistics, subtracts_mean, subtracts_mean, residual)
    eps = torch.finfo(dtype).eps
    # Differences from the mean carry the rounding of numbers as large as the mean, over a spread of at least sqrt(eps).
    torch.testing.assert_close(output.double(), expected.detach(), rtol=0, atol=eps * (dim + 8) * 200)
    torch.testing.assert_close(made[0].double(), grads[0] + residual.double(), rtol=0, atol=eps * (dim + 8) * 2000)
    for sums, exact_sums in zip(made[1:], grads[1:], strict=False):
        assert sums is not None
        torch.testing.assert_close(sums.double(), exact_sums, rtol=0, atol=eps * (rows + dim) * 50)


def test_any_number_of_threads_gives_the_same_bits(threads):
    x, grad = draw(1201, 307, dtype=torch.float32), draw(1201, 211, dtype=torch.float32)
    weight, norm = draw(211, 307, dtype=torch.float32), draw(307, dtype=torch.float32)

    def everything():
        output, statistics = matmul.norm_forward(x, norm, norm, 1e-5, True)
        return [
            matmul.linear_forward(x, weight, None, "gelu"), matmul.linear_input_grad(grad, weight),
            *matmul.linear_weight_grad(grad, x, True), output,
            *matmul.norm_backward(x + 1, x, norm, statistics, True, True),
        ]  # fmt: skip

    threads(1)
    expected = everything()
    for count in (2, 3, 5):
        threads(count)
        for number, (mine, truth) in enumerate(zip(everything(), expected, strict=True)):
            assert torch.equal(mine, truth), f"result {number} with {count} threads"


def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(kernels):
    x, weight = draw(97, 300, dtype=torch.float32), draw(67, 300, dtype=torch.float32)
    whole = matmul.linear_forward(x, weight, None, "gelu_tanh")
    for rows in (1, 5, 7, 13, 50):
        assert torch.equal(matmul.linear_forward(x[:rows], weight, None, "gelu_tanh"), whole[:rows])


def test_scalar_loops_say_the_same(using):
    x, weight, grad = (draw(*shape, dtype=torch.float64) for shape in ((23, 19), (29, 19), (23, 29)))
    bias, norm, before = draw(29, dtype=torch.float64), draw(19, dtype=torch.float64), draw(23, 19, dtype=torch.float64)
    found = {}
    for name in ("scalar", "plain"):
        with using(name):
            output, statistics = matmul.norm_forward(x, norm, None, 1e-5, False)
            found[name] = [
                matmul.linear_forward(x, weight, bias, "silu"), *matmul.linear_weight_grad(grad, x, True), output,
                matmul.linear_input_grad(grad, weight, activation="gelu", factor=before), statistics[1],
                *matmul.norm_backward(x, x, norm, statistics, False, True, before),
            ]  # fmt: skip
    for mine, scalar in zip(found["plain"], found["scalar"], strict=True):
        torch.testing.assert_close(mine, scalar, rtol=1e-12, atol=1e-12)
