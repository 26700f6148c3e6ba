"""Feed-forward layers: position-wise, equal to two convolutions of kernel size 1, gated as in LLaMA."""

import pytest
import torch
from torch.nn import functional
from twins import library

from regard.errors import ConfigError
from regard.layers import FeedForward
from regard.layers.feedforward import GATED, NORMS, PLAIN
from regard.models import GPTConfig

F64 = torch.float64
ACTIVATIONS = [*PLAIN, *GATED]


def random(*shape, seed=0, dtype=F64):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_the_transformers_layer_has_its_parameters():
    assert sum(p.numel() for p in FeedForward(512, 2048, "relu").parameters()) == 2_099_712
    gated = FeedForward(7, 11, "swiglu", bias=False)
    assert sum(p.numel() for p in gated.parameters()) == 3 * 7 * 11


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-14), (torch.float32, 1e-6)], ids=str)
def test_it_is_two_convolutions_of_one_pixel(dtype, tolerance):
    layer, x = FeedForward(7, 11, "relu").to(dtype), random(2, 5, 7, dtype=dtype)
    inner = functional.conv1d(x.mT, layer.inner.weight[..., None], layer.inner.bias).relu()
    expected = functional.conv1d(inner, layer.outer.weight[..., None], layer.outer.bias).mT
    assert float((layer(x) - expected).abs().max().detach()) <= tolerance


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_token_is_treated_alike_and_alone(activation):
    layer, x = FeedForward(7, 11, activation).double(), random(2, 5, 7)
    whole = layer(x)
    for token in range(5):
        assert float((layer(x[:, token]) - whole[:, token]).abs().max().detach()) <= 1e-14
    changed = x.clone()
    changed[:, 3] += 1
    moved = (layer(changed) - whole).abs().amax((0, 2)).tolist()
    assert [change > 1e-12 for change in moved] == [False, False, False, True, False]


def test_activations_are_the_published_ones():
    x = random(101).mul(3)
    cube = 0.044715 * x**3
    expected = {
        "relu": x.clamp(min=0),
        "gelu": x * 0.5 * (1 + torch.erf(x / 2**0.5)),
        "gelu_tanh": 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + cube))),
        "silu": x / (1 + torch.exp(-x)),
    }
    expected |= {"swiglu": expected["silu"], "geglu": expected["gelu"], "reglu": expected["relu"]}
    for name, bend in (PLAIN | GATED).items():
        assert float((bend(x) - expected[name]).abs().max()) <= 1e-14, name


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=str)
def test_gated_is_hugging_faces_llama(dtype):
    llama = library("transformers.models.llama.modeling_llama")
    config = library("transformers").LlamaConfig(hidden_size=10, intermediate_size=11, num_attention_heads=1)
    theirs = llama.LlamaMLP(config).to(dtype)
    ours = FeedForward(10, 11, "swiglu", bias=False).to(dtype)
    with torch.no_grad():
        ours.inner.weight.copy_(torch.cat((theirs.gate_proj.weight, theirs.up_proj.weight)))
        ours.outer.weight.copy_(theirs.down_proj.weight)
    x = random(2, 5, 10, dtype=dtype).requires_grad_()
    tolerance = 1e-13 if dtype == F64 else 32 * 2.0**-23
    assert float((ours(x) - theirs(x)).abs().max().detach()) <= tolerance
    mine, truth = (torch.autograd.grad(layer(x).square().sum(), x)[0] for layer in (ours, theirs))
    assert float((mine - truth).abs().max()) <= 4 * tolerance


def test_dropout_is_between_the_layers_and_off_in_eval():
    layer, x = FeedForward(7, 11, dropout=0.5).double(), random(3, 7)
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))


def test_norms_are_per_token_over_channels():
    x = random(2, 5, 7) * 3 + 1
    normed = NORMS["layer"](7, eps=1e-5).double()(x).detach()
    assert float(normed.mean(-1).abs().max()) <= 1e-6
    assert float((normed.var(-1, correction=0) - 1).abs().max()) <= 1e-4
    root = NORMS["rms"](7, eps=1e-6).double()(x).detach()
    assert float((root - x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()).abs().max()) <= 1e-14


def test_unknown_names_are_refused_with_a_reason():
    for build in (lambda: FeedForward(7, 11, "swish"), lambda: GPTConfig(norm="batch")):
        with pytest.raises(ConfigError, match=r"known are|norms are") as caught:
            build()
        assert caught.value.asked
        assert caught.value.instead
