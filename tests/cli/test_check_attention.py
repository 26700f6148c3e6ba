"""`regard check --attn`: a model of Hugging Face with another attention."""

from __future__ import annotations

import pytest

import regard
from regard.cli import main

pytest.importorskip("transformers", reason="the twins are not installed")
import regard.integrations.transformers
from regard.adapters.huggingface_tiny import tiny


@pytest.mark.parametrize("law", ["causality", "padding", "cache"])
def test_a_llama_with_our_attention_keeps_the_laws(law, capsys):
    target = "transformers:LlamaForCausalLM"
    assert main(["check", target, "--attn", "regard", "--law", law, "--fast"]) == 0, capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertModel", "MistralForCausalLM"])
def test_our_attention_keeps_every_law_that_eager_attention_keeps(name):
    eager, ours = (regard.check(tiny(name, attention=attention), kind="model") for attention in ("eager", "regard"))
    broken = {verdict.law for verdict in ours.failed} - {verdict.law for verdict in eager.failed}
    assert not broken, ours
    assert {verdict.law for verdict in ours.verdicts} == {verdict.law for verdict in eager.verdicts}


def test_an_unknown_attention_is_named(capsys):
    assert main(["check", "transformers:LlamaForCausalLM", "--attn", "none such", "--fast"]) == 2
    assert "--attn none such" in capsys.readouterr().err
