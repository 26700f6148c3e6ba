"""The weights of some queries: rows of the square, without it."""

import pytest
import torch

from regard import Alibi, Attention, Causal, RegardError, RelativeTable, TransformerXL, Window
from regard.layers import AttentionSizes, MultiHeadAttention, Rotary

F64 = torch.float64
# A weight is a softmax of sums of at most 13 products, and of as many in each projection.
TOLERANCE = {F64: 1e-12, torch.float32: 1e-5}


def random(*shape, seed=0, dtype=F64):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(layer, dtype=F64):
    """A layer with numbers of its own everywhere, the biases too."""
    layer = layer.to(dtype).eval()
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.copy_(random(*parameter.shape, seed=50 + index) * 0.4)
    return layer


def assert_close(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "attention",
    [
        Attention(),
        Attention(pattern=Causal() & Window(3, 0), bias=Alibi(6)),
        Attention(bias=RelativeTable(6, 19)),
        Attention(bias=TransformerXL(6, 4)),
        Attention(bias=random(6, 11, 11, seed=9), scale=0.7),
        Attention(pattern=Causal(), feature_map="elu1"),
    ],
)
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_the_weights_of_some_queries_are_rows_of_the_square(attention, dtype):
    if isinstance(attention.bias, torch.Tensor):
        attention = Attention(bias=attention.bias.to(dtype), scale=attention.scale)
    layer = filled(MultiHeadAttention(AttentionSizes(13, heads=6, kv_heads=2, key=4), attention=attention), dtype)
    x, chosen = random(2, 11, 13, dtype=dtype), [7, 0, 10]
    assert_close(layer.weights(x, queries=chosen), layer.weights(x)[..., chosen, :], TOLERANCE[dtype])


def test_weights_of_a_row_subset_keep_their_positions():
    for attention in (Attention(pattern=Window(2, 1), bias=Alibi(3)), Attention(bias=random(3, 5, 17, seed=4))):
        layer = filled(MultiHeadAttention(12, 3, attention=attention))
        x, context = random(2, 5, 12), random(2, 17, 12, seed=1)
        assert_close(layer.weights(x, context, queries=[4, 1]), layer.weights(x, context)[..., [4, 1], :])
    turned = filled(MultiHeadAttention(12, 3, rotary=Rotary(4)))
    assert_close(turned.weights(x, queries=[3]), turned.weights(x)[..., [3], :])


@pytest.mark.parametrize("queries", [[-1], [5], [0.0], [[1, 2]]])
def test_weights_of_tokens_that_do_not_exist_are_refused(queries):
    with pytest.raises(RegardError, match="out of range"):
        MultiHeadAttention(12, 3).weights(random(1, 5, 12, dtype=torch.float32), queries=queries)
