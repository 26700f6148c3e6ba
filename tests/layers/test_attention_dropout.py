"""Layers drop attention weights while training, by `attend`: no square is built and none is saved."""

import pytest
import torch
from agreement import refused

from regard import Attention, Causal, RelativeTable, attend
from regard.errors import ConfigError
from regard.layers import MultiHeadAttention


def test_a_layer_drops_while_training_only_and_its_weights_are_whole():
    layer = MultiHeadAttention(12, 3, kv_heads=1, attention=Attention(pattern=Causal()), dropout=0.3).double()
    x = torch.randn(2, 9, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    output = layer.train()(x)
    torch.manual_seed(1)
    query, key, value = layer.projections(x)
    heads = attend(query, key, value, pattern=Causal(), dropout=0.3)
    assert torch.allclose(output, layer.output(heads.transpose(-2, -3).flatten(-2)), rtol=0, atol=1e-12)
    assert torch.allclose(layer.weights(x).sum(-1), torch.ones((), dtype=torch.float64), rtol=0, atol=1e-12)
    state = torch.get_rng_state()
    quiet = layer.eval()(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.allclose(quiet, output)
    with refused(ConfigError, "0 <= dropout < 1"):
        MultiHeadAttention(12, 3, dropout=1.0)


def test_a_layer_of_linear_attention_has_no_weights_to_drop():
    layer = MultiHeadAttention(12, 3, attention=Attention(feature_map="elu1"), dropout=0.3)
    x = torch.randn(2, 9, 12)
    assert torch.equal(layer.train()(x), layer.eval()(x))


@pytest.mark.parametrize("bias", [None, RelativeTable(3, distance=4)], ids=["no bias", "table"])
def test_training_with_dropout_saves_no_square(bias):
    """What autograd keeps of a layer: with dropout one seed more, which is eight bytes."""
    tokens = 512

    def saved(dropout):
        layer = MultiHeadAttention(24, 3, attention=Attention(bias=bias), dropout=dropout).train()
        held: dict[int, int] = {}

        def keep(tensor):
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = layer(torch.randn(1, tokens, 24, requires_grad=True))
        assert output.requires_grad
        return sum(held.values())

    plain = saved(0.0)
    assert plain < 4 * 3 * tokens**2
    assert saved(0.1) - plain <= 8
