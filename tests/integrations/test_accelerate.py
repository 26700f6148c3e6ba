"""`regard.accelerate`: the same outputs, by our kernels; a change beyond the bound is undone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import regard
from regard import Window
from regard.errors import InputError
from regard.kernels.library import missing

transformers = pytest.importorskip("transformers", reason="the twins are not installed")
from regard.adapters.huggingface_tiny import quiet, tiny  # noqa: E402

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no kernels: {missing()}")


GREEDY = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


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


def test_weights_that_change_afterwards_are_not_overlooked():
    model, ids = make_llama(), torch.randint(3, 80, (2, 13))
    mask = torch.ones_like(ids)
    regard.accelerate(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    with quiet(), pytest.warns(UserWarning, match="changed after"):
        changed = write(model, ids, mask, eos_token_id=None)
    assert torch.equal(changed, type(model).generate(model, ids, **GREEDY, attention_mask=mask))
    assert torch.equal(
        write(twin, ids, mask, eos_token_id=None), type(model).generate(twin, ids, **GREEDY, attention_mask=mask)
    )
    assert torch.equal(write(pickle.loads(pickle.dumps(twin)), ids, mask), write(twin, ids, mask))


def test_generate_of_a_model_with_another_pattern_has_that_pattern():
    model, ids = make_llama(), torch.randint(3, 80, (2, 13))
    mask = torch.ones_like(ids)
    with regard.use(model, pattern=Window(2, 0)):
        expected = write(model, ids, mask)
        report = regard.accelerate(model)
        assert torch.equal(write(model, ids, mask), expected)
        report.restore()
    plain = write(model, ids, mask)
    regard.accelerate(model)
    with regard.use(model, pattern=Window(2, 0)):
        assert torch.equal(write(model, ids, mask), expected)
    assert torch.equal(write(model, ids, mask), plain)
    assert not torch.equal(plain, expected)


@pytest.mark.parametrize(
    "hidden", [(slice(0, 1), slice(9, 13)), (slice(1, 2), slice(4, 7)), (slice(0, 2), slice(0, 13))]
)
def test_masks_that_are_no_left_padding_and_texts_beyond_the_context_are_the_models_own(hidden):
    model, ids = make_llama(), torch.randint(3, 80, (2, 13))
    mask = torch.ones_like(ids)
    mask[hidden] = 0
    with quiet():
        expected = type(model).generate(model, ids, attention_mask=mask, **GREEDY)
        long = type(model).generate(model, ids, **GREEDY | {"max_new_tokens": 150})
        regard.accelerate(model)
        assert torch.equal(model.generate(ids, attention_mask=mask, **GREEDY), expected)
        assert torch.equal(model.generate(ids, **GREEDY | {"max_new_tokens": 150}), long)


@pytest.mark.parametrize("order", ["first", "last"])
def test_accelerated_twice_and_undone_in_any_order(order):
    model, ids = make_llama(), torch.randint(3, 80, (2, 13))
    with torch.no_grad():
        before = model(ids)[0]
        reports = [regard.accelerate(model), regard.accelerate(model, "int8")]
        for report in reports if order == "first" else reversed(reports):
            report.restore()
        assert torch.equal(model(ids)[0], before)
    assert model.config._attn_implementation == "sdpa"
    assert not any(type(module).__module__.startswith("regard") for module in model.modules())
    assert not {"generate", "save_pretrained"} & set(model.__dict__)


def test_tied_weights_are_tied_again():
    model = tiny("GPT2LMHeadModel", attention="sdpa", vocab_size=2003)
    assert model.lm_head.weight is model.transformer.wte.weight
    ids = torch.randint(3, 80, (2, 13))
    before = model(ids)[0]
    report = regard.accelerate(model, "int8")
    assert report.difference > 1e-4  # of the rounded decoder, which alone is rounded here
    report.restore()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.equal(model(ids)[0], before)


def test_every_module_keeps_its_mode():
    model = make_llama().train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    report = regard.accelerate(model, training=True)
    assert [module.training for module in model.modules()] == modes
    report.restore()
    assert [module.training for module in model.modules()] == modes


def test_rounded_weights_are_not_saved_and_take_no_gradients(tmp_path):
    model, ids = make_llama(), torch.randint(3, 80, (2, 13))
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    report = regard.accelerate(model, "int8")
    assert not model(ids)[0].requires_grad
    with pytest.raises(InputError, match="rounded weights is not saved"):
        model.save_pretrained(tmp_path)
    report.restore()
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    model.save_pretrained(tmp_path)


def test_an_example_that_does_not_run_is_explained():
    model = make_llama()
    for example in ({"words": torch.zeros(2, 3)}, torch.randn(2, 3), [1, 2]):
        with pytest.raises(InputError, match="does not run on these inputs"):
            regard.accelerate(model, example=example)
    assert model.config._attn_implementation == "sdpa"


def test_a_module_of_torch_alone():
    layers = (torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 509))
    model, x = torch.nn.Sequential(*layers), torch.randn(3, 512)
    with torch.no_grad():
        before = model(x)
        report = regard.accelerate(model, example=x)
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
        assert torch.equal(report.restore()(x), before)


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
