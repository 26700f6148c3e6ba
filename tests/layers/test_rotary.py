"""Rotary positions: only distances count, and the two layouts are one rotation in two orders."""

import pytest
import torch
from twins import library

from regard import Attention, Causal
from regard.errors import ConfigError
from regard.layers import MultiHeadAttention, Rotary

F64 = torch.float64
LAYOUTS = ["halves", "pairs"]


def random(*shape, seed=0, dtype=F64):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [2, 6, 10])
def test_scores_depend_on_the_distance_only(layout, dim):
    rotary = Rotary(dim, 500.0, layout)
    query, key, places = random(1, 3, 1, 10), random(1, 3, 1, 10, seed=1), torch.arange(40)
    rotation = rotary.rotation(places, F64)
    rotated_query, rotated_key = (rotary(tensor.expand(1, 3, 40, 10), rotation) for tensor in (query, key))
    scores = rotated_query @ rotated_key.mT
    assert float((scores[..., 1:, 1:] - scores[..., :-1, :-1]).abs().max()) <= 1e-12
    assert float((scores[0, 0, 0] - scores[0, 0, 0, 0])[1:].abs().min()) > 1e-6
    far = rotary.rotation(places + 100_000, F64)
    moved = rotary(query.expand(1, 3, 40, 10), far) @ rotary(key.expand(1, 3, 40, 10), far).mT
    # An angle of 1e5 has the rounding 1e5 * 2^-53, and so has everything turned by it.
    assert float((moved - scores).abs().max()) <= 1e5 * 2.0**-53 * 40


@pytest.mark.parametrize("layout", LAYOUTS)
def test_turning_keeps_lengths_and_position_zero_turns_nothing(layout):
    rotary, x = Rotary(10, layout=layout), random(2, 3, 7, 10)
    turned = rotary(x, rotary.rotation(torch.arange(7), F64))
    assert float((turned.norm(dim=-1) - x.norm(dim=-1)).abs().max()) <= 1e-14
    assert torch.equal(turned[:, :, 0], x[:, :, 0])


def test_pairs_are_complex_numbers_that_are_multiplied():
    rotary, x, places = Rotary(10, 300.0, "pairs"), random(2, 3, 7, 10), torch.arange(7)
    speed = 300.0 ** (-torch.arange(0, 10, 2, dtype=F64) / 10)
    turn = torch.polar(torch.ones(7, 5, dtype=F64), places[:, None] * speed)
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (5, 2))) * turn).flatten(-2)
    assert float((rotary(x, rotary.rotation(places, F64)) - expected).abs().max()) <= 1e-14


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
def test_halves_are_those_of_hugging_faces_llama(dtype):
    llama = library("transformers.models.llama.modeling_llama")
    config = library("transformers").LlamaConfig(
        hidden_size=30, num_attention_heads=3, rope_parameters={"rope_theta": 700.0, "rope_type": "default"}
    )
    places = torch.tensor([[0, 1, 5, 900], [3, 4, 6, 7]])
    query, key = random(2, 3, 4, 10, dtype=dtype), random(2, 3, 4, 10, seed=1, dtype=dtype)
    cosine, sine = llama.LlamaRotaryEmbedding(config)(query, places)
    expected = llama.apply_rotary_pos_emb(query, key, cosine, sine)
    rotary = Rotary(10, 700.0)
    rotation = rotary.rotation(places, dtype)
    for mine, theirs in zip((query, key), expected, strict=True):
        # Their angles are float32 products: position 900 is known to 900 * 2^-24 radians.
        assert float((rotary(mine, rotation) - theirs).abs().max()) <= 900 * 2.0**-23 * 5


def test_the_layouts_are_related_by_a_permutation():
    halves, pairs = Rotary(10, 300.0, "halves"), Rotary(10, 300.0, "pairs")
    x, rotation = random(2, 3, 7, 10), halves.rotation(torch.arange(7), F64)
    order = torch.arange(10).reshape(2, 5).T.flatten()  # channel 2i was i, channel 2i + 1 was i + 5
    assert torch.equal(pairs(x[..., order], rotation), halves(x, rotation)[..., order])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_channels_beyond_the_dim_rest(layout):
    rotary, x = Rotary(4, layout=layout), random(2, 3, 7, 10)
    rotation = rotary.rotation(torch.arange(7), F64)
    turned = rotary(x, rotation)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], rotary(x[..., :4], rotation))
    assert not torch.equal(turned[..., :4], x[..., :4])


def test_a_bfloat16_model_turns_by_float32_tables():
    rotary, places = Rotary(10), torch.arange(298, 303)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rotation = rotary.rotation(places, dtype)
        assert rotation.cosine.dtype == rotation.sine.dtype == torch.float32
    assert rotary.rotation(places, F64).sine.dtype == F64
    # Neighbours stay apart: position 300 and 301 are one and the same number in bfloat16.
    x = torch.ones(1, 1, 5, 10, dtype=torch.bfloat16)
    turned = rotary(x, rotary.rotation(places, torch.bfloat16))
    assert turned.dtype == torch.bfloat16
    exact = rotary(x.double(), rotary.rotation(places, F64))
    assert float((turned.double() - exact).abs().max()) <= 2 * 2.0**-8
    assert float((turned[0, 0, 1:] - turned[0, 0, :-1]).abs().amax(-1).min()) > 0.5


def test_positions_of_rows_may_differ():
    rotary, x = Rotary(6), random(2, 3, 4, 6)
    places = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]])
    rotation = rotary.rotation(places, F64)
    assert rotation.cosine.shape == (2, 1, 4, 3)
    for row in range(2):
        alone = rotary(x[row], rotary.rotation(places[row], F64))
        assert torch.equal(rotary(x, rotation)[row], alone)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_turns_its_queries_and_keys(layout):
    rotary = Rotary(4, 50.0, layout)
    layer = MultiHeadAttention(12, 3, attention=Attention(pattern=Causal()), rotary=rotary).double()
    plain = MultiHeadAttention(12, 3, attention=Attention(pattern=Causal())).double()
    plain.load_state_dict(layer.state_dict())
    x = random(2, 7, 12).requires_grad_()
    query, key, value = plain.projections(x)
    rotation = rotary.rotation(torch.arange(7), F64)
    score = rotary(query, rotation) @ rotary(key, rotation).mT * 0.5
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1)
    mixed = score.masked_fill(mask, -torch.inf).softmax(-1) @ value
    expected = plain.output(mixed.transpose(1, 2).flatten(2))
    assert float((layer(x) - expected).abs().max().detach()) <= 1e-12
    assert float((layer(x) - plain(x)).abs().max().detach()) > 1e-3
    assert float((layer(x, rotation=rotation) - layer(x)).abs().max().detach()) == 0
    mine, theirs = (torch.autograd.grad(y.square().sum(), x)[0] for y in (layer(x), expected))
    assert float((mine - theirs).abs().max()) <= 1e-11


@pytest.mark.parametrize("words", [{"dim": 5}, {"dim": 0}, {"dim": 4, "base": -1.0}, {"dim": 4, "layout": "thirds"}])
def test_what_cannot_turn_is_refused_with_a_reason(words):
    with pytest.raises(ConfigError, match="rotary embedding cannot be built") as caught:
        Rotary(**words)
    assert caught.value.asked
    assert caught.value.because
    assert caught.value.instead
