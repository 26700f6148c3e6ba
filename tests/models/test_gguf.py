"""GGUF files, made here by the writer of the format's own package, and a real one."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from twins import library, transformers

from regard.downloads import find
from regard.errors import CheckpointError
from regard.models.io import read_checkpoint
from regard.models.io.gguf import read_gguf, read_tokenizer
from regard.models.io.gguf_header import read_header
from regard.models.io.rotary_rows import halves_from_pairs, pairs_from_halves

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

# Rows of quantised tensors are a multiple of 32, the size of a block; the other sizes differ from each other.
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCABULARY, CONTEXT = 3, 4, 2, 24, 64, 37, 29
DIM = HEADS * HEAD_DIM
TYPES = {
    "ffn_up": "Q4_1",
    "attn_q": "Q4_0",
    "attn_k": "Q8_0",
    "token_embd": "Q8_0",
    "attn_v": "F16",
    "ffn_down": "BF16",
}
VALUES: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": CONTEXT,
    "llama.embedding_length": DIM,
    "llama.feed_forward_length": HIDDEN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.vocab_size": VOCABULARY,
}
SHAPES = {
    "attn_norm": (DIM,),
    "attn_q": (DIM, DIM),
    "attn_k": (KV_HEADS * HEAD_DIM, DIM),
    "attn_v": (KV_HEADS * HEAD_DIM, DIM),
    "attn_output": (DIM, DIM),
    "ffn_norm": (DIM,),
    "ffn_gate": (HIDDEN, DIM),
    "ffn_up": (HIDDEN, DIM),
    "ffn_down": (DIM, HIDDEN),
}


def shapes(tied: bool = True) -> dict[str, tuple[int, ...]]:
    outside = {"token_embd": (VOCABULARY, DIM), "output_norm": (DIM,)} | ({} if tied else {"output": (VOCABULARY, DIM)})
    inside = {f"blk.{layer}.{part}": shape for layer in range(LAYERS) for part, shape in SHAPES.items()}
    return {f"{name}.weight": shape for name, shape in (outside | inside).items()}


def write(path: Path, *, tied: bool = True, architecture: str = "llama", **more: Any) -> dict[str, np.ndarray]:
    """A LLaMA with random numbers; the answer is what the quantised numbers mean."""
    random = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 50000.0)
    writer.add_array("an.array.of.floats", [0.5, 2.0])
    writer.add_bool("a.flag", True)
    for key, value in (VALUES | more).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    meaning = {}
    for name, shape in shapes(tied).items():
        numbers = random.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType[next((TYPES[part] for part in TYPES if f"{part}." in name), "F32")]
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, numbers)
            meaning[name] = numbers
            continue
        stored = gguf.quantize(numbers, kind)
        meaning[name] = gguf.dequantize(stored, kind)
        writer.add_tensor(name, stored, raw_dtype=None if kind == gguf.GGMLQuantizationType.F16 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meaning


def test_rows_in_pairs_become_halves_and_pairs_again():
    weight = torch.randn(3 * 10, 7)
    halves = halves_from_pairs(weight, heads=3)
    for head, plane in ((0, 0), (1, 3), (2, 4)):
        assert torch.equal(halves[head * 10 + plane], weight[head * 10 + 2 * plane])
        assert torch.equal(halves[head * 10 + 5 + plane], weight[head * 10 + 2 * plane + 1])
    assert torch.equal(pairs_from_halves(halves, heads=3), weight)
    with pytest.raises(CheckpointError, match="30 rows, 4 heads"):
        halves_from_pairs(weight, heads=4)


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_is_what_its_quantised_numbers_mean(tmp_path: Path, tied: bool):
    meaning = write(tmp_path / "x.gguf", tied=tied)
    config, state = read_gguf(tmp_path / "x.gguf")
    assert config["tie_word_embeddings"] == tied
    assert len(state) == len(meaning)
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.1.ffn_up.weight": "model.layers.1.mlp.up_proj.weight",
        "blk.2.ffn_down.weight": "model.layers.2.mlp.down_proj.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
    }
    for theirs, ours in names.items():
        assert np.array_equal(state[ours].numpy(), meaning[theirs]), ours
    query, key = (torch.from_numpy(meaning[f"blk.1.attn_{letter}.weight"]) for letter in "qk")
    assert torch.equal(state["model.layers.1.self_attn.q_proj.weight"], halves_from_pairs(query, HEADS))
    assert torch.equal(state["model.layers.1.self_attn.k_proj.weight"], halves_from_pairs(key, KV_HEADS))


def test_the_configuration_is_what_was_written(tmp_path: Path):
    write(tmp_path / "x.gguf", **{"tokenizer.ggml.eos_token_id": 7})
    config, _ = read_checkpoint(tmp_path / "x.gguf")
    expected = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": DIM,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,  # not the float32 nearest to it
        "rope_theta": 50000.0,
        "eos_token_id": 7,
    }
    assert expected.items() <= config.items()


def test_our_reader_finds_what_the_package_finds(tmp_path: Path):
    write(tmp_path / "x.gguf", **{"general.alignment": 64, "some.words": ["ä", "", "b c"]})
    ours, theirs = read_header(tmp_path / "x.gguf"), gguf.GGUFReader(tmp_path / "x.gguf")
    their_values = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.values == their_values
    found = [(entry.name, entry.shape, entry.kind, entry.start) for entry in ours.tensors]
    assert found == [
        (tensor.name, tuple(reversed(tensor.shape.tolist())), tensor.tensor_type, tensor.data_offset)
        for tensor in theirs.tensors
    ]


@pytest.mark.parametrize(
    ("values", "because"),
    [
        ({"architecture": "gemma"}, "only LLaMA's"),
        ({"llama.rope.dimension_count": 8}, "all channels of a head turn"),
        ({"llama.rope.scaling.type": "yarn"}, "frequencies follow the base alone"),
        ({"llama.expert_count": 8}, "one feed-forward network"),
        ({"llama.attention.head_count": [4, 4, 2]}, "same number of heads"),
        ({"llama.context_length": None}, "does not say llama.context_length"),
    ],
)
def test_a_model_that_is_not_built_here_is_refused(tmp_path: Path, values: dict[str, Any], because: str):
    write(tmp_path / "x.gguf", **values)
    with pytest.raises(CheckpointError) as caught:
        read_gguf(tmp_path / "x.gguf")
    assert because in str(caught.value)
    assert str(tmp_path / "x.gguf") in caught.value.asked


@pytest.mark.parametrize("cut", [1, 3, 11, 100, 1000, -1, -5000])
def test_a_file_cut_short_anywhere_is_refused_by_name(tmp_path: Path, cut: int):
    file = tmp_path / "x.gguf"
    write(file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"x\.gguf cannot be read"):
        read_gguf(file)


def test_an_empty_or_foreign_file_is_refused(tmp_path: Path):
    for content in (b"", b"GGML" + bytes(100), b"GGUF" + bytes([0, 0, 0, 3]) + bytes(100)):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"x\.gguf cannot be read"):
            read_gguf(tmp_path / "x.gguf")


def test_random_damage_never_ends_in_another_error(tmp_path: Path):
    file = tmp_path / "x.gguf"
    write(file)
    content = file.read_bytes()
    random = np.random.default_rng(7)
    refused = 0
    for _ in range(60):
        damaged = bytearray(content)
        for place in random.integers(0, 3000, 3):
            damaged[place] = random.integers(0, 256)
        file.write_bytes(damaged)
        try:
            read_gguf(file)
        except CheckpointError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("value", ["words", 0, 2.5, [3], float("nan")])
@pytest.mark.parametrize(
    "key",
    [
        "general.alignment",
        "llama.block_count",
        "llama.embedding_length",
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
        "llama.attention.key_length",
        "llama.feed_forward_length",
        "llama.vocab_size",
        "llama.attention.layer_norm_rms_epsilon",
        "llama.rope.freq_base",
    ],
)
def test_values_of_the_wrong_kind_are_refused_by_name(tmp_path: Path, key: str, value: Any):
    if value == 2.5 and ("eps" in key or "freq" in key):
        value = -2.5  # the other is a number such as it should be
    file = tmp_path / "x.gguf"
    file.write_bytes(values_only({"general.architecture": "llama", **VALUES, key: value}))
    with pytest.raises(CheckpointError, match=r"x\.gguf") as caught:
        read_gguf(file)
    assert caught.value.because


def test_arrays_in_arrays_without_end_are_refused(tmp_path: Path):
    nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 3000 + struct.pack("<IQ", 4, 0)
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("deep") + nested)
    with pytest.raises(CheckpointError, match="arrays would lie in arrays"):
        read_gguf(tmp_path / "x.gguf")


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words.encode())) + words.encode()


def values_only(values: dict[str, Any]) -> bytes:
    """A file without tensors, for values that the package would not write."""

    def written(value: Any) -> bytes:
        if isinstance(value, list):
            strings = isinstance(value[0], str)
            items = b"".join(text(item) if strings else struct.pack("<i", item) for item in value)
            return struct.pack("<IIQ", 9, 8 if strings else 5, len(value)) + items
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)

    pairs = b"".join(text(key) + written(value) for key, value in values.items())
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + pairs + bytes(4096)


TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("merges", ["ab"]),
        ("merges", ["a c"]),
        ("merges", ["b a"]),
        ("merges", [7]),
        ("merges", 7),
        ("tokens", 7),
        ("tokens", [7]),
        ("tokens", "ab"),
        ("token_type", [1]),
        ("token_type", ["a", "b", "c"]),
        ("pre", ["smollm"]),
    ],
)
def test_a_damaged_tokenizer_is_refused_by_name(tmp_path: Path, key: str, value: Any):
    library("tokenizers")
    file = tmp_path / "x.gguf"
    file.write_bytes(values_only(TOKENIZER))
    assert read_tokenizer(file).encode("ab").tokens == ["ab"]
    file.write_bytes(values_only(TOKENIZER | {f"tokenizer.ggml.{key}": value}))
    with pytest.raises(CheckpointError, match=r"x\.gguf"):
        read_tokenizer(file)


def test_without_the_package_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "x.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'regard\[gguf\]'"):
        read_gguf(tmp_path / "x.gguf")


# The tokenizer


def trained(digits: bool) -> Any:
    """A byte-level BPE trained here on a few words, by the package whose tokenizers people train."""
    library("tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cut = [pre_tokenizers.Digits(individual_digits=True), words]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut) if digits else words
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the lighthouse keeper's 1234 lamps, they're lit: 42 of 1234"] * 7, trainer)
    return tokenizer


TEXTS = ["the keeper's lamps", "", " ", "in 1234, they're\n\n  lit", "é ü 灯 🙂", "a<|end|>b", "\t\x00tab"]


@pytest.mark.parametrize("kind", ["gpt-2", "smollm"])
def test_the_tokenizer_in_the_file_is_the_one_that_was_put_in(tmp_path: Path, kind: str):
    import json

    original = trained(digits=kind == "smollm")
    parts = json.loads(original.to_str())["model"]
    tokens = sorted(parts["vocab"], key=parts["vocab"].__getitem__)
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token == "<|end|>" else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in parts["merges"]],
    }
    write(tmp_path / "x.gguf", **values)
    found = read_tokenizer(tmp_path / "x.gguf")
    for text in TEXTS:
        encoded = found.encode(text)
        assert encoded.ids == original.encode(text).ids, text
        assert found.decode(encoded.ids, skip_special_tokens=False) == text
    assert found.encode("a<|end|>b").ids.count(tokens.index("<|end|>")) == 1


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path):
    library("tokenizers")
    write(tmp_path / "x.gguf", **{"tokenizer.ggml.model": "llama"})
    with pytest.raises(CheckpointError, match="tokenizer of kind 'llama'"):
        read_tokenizer(tmp_path / "x.gguf")
    write(tmp_path / "y.gguf")
    with pytest.raises(CheckpointError, match=r"does not say tokenizer\.ggml\.model"):
        read_tokenizer(tmp_path / "y.gguf")


def test_without_the_text_package_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "x.gguf")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(CheckpointError, match=r"pip install 'regard\[text\]'"):
        read_tokenizer(tmp_path / "x.gguf")


# A real file


def smollm2() -> Path:
    path = find("smollm2")
    if path is None:
        pytest.skip("SmolLM2 is not here: python -m regard.downloads smollm2")
    return path


def test_the_tokenizer_of_a_real_file_gives_texts_back():
    library("tokenizers")
    tokenizer = read_tokenizer(smollm2())
    assert tokenizer.get_vocab_size() == 49152
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.encode("<|im_start|>user 12<|im_end|>").tokens == [
        "<|im_start|>",
        "user",
        "Ġ",
        "1",
        "2",
        "<|im_end|>",
    ]


@pytest.mark.slow  # a minute, nearly all of it in the other library
def test_a_real_file_means_the_same_to_transformers():
    path, hugging = smollm2(), transformers()
    reader = library("transformers.modeling_gguf_pytorch_utils")
    theirs = reader.load_gguf_checkpoint(str(path))["config"]
    config, state = read_gguf(path)
    same = {name for name in config if name in theirs and name not in ("rms_norm_eps", "architectures")}
    assert len(same) >= 10
    assert {name: config[name] for name in same} == {name: theirs[name] for name in same}
    with torch.device("meta"):
        model = hugging.LlamaForCausalLM(hugging.LlamaConfig(**config))
    expected = reader.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert expected.keys() == state.keys()
    for name, tensor in expected.items():
        assert torch.equal(torch.as_tensor(tensor), state[name]), name
