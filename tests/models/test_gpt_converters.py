"""GPT-2 and LLaMA of Hugging Face, in both directions: folders, names, values, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from twins import transformers

from regard.downloads import find
from regard.errors import CheckpointError, ConfigError
from regard.models import Bert, DaViT, ViT
from regard.models.gpt import GPT, GPTConfig
from regard.models.io import gguf as gguf_file
from regard.models.io import llama2c, read_checkpoint, write_folder
from regard.models.load_state import build_from_state

VOCABULARY, CONTEXT = 53, 29
TOKENS = torch.arange(2 * 17).reshape(2, 17) * 7 % VOCABULARY

LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 5e4,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 20,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": CONTEXT,
    "n_inner": 31,
    "bos_token_id": None,
    "eos_token_id": None,
}
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2, untied, exact gelu": ("GPT2", GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu"}),
    "llama, grouped": ("Llama", LLAMA),
    "llama, tied": ("Llama", LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama, with biases": ("Llama", LLAMA | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
}


def twin(name: str) -> Any:
    """Their model, with every number random: biases and norms too, which begin at 0 and 1."""
    hugging = transformers()
    family, config = TWINS[name]
    torch.manual_seed(11)
    head = "GPT2LMHeadModel" if family == "GPT2" else "LlamaForCausalLM"
    model = getattr(hugging, head)(getattr(hugging, f"{family}Config")(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 5)
    return model


def bound(reference: torch.Tensor, coarsest: torch.dtype) -> float:
    """Three layers of sums of at most 37 terms, each rounded."""
    return 3 * 37 * torch.finfo(coarsest).eps * float(reference.detach().abs().max())


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_their_folder_becomes_our_model_with_the_same_logits(tmp_path: Path, name: str, dtype: torch.dtype):
    theirs = twin(name).to(dtype)
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path)
    expected = theirs(TOKENS).logits
    found = ours(TOKENS)
    assert found.dtype == dtype
    # their LLaMA computes norms and angles in float32 whatever its dtype
    coarsest = dtype if name.startswith("gpt2") else torch.float32
    assert (found - expected).abs().max() <= bound(expected, coarsest)


@pytest.mark.parametrize("name", TWINS)
def test_our_folder_becomes_their_model_bit_for_bit(tmp_path: Path, name: str):
    theirs = twin(name)
    ours = GPT.from_checkpoint(theirs.config.to_dict(), theirs.state_dict())
    ours.save_pretrained(tmp_path, layout="huggingface")
    again = type(theirs).from_pretrained(tmp_path)
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    assert torch.equal(again(TOKENS).logits, theirs(TOKENS).logits)
    # and back to ours
    back = GPT.from_pretrained(tmp_path)
    assert back.config == ours.config
    assert torch.equal(back(TOKENS), ours(TOKENS))


def test_a_gpt2_without_head_and_with_old_masks_is_read():
    theirs = twin("gpt2")
    state = {name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()}
    del state["lm_head.weight"]
    state |= {f"h.{layer}.attn.bias": torch.ones(1, 1, CONTEXT, CONTEXT).tril() for layer in range(3)}
    state |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(3)}
    ours = GPT.from_checkpoint(theirs.config.to_dict(), state)
    assert torch.equal(ours(TOKENS), GPT.from_checkpoint(theirs.config.to_dict(), theirs.state_dict())(TOKENS))


@pytest.mark.parametrize("broken", ["model.layers.1.self_attn.k_proj.weight", "model.layers.2.mlp.up_proj.weight"])
def test_a_missing_part_of_a_joined_matrix_is_named(broken: str):
    theirs = twin("llama, grouped")
    state = {name: tensor for name, tensor in theirs.state_dict().items() if name != broken}
    with pytest.raises(CheckpointError) as caught:
        GPT.from_checkpoint(theirs.config.to_dict(), state)
    layer = broken.split(".")[2]
    assert f"missing: blocks.{layer}." in caught.value.found
    assert f"extra: model.layers.{layer}." in caught.value.found


def test_misshapen_and_unknown_tensors_are_named():
    theirs = twin("llama, grouped")
    state = dict(theirs.state_dict()) | {"model.surprise": torch.zeros(3)}
    state["model.layers.0.mlp.down_proj.weight"] = torch.zeros(24, 38)
    with pytest.raises(CheckpointError) as caught:
        GPT.from_checkpoint(theirs.config.to_dict(), state)
    assert "extra: model.surprise (3,)" in caught.value.found
    assert "misshapen: blocks.0.feed_forward.outer.weight (24, 38), not (24, 37)" in caught.value.found


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"hidden_act": "tanh"}),
        ("llama", {"sliding_window": 7}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}),
        ("llama", {"hidden_size": None}),
        ("gpt2", {"activation_function": "tanh"}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"add_cross_attention": True}),
        ("gpt2", {"n_head": None}),
    ],
)
def test_what_would_change_the_result_is_refused_and_named(kind: str, changes: dict[str, Any]):
    config = {"model_type": kind, **(LLAMA if kind == "llama" else GPT2), **changes}
    with pytest.raises(ConfigError) as caught:
        GPT.from_checkpoint(config, {})
    name = next(iter(changes))
    assert ("rope_type" if name.startswith("rope") else name) in str(caught.value)


def test_what_changes_nothing_is_ignored():
    theirs = twin("llama, grouped")
    config = theirs.config.to_dict() | {"torch_dtype": "float16", "use_cache": False, "pretraining_tp": 1}
    model, plain = (GPT.from_checkpoint(c, theirs.state_dict()) for c in (config, theirs.config.to_dict()))
    assert model.config == plain.config
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "alibi"},
        {"window": 3},
        {"norm": "rms"},
        {"kv_heads": 2},
        {"feed_forward": "swiglu"},
        {"bias": False},
    ],
)
def test_a_configuration_that_neither_has_is_not_written(tmp_path: Path, changes: dict[str, Any]):
    model = GPT(
        GPTConfig.from_dict({"vocab_size": 7, "context_length": 5, "dim": 12, "layers": 1, "heads": 6} | changes)
    )
    with pytest.raises(CheckpointError) as caught:
        model.save_pretrained(tmp_path, layout="huggingface")
    name, value = next(iter(changes.items()))
    assert f"{name}={value!r}" in caught.value.because
    assert not list(tmp_path.iterdir())


# Real weights


def real(name: str) -> Path:
    path = find(name)
    if path is None:
        pytest.skip(f"the weights of {name} are not installed")
    return path


def as_transformers(path: Path, folder: Path) -> Any:
    """The checkpoint as their model; the tensors themselves are held against theirs elsewhere."""
    config, state = read_checkpoint(path)
    write_folder(folder, config, state)
    return transformers().LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_stories15m_has_the_published_logits_and_writes_text(tmp_path: Path):
    path = real("stories15m")
    tokenizer = llama2c.read_tokenizer(path)
    ours = GPT.from_pretrained(path)
    tokens = tokenizer.encode("Once upon a time, there was a little girl named Lily. She loved to play outside")
    with torch.inference_mode():
        found = ours(torch.tensor([tokens]))
        expected = as_transformers(path, tmp_path)(torch.tensor([tokens])).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    # after the first words the rest is nearly certain to this model: it knows the language, every offset is right
    surprise = torch.nn.functional.cross_entropy(found[0, 4:-1], torch.tensor(tokens[5:]))
    assert surprise < 1.0


@pytest.mark.slow  # half a gigabyte of numbers, on both sides
def test_smollm2_has_the_published_logits_and_completes_a_capital(tmp_path: Path):
    path = real("smollm2")
    tokenizer = gguf_file.read_tokenizer(path)
    ours = GPT.from_pretrained(path)
    tokens = torch.tensor([tokenizer.encode("The capital of France is").ids])
    with torch.inference_mode():
        found = ours(tokens)
        expected = as_transformers(path, tmp_path)(tokens).logits
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert tokenizer.decode([int(found[0, -1].argmax())]) == " Paris"


def test_the_configurations_of_real_files_are_llamas(tmp_path: Path):
    path = real("stories15m")
    GPT.from_pretrained(path).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "regard.gpt"
    assert GPTConfig.from_dict({name: saved[name] for name in saved if name != "model_type"}) == GPTConfig.llama(
        vocab_size=32000, context_length=256, dim=288, layers=6, heads=6, kv_heads=6, hidden_dim=768
    )


@pytest.mark.parametrize(
    ("model", "config", "layout"),
    [
        (GPT, {"model_type": "bert"}, "huggingface"),
        (GPT, {"model_type": "llama", "hidden_size": "8", "num_attention_heads": []}, "huggingface"),
        (GPT, {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 0, "vocab_size": 3}, "huggingface"),
        (ViT, {"model_type": "vit", "image_size": None}, "huggingface"),
        (ViT, {}, "timm"),
        (DaViT, {}, "timm"),
        (Bert, {"model_type": "bert", "hidden_size": 8, "type_vocab_size": 2, "architectures": 7}, "huggingface"),
    ],
    ids=str,
)
def test_a_foreign_configuration_that_makes_no_sense_is_refused_in_four_parts(model, config, layout):
    with pytest.raises(ConfigError):
        model.from_checkpoint(config, {}, layout)


def test_more_layers_than_tensors_are_not_even_built():
    with pytest.raises(CheckpointError, match="more layers than tensors"):
        build_from_state(
            GPT, GPTConfig(vocab_size=3, dim=4, heads=1, layers=10**9), {"x": torch.zeros(1)}, None, "a file"
        )
