"""The kernels that train: matrix products with what a layer does to them fused, and norms; plain calls, no autograd.

    linear_forward       activation(x W^T + b) + residual
    linear_input_grad    (grad W) * activation'(...) + residual
    linear_weight_grad   grad^T x, and the sum of the rows of grad
    norm_forward, norm_backward   layer norm and RMS norm

All tensors are matrices with a row for each token, float32 or float64, with contiguous rows. No result depends on the
number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.kernels.library import DTYPE_CODES, MATMUL, NORM, OK, empty_output, native, num_threads

DTYPES = (torch.float32, torch.float64)
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}


def linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    saved: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`activation(x weight^T + bias) + residual`; `saved` receives the argument of the activation."""
    output = empty_output(x.shape[0], weight.shape[0], dtype=x.dtype)
    weight_row = weight.stride(0)
    _matmul(
        output, weight.shape[1], (x.data_ptr(), x.stride(0), 1), (weight.data_ptr(), 1, weight_row),
        bias=bias, activation=activation, saved=saved, residual=residual,
    )  # fmt: skip
    return output


def linear_input_grad(
    grad: Tensor,
    weight: Tensor,
    *,
    activation: str | None = None,
    factor: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`(grad weight) * activation'(factor) + residual`."""
    output = empty_output(grad.shape[0], weight.shape[1], dtype=grad.dtype)
    _matmul(
        output, weight.shape[0], (grad.data_ptr(), grad.stride(0), 1), (weight.data_ptr(), weight.stride(0), 1),
        activation=activation, factor=factor, residual=residual,
    )  # fmt: skip
    return output


def linear_weight_grad(grad: Tensor, x: Tensor, with_bias: bool) -> tuple[Tensor, Tensor | None]:
    """`grad^T x`, and the sum of the rows of grad."""
    output = empty_output(grad.shape[1], x.shape[1], dtype=grad.dtype)
    bias_grad = torch.empty(grad.shape[1], dtype=grad.dtype, device="cpu") if with_bias else None
    _matmul(
        output, grad.shape[0], (grad.data_ptr(), 1, grad.stride(0)), (x.data_ptr(), x.stride(0), 1),
        row_sums=bias_grad,
    )  # fmt: skip
    return output, bias_grad


def sum_rows(x: Tensor) -> Tensor:
    """The sum of the rows, in the order of `linear_weight_grad`: it comes beside any product, here the smallest."""
    sums = linear_weight_grad(x, x[:, :1], True)[1]
    assert sums is not None
    return sums


def _matmul(
    output: Tensor,
    steps: int,
    a: tuple[int, int, int],
    b: tuple[int, int, int],
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    saved: Tensor | None = None,
    factor: Tensor | None = None,
    residual: Tensor | None = None,
    row_sums: Tensor | None = None,
) -> None:
    assert native is not None
    rows, columns = output.shape
    fields = MATMUL.pack(
        DTYPE_CODES[output.dtype], num_threads(), rows, steps, columns, *a, *b,
        0 if bias is None else bias.data_ptr(), output.data_ptr(), output.stride(0), ACTIVATIONS[activation],
        0 if saved is None else saved.data_ptr(), 0 if factor is None else factor.data_ptr(),
        *((0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))),
        0 if row_sums is None else row_sums.data_ptr(),
    )  # fmt: skip
    if native.regard_matmul(fields) != OK:
        raise MemoryError("there is no memory to pack the operands of a matrix product in")


def norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, subtracts_mean: bool
) -> tuple[Tensor, Tensor]:
    """The normalised rows, and the statistics that backward needs: means and scales, `(2, row)`."""
    assert native is not None
    output = empty_output(*x.shape, dtype=x.dtype)
    statistics = torch.empty(2, x.shape[0], dtype=x.dtype, device="cpu")
    fields = _pack_norm(x, weight, bias, eps, subtracts_mean, output, statistics, 0, 0, 0, 0, 0)
    if native.regard_norm(fields) != OK:
        raise MemoryError("there is no memory for a norm")
    return output, statistics


def norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    subtracts_mean: bool,
    with_bias: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of the rows (with `residual` added), of the weight and of the bias."""
    assert native is not None
    x_grad = empty_output(*x.shape, dtype=x.dtype)
    weight_grad = None if weight is None else torch.empty_like(weight)
    bias_grad = torch.empty(x.shape[1], dtype=x.dtype, device="cpu") if with_bias else None
    fields = _pack_norm(
        x, weight, None, 0.0, subtracts_mean, None, statistics, grad.data_ptr(),
        0 if residual is None else residual.data_ptr(), x_grad.data_ptr(),
        0 if weight_grad is None else weight_grad.data_ptr(), 0 if bias_grad is None else bias_grad.data_ptr(),
    )  # fmt: skip
    if native.regard_norm_backward(fields) != OK:
        raise MemoryError("there is no memory for the gradient of a norm")
    return x_grad, weight_grad, bias_grad


def _pack_norm(x, weight, bias, eps, subtracts_mean, output, statistics, *grads) -> bytes:
    rows, dim = x.shape
    return NORM.pack(
        DTYPE_CODES[x.dtype], num_threads(), rows, dim, subtracts_mean, eps, x.data_ptr(),
        0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        0 if output is None else output.data_ptr(), statistics[0].data_ptr(), statistics[1].data_ptr(), *grads,
    )  # fmt: skip
