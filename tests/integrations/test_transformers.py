"""`attn_implementation="regard"` in models of Hugging Face gives what eager attention gives."""

from __future__ import annotations

import copy

import pytest
import torch
from architectures import KeepFloat64, check_architecture, count_calls, list_architectures

pytest.importorskip("transformers", reason="the twins are not installed")
import regard.integrations.transformers as ours
from regard.adapters.huggingface_tiny import quiet, tiny
from regard.errors import InputError
from regard.integrations.pattern_mask import PatternMask

FEW = ("bert", "gemma2", "gpt_oss", "llama4", "mistral", "t5", "vit")
ALL = list_architectures()


def make_pair(name: str, **fields):
    eager = tiny(name, attention="eager", **fields).double()
    model = copy.deepcopy(eager)
    model.set_attn_implementation("regard")
    return eager, model


def make_ids(rows: int = 2, tokens: int = 13) -> torch.Tensor:
    return torch.randint(3, 80, (rows, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("model_type", FEW)
def test_logits_gradients_and_tokens_equal_those_of_eager(model_type):
    outcome = check_architecture(model_type, ALL[model_type])
    assert outcome.status == "equal", outcome


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(set(ALL) - set(FEW)))
def test_no_architecture_is_silently_wrong(model_type):
    outcome = check_architecture(model_type, ALL[model_type])
    if outcome.status in ("not built", "own attention"):
        pytest.skip(f"{outcome.status}: {outcome.reason}")
    assert outcome.status in ("equal", "refused"), outcome


def test_the_comparison_sees_a_mask_that_is_lost(monkeypatch):
    monkeypatch.setattr(ours, "make_pattern_mask", lambda *args, **kwargs: None)
    ours.register()
    try:
        assert check_architecture("bert", ALL["bert"]).status == "differs"
    finally:
        monkeypatch.undo()
        ours.register()


def test_layers_get_a_pattern_and_no_square():
    _, model = make_pair("MistralForCausalLM")
    seen = []
    attend = ours.attend_in_model

    def record(module, query, key, value, mask, **rest):
        seen.append(mask)
        return attend(module, query, key, value, mask, **rest)

    import transformers

    transformers.AttentionInterface.register("regard", record)
    try:
        model(make_ids(), attention_mask=torch.ones(2, 13, dtype=torch.long))
    finally:
        ours.register()
    assert all(isinstance(mask, PatternMask) and mask._dense is None for mask in seen)
    assert repr(seen[0].pattern) == "Window(4, 0)"


@pytest.mark.parametrize("name", ["BertModel", "Gemma2ForCausalLM", "T5ForConditionalGeneration"])
def test_output_attentions_returns_the_weights_of_eager(name):
    eager, model = make_pair(name)
    more = {"decoder_input_ids": make_ids(2, 5)} if name.startswith("T5") else {}
    with KeepFloat64(), torch.no_grad():
        expected, actual = (m(make_ids(), output_attentions=True, **more) for m in (eager, model))
    for field in ("attentions", "decoder_attentions", "cross_attentions"):
        for left, right in zip(expected.get(field) or (), actual.get(field) or (), strict=True):
            torch.testing.assert_close(right, left, rtol=0, atol=1e-12)
    assert any(actual.get(field) for field in ("attentions", "decoder_attentions"))


def test_gradient_checkpointing_changes_no_gradient():
    eager, model = make_pair("LlamaForCausalLM")
    model.gradient_checkpointing_enable()
    model.train()
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, :4] = 0
    for m in (eager, model):
        with KeepFloat64():
            m(make_ids(), attention_mask=mask, use_cache=False)[0][mask.bool()].square().sum().backward()
    for left, right in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(right.grad, left.grad, rtol=1e-9, atol=1e-9)


def test_dropout_drops_weights_while_training_alone():
    _, model = make_pair("BertModel", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    still = model(make_ids())[0]
    model.train()
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(model(make_ids())[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])
    assert not torch.allclose(outputs[0], still)
    assert torch.equal(model.eval()(make_ids())[0], still)


def test_a_dense_mask_of_the_user_is_used_as_it_is():
    eager, model = make_pair("LlamaForCausalLM")
    visible = torch.rand(2, 1, 13, 13, generator=torch.Generator().manual_seed(3)) < 0.5
    visible |= torch.eye(13, dtype=torch.bool)
    scores = torch.zeros(2, 1, 13, 13, dtype=torch.float64).masked_fill(~visible, torch.finfo(torch.float64).min)
    soft = torch.randn(2, 1, 13, 13, dtype=torch.float64)
    with KeepFloat64(), torch.no_grad():
        for mask in (scores, soft):
            torch.testing.assert_close(
                model(make_ids(), attention_mask=mask)[0],
                eager(make_ids(), attention_mask=mask)[0],
                rtol=0,
                atol=1e-12,
            )
        expected = eager(make_ids(), attention_mask=scores)[0]
        torch.testing.assert_close(model(make_ids(), attention_mask=visible)[0], expected, rtol=0, atol=1e-12)


def test_packed_documents_do_not_see_each_other():
    eager, model = make_pair("LlamaForCausalLM")
    ids = make_ids(1, 12)
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    with KeepFloat64(), torch.no_grad():
        expected, actual = (m(ids, position_ids=places, use_cache=False)[0] for m in (eager, model))
        alone = model(ids[:, 5:8], use_cache=False)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(actual[:, 5:8], alone, rtol=0, atol=1e-6)  # rotary tables are float32


def test_torch_compile_gives_the_same_logits():
    eager, model = make_pair("LlamaForCausalLM")
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, :4] = 0
    compiled = torch.compile(model, backend="eager")
    with KeepFloat64():
        expected = eager(make_ids(), attention_mask=mask)[0]
    with torch.no_grad():
        actual = compiled(make_ids(), attention_mask=mask)[0]
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)


def test_an_option_without_meaning_here_names_the_layer():
    _, model = make_pair("LlamaForCausalLM")
    with pytest.raises(InputError, match="LlamaAttention with head_mask"):
        model(make_ids(), head_mask=torch.ones(4))


def test_a_library_without_the_table_is_named(monkeypatch):
    class Old:
        __version__ = "4.40.0"

    monkeypatch.setattr(ours.importlib, "import_module", lambda name: Old)
    with pytest.raises(InputError, match=r"4\.40\.0 has no table of attentions and masks"):
        ours.register()


def test_the_attention_is_called_once_for_each_layer():
    _, model = make_pair("GPT2LMHeadModel")
    with count_calls() as calls, quiet():
        model(make_ids())
    assert calls == ["GPT2Attention"] * 2
