"""`regard.accelerate`: the same outputs, by our kernels; a change beyond the bound is undone."""

from __future__ import annotations

import pytest
import torch

import regard
from regard.errors import InputError
from regard.kernels.library import missing

transformers = pytest.importorskip("transformers", reason="the twins are not installed")
from regard.adapters.huggingface_tiny import quiet, tiny  # noqa: E402

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no kernels: {missing()}")


def make_llama():
    sizes = {"hidden_size": 256, "intermediate_size": 352, "head_dim": 64}
    return tiny("LlamaForCausalLM", attention="sdpa", **sizes)


def write(model, ids, mask, **options):
    with quiet():
        return model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_generate_writes_the_same_tokens(name):
    model = make_llama() if name.startswith("Llama") else tiny(name, attention="sdpa")
    ids = torch.randint(3, 80, (2, 13), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    expected = write(model, ids, mask, eos_token_id=None)
    early = write(model, ids, mask, eos_token_id=int(expected[0, 15]))
    report = regard.accelerate(model)
    assert torch.equal(write(model, ids, mask, eos_token_id=None), expected)
    assert torch.equal(write(model, ids, mask, eos_token_id=int(expected[0, 15])), early)
    assert write(model, ids, mask, num_beams=2, eos_token_id=None).shape == expected.shape  # the model's own
    assert "regard.models.GPT" in str(report)
    assert report.difference < 1e-5


@pytest.mark.parametrize("weights", ["float32", "bf16", "int8"])
def test_outputs_stay_within_the_bound_and_come_back_bit_by_bit(weights):
    model = make_llama()
    ids = torch.randint(3, 80, (2, 13), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before, state = model(ids)[0], {name: tensor.clone() for name, tensor in model.state_dict().items()}
        report = regard.accelerate(model, weights)
        assert 0 < report.difference <= report.bound
        assert any(type(module).__module__.startswith("regard") for module in model.modules())
        report.restore()
        assert torch.equal(model(ids)[0], before)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(type(module).__module__.startswith("regard") for module in model.modules())
    assert "generate" not in model.__dict__


def test_a_difference_beyond_the_bound_is_refused_and_undone(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules["regard.integrations.accelerate"].BOUNDS, "int8", 1e-9)
    model = make_llama()
    with pytest.raises(InputError, match="changed too much"):
        regard.accelerate(model, "int8")
    assert model.config._attn_implementation == "sdpa"
    assert not any(type(module).__module__.startswith("regard") for module in model.modules())


def test_training_keeps_gradients():
    model, ids = make_llama(), torch.randint(3, 80, (2, 13))
    model(ids)[0].square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    regard.accelerate(model, training=True)
    model(ids)[0].square().sum().backward()
    for grad, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()))


def test_a_vision_transformer_of_timm():
    timm = pytest.importorskip("timm", reason="the twins are not installed")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(images)
        report = regard.accelerate(model)
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(report.restore()(images), expected)


def test_what_cannot_be_accelerated_is_said():
    with pytest.raises(InputError, match="No inputs are known"):
        regard.accelerate(torch.nn.Linear(3, 3))
    with pytest.raises(InputError, match="There are no such weights"):
        regard.accelerate(make_llama(), "int3")
    with pytest.raises(InputError, match="for the CPU and float32"):
        regard.accelerate(make_llama().double())
