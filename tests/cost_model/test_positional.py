"""Attention by position alone: rows and columns apart, counted as executed, and the bytes that autograd saves."""

from __future__ import annotations

import pytest
import torch
from cost_model.test_attention import executed, saved_bytes

from regard import Alibi, Attention, Gaussian, Quadratic, RowColumn, Shift, Window, cost
from regard.errors import CostError

SIZES = {"batch": 3, "heads": 4, "kv_heads": 4, "tokens": 35, "keys": 35, "dim": 2, "value_dim": 11}
BIASES = {
    "quadratic": lambda: Quadratic(4, grid=(5, 7)),
    "rows and columns": lambda: RowColumn(4, grid=(5, 7)),
    "fixed": lambda: Quadratic(4, grid=(5, 7)).requires_grad_(False),
}
each = pytest.mark.parametrize("name", BIASES)


@each
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("backward", [False, True])
def test_two_sums_are_executed_instead_of_one(name: str, kv_heads: int, backward: bool) -> None:
    attention, sizes = Attention(scale=0.0, bias=BIASES[name]()), SIZES | {"kv_heads": kv_heads}
    found = cost(attention, backend="positional", step="backward" if backward else "forward", **sizes)
    once = 3 * 4 * 5 * 7 * (5 + 7) * 11
    assert found.macs == once * (2 if backward and name != "fixed" else 1)
    assert found.macs == executed(attention, "positional", backward, **sizes).macs
    assert found.pairs == 0
    if not backward:
        assert str(found.macs.formula) == "B*H*R*W*e*(R + W)"
        assert found.exponentials == 4 * (5**2 + 7**2)
        assert cost(attention, **sizes).macs == 3 * 4 * 35**2 * 11  # what the mathematics needs: every pair


@each
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_bytes_are_those_of_autograd(name: str, batch: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Sizes for or not: this is who runs."""
    attention, sizes = Attention(scale=0.0, bias=BIASES[name]().to(dtype)), SIZES | {"kv_heads": kv_heads}
    sizes["batch"] = batch
    found = saved_bytes(attention, dtype, **sizes)
    assert cost(attention, dtype=dtype, backend="positional", **sizes).activation_bytes == found
    assert cost(attention, dtype=dtype, **sizes).activation_bytes == found


def test_parameters_are_those_of_the_bias() -> None:
    bias = RowColumn(4, grid=(5, 7))
    found = cost(Attention(scale=0.0, bias=bias), backend="positional", **SIZES)
    assert found.parameters == sum(parameter.numel() for parameter in bias.parameters())


def test_a_head_that_attends_to_one_place_copies() -> None:
    found = cost(Attention(scale=0.0, bias=Shift(4, [[1], [0], [-1], [2]])), backend="positional", **SIZES)
    assert found.macs == 0
    assert found.bytes == 2 * 4 * 3 * 4 * 35 * 11


@pytest.mark.parametrize(
    ("attention", "because"),
    [
        (lambda: Attention(), "needs a positional bias"),
        (lambda: Attention(bias=Alibi(4)), "content is in the scores"),
        (lambda: Attention(scale=0.0, bias=torch.zeros(4, 35, 35)), "a tensor has a score for each pair"),
        (lambda: Attention(scale=0.0, bias=Alibi(4), pattern=Window(2, 0)), "ratio of convolutions"),
        (lambda: Attention(bias=Gaussian(4, grid=(5, 7))), "features of positions"),
        (lambda: Attention(feature_map="relu"), "no feature maps"),
    ],
)
def test_what_it_cannot_run_or_count_is_refused(attention, because: str) -> None:
    with pytest.raises(CostError, match=because):
        cost(attention(), backend="positional", **SIZES)


def test_without_tokens_the_method_is_unknown() -> None:
    with pytest.raises(CostError, match="it is not given"):
        _ = cost(Attention(scale=0.0, bias=Quadratic(4, grid=(5, 7))), backend="positional", keys=35)


def test_bytes_and_depth_by_hand() -> None:
    """Two heads of seven channels on 3 by 5 tokens: 2 (9 + 25) weights, three tensors of 210 numbers and a half-sum."""
    hill = Attention(scale=0.0, bias=Quadratic(2, grid=(3, 5)))
    sizes = {"tokens": 15, "heads": 2, "dim": 7, "backend": "positional"}
    forward = cost(hill, **sizes).by_part()
    assert (forward["weights"].exponentials, forward["weights"].bytes) == (68, 2 * 4 * 68)
    assert forward["weights"].depth == 1 + (3 + 1 + 1 + 3 + 1)  # scores; largest of 5, minus, exp, sum of 5, divided
    assert forward["values"].bytes == 4 * (210 + 2 * 210 + 210 + 68)
    assert forward["values"].depth == (1 + 2) + (1 + 3)
    back = cost(hill, step="backward", **sizes).by_part()
    assert (back["weights"].bytes, back["values"].bytes) == (3 * 4 * 68, 2 * 4 * (4 * 210 + 68))
    assert (back["weights"].depth, back["values"].depth) == (1 + 3 + 2, 7)
