"""Models of transformers, traced: tiny ones against torch's counter on real runs with eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cost_model.counting import in_input_sizes
from torch.utils.flop_counter import FlopCounterMode
from twins import transformers

from regard import cost
from regard.cost_model.quantity import Quantity
from regard.cost_model.symbols import size_symbol
from regard.errors import CostError

B, N, T = size_symbol("B"), size_symbol("N"), size_symbol("T")
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}


def built(kind: str, attention: str = "eager") -> Any:
    hugging = transformers()
    common: dict[str, Any] = {**SIZES, "attn_implementation": attention}
    torch.manual_seed(0)
    if kind == "bert":
        return hugging.BertModel(hugging.BertConfig(vocab_size=50, **common))
    if kind == "gpt2":
        config = hugging.GPT2Config(
            n_embd=24, n_layer=2, n_head=4, n_positions=32, vocab_size=50, attn_implementation=attention
        )
        return hugging.GPT2LMHeadModel(config)
    if kind == "llama":
        return hugging.LlamaForCausalLM(hugging.LlamaConfig(vocab_size=50, num_key_value_heads=2, **common))
    if kind == "t5":
        config = hugging.T5Config(
            d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4, vocab_size=50, attn_implementation=attention
        )
        return hugging.T5ForConditionalGeneration(config)
    return hugging.ViTModel(hugging.ViTConfig(image_size=16, patch_size=4, **common))


def real_inputs(kind: str) -> dict[str, Any]:
    ids = torch.zeros(2, 11, dtype=torch.long)
    if kind == "vit":
        return {"pixel_values": torch.zeros(2, 3, 16, 16)}
    if kind == "t5":
        return {"input_ids": torch.zeros(2, 7, dtype=torch.long), "decoder_input_ids": ids, "use_cache": False}
    return {"input_ids": ids} | ({} if kind == "bert" else {"use_cache": False})


def make_sizes(kind: str) -> dict[str, int]:
    sizes = {"batch": 2} if kind == "vit" else {"batch": 2, "tokens": 11}
    return sizes | ({"context_tokens": 7} if kind == "t5" else {})


def counted(model: Any, inputs: dict[str, Any], back: bool) -> int:
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(back):
        output = model(**inputs)
        if back:
            sum(each.sum() for each in output.values() if isinstance(each, torch.Tensor)).backward()
    return counter.get_total_flops() // 2


# What two layers multiply: D = 24, F = 40, attention over 24 channels; what is before and behind them.
LAYER = 4 * 24 * 24 + 2 * 24 * 40
FORMULAS = {
    "bert": 2 * B * (N * LAYER + 2 * 24 * N**2) + B * 24 * 24,
    "gpt2": 2 * B * (N * (4 * 24 * 24 + 2 * 24 * 96) + 2 * 24 * N**2) + B * N * 24 * 50,
    "llama": 2 * B * (N * (3 * 24 * 24 + 3 * 24 * 40) + 2 * 24 * N**2) + B * N * 24 * 50,
    "t5": 2 * B * (T * LAYER + 2 * 24 * T**2)
    + 2 * B * (N * (LAYER + 2 * 24 * 24) + T * 2 * 24 * 24 + 2 * 24 * (N**2 + N * T))
    + B * N * 24 * 50,
    "vit": B * 16 * 3 * 16 * 24 + 2 * B * (17 * LAYER + 2 * 24 * 17**2) + B * 24 * 24,
}


# BERT and GPT-2 are held to their derivations in other sizes elsewhere.
@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("vit", "bert", "gpt2", "t5"))]
)
def test_products_are_those_of_the_derivation_and_of_a_real_run(kind: str) -> None:
    model = built(kind)
    found = cost(model, step="training", **make_sizes(kind))
    forward = sum((part.forward.macs for part in found.parts), 0 * B)
    assert (in_input_sizes(Quantity(forward, found.values)) - FORMULAS[kind]).expand() == 0
    assert forward.subs(found.values) == counted(model, real_inputs(kind), back=False)
    assert found.macs == counted(model.eval(), real_inputs(kind), back=True)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
def test_fused_attention_counts_as_written_out() -> None:
    eager, fused = (cost(built("bert", how), step="training", **make_sizes("bert")) for how in ("eager", "sdpa"))
    assert (eager.macs.formula - fused.macs.formula).expand() == 0
    assert eager.pairs == fused.pairs == 2 * 2 * 4 * 11 * 11
    assert eager.exponentials == fused.exponentials


@pytest.mark.slow
def test_an_encoder_and_a_decoder_have_two_lengths() -> None:
    found = cost(built("t5"), **make_sizes("t5"))
    assert (in_input_sizes(found.macs) - FORMULAS["t5"]).expand() == 0


def test_a_tied_matrix_is_one_matrix() -> None:
    model = built("gpt2")
    found = cost(model, tokens=5)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert "transformer.h.*.attn.c_attn" in found.by_part()
    assert set(found.by_part(levels=1)) >= {"transformer", "lm_head"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_decoding_reads_one_token_after_those_in_the_cache(kind: str) -> None:
    model = built(kind).eval()
    found = cost(model, batch=2, tokens=11, step="decode")
    with torch.no_grad():
        past = model(torch.zeros(2, 11, dtype=torch.long), use_cache=True).past_key_values
    inputs = {"input_ids": torch.zeros(2, 1, dtype=torch.long), "past_key_values": past, "use_cache": True}
    assert found.macs == counted(model, inputs, back=False)
    per_token = FORMULAS[kind].expand().coeff(N, 1)
    assert (in_input_sizes(found.macs) - (per_token + 2 * B * 2 * 24 * (N + 1))).expand() == 0


def test_an_encoder_has_nothing_to_decode_with() -> None:
    with pytest.raises(CostError, match="no cache to decode with"):
        cost(built("bert"), tokens=5, step="decode")


@pytest.mark.slow
def test_the_longest_text_has_letters_and_a_longer_one_a_remark() -> None:
    model = built("gpt2")
    longest = cost(model, batch=2, tokens=32)
    assert in_input_sizes(longest.macs).free_symbols == {B, N}
    assert not longest.notes
    longer = cost(model, batch=2, tokens=33)
    assert longer.notes == ("tokens = 33 is more than the 32 it is made for",)
    assert (in_input_sizes(longer.macs) - in_input_sizes(longest.macs)).expand() == 0
