"""The same subject in float64, and how precise a computation really is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from regard.adapters import adapt
from regard.adapters.precision import Float64Arguments, find_coarsest_dtype, in_precision
from regard.adapters.rng import Rng


def single(seed: int, *shape: int) -> torch.Tensor:
    return Rng(seed).normal(*shape, dtype=torch.float32)


def test_a_function_that_closes_over_single_precision_is_rerun_in_double():
    matrix = single(1, 7, 7)
    doubled = in_precision(lambda x: torch.softmax(x @ matrix, -1) @ matrix, torch.float64)
    x = single(2, 3, 7).double()
    expected = torch.softmax(x @ matrix.double(), -1) @ matrix.double()
    torch.testing.assert_close(doubled(x), expected, rtol=1e-14, atol=1e-14)


def test_a_function_that_closes_over_a_module_is_rerun_in_double():
    layer = nn.MultiheadAttention(6, 3, batch_first=True)
    doubled = in_precision(lambda x: layer(x, x, x)[0], torch.float64)
    x = single(3, 2, 5, 6).double()
    torch.testing.assert_close(doubled(x), in_precision(layer, torch.float64)(x, x, x)[0], rtol=1e-13, atol=1e-13)
    assert next(layer.parameters()).dtype == torch.float32, "the module itself is left alone"


def test_what_is_written_in_place_stays_where_it_was():
    shared = torch.zeros(3)

    def accumulate(x):
        shared.add_(x.sum(0))
        shared[0] = 7.0
        return x * 1

    with Float64Arguments():
        accumulate(torch.ones(2, 3, dtype=torch.float64))
    assert shared.tolist() == [7.0, 2.0, 2.0]


def test_gradients_flow_through_a_doubled_function():
    matrix = single(4, 5, 5).requires_grad_()
    doubled = in_precision(lambda x: (x @ matrix).tanh(), torch.float64)
    x = single(5, 2, 5).double().requires_grad_()
    (gradient,) = torch.autograd.grad(doubled(x).sum(), x)
    assert gradient.dtype == torch.float64
    assert matrix.dtype == torch.float32


@pytest.mark.parametrize(
    ("run", "coarsest"),
    [
        (lambda x: x.softmax(-1) @ x, torch.float64),
        (lambda x: x.float().softmax(-1).double() @ x, torch.float32),
        (lambda x: x.to(torch.bfloat16).to(x.dtype) + x, torch.bfloat16),
        # A mask made in single precision holds 0 and -inf, which lose nothing.
        (lambda x: x + torch.zeros(3, 3).masked_fill(torch.ones(3, 3).bool().triu(1), -torch.inf), torch.float64),
    ],
)
def test_the_coarsest_rounding_inside_is_found(run, coarsest):
    assert find_coarsest_dtype(lambda: run(torch.ones(3, 3, dtype=torch.float64))) == coarsest


def test_a_subject_with_another_formula_in_float64_has_no_float64_view():
    def doubtful(q, k, v, mask=None):
        out = F.scaled_dot_product_attention(q, k, v)
        return out * 2 if q.dtype == torch.float64 else out

    assert adapt(doubtful, "operator").at(torch.float64) is None


def test_a_module_in_float64_leaves_the_users_own_alone():
    layer = nn.Linear(6, 6).train()
    subject = adapt(layer, "layer")
    assert subject.at(torch.float64) is not None
    assert layer.training
    assert layer.weight.dtype == torch.float32
