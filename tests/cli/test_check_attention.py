"""`regard check --attn`: a model of Hugging Face with another attention."""

from __future__ import annotations

import pytest

from regard.cli import main

pytest.importorskip("transformers", reason="the twins are not installed")


@pytest.mark.parametrize("law", ["causality", "padding", "cache"])
def test_a_llama_with_our_attention_keeps_the_laws(law, capsys):
    target = "transformers:LlamaForCausalLM"
    assert main(["check", target, "--attn", "regard", "--law", law, "--fast"]) == 0, capsys.readouterr()


def test_an_unknown_attention_is_named(capsys):
    assert main(["check", "transformers:LlamaForCausalLM", "--attn", "none such", "--fast"]) == 2
    assert "--attn none such" in capsys.readouterr().err
