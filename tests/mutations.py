"""Checkpoints of every format and seeded damage to them, so that a case can be repeated."""

from __future__ import annotations

import json
import random
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from regard.models import (
    GPT,
    Bert,
    BertConfig,
    DaViT,
    DaViTConfig,
    GPTConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)
from regard.models.pretrained import Pretrained

NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    -(10**9),
    2**31,
    2**62,
    2**63,
    10**30,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    True,
    None,
    "8",
    "",
    [],
    [8],
    {},
    {"a": 1},
)


def small_models() -> dict[str, Pretrained]:
    torch.manual_seed(3)
    sizes = {"vocab_size": 13, "context_length": 11, "dim": 8, "layers": 2, "heads": 2, "hidden_dim": 12}
    stages = {"classes": 3, "dims": (4, 8), "heads": (1, 2), "depths": (1, 1), "window": 3}
    return {
        "gpt": GPT(GPTConfig(**sizes)),
        "llama": GPT(GPTConfig.llama(**sizes, kv_heads=1, tie_embeddings=False)),
        "mistral": GPT(GPTConfig.llama(**sizes, kv_heads=1, window=3, head_dim=6, tie_embeddings=False)),
        "qwen2": GPT(GPTConfig.llama(**sizes, attention_bias="qkv", window=3, window_layers=(1,))),
        "bert": Bert(BertConfig(**sizes, masked_tokens=True)),
        "roberta": Bert(BertConfig(**sizes, segments=1, padding_token=1, masked_tokens=True)),
        "distilbert": Bert(BertConfig(**sizes, segments=0, pooler=False)),
        "vit": ViT(ViTConfig(image=(8, 8), patch=4, dim=8, layers=2, heads=2, hidden_dim=12, classes=3)),
        "davit": DaViT(DaViTConfig(**stages)),
        "transformer": Transformer(TransformerConfig(**sizes, dropout=0.0)),
    }


MODELS = small_models()
# Which model each format holds, and the layout it is saved in; the files of llama.cpp and llama2.c are made below.
FORMATS = {
    "safetensors": ("gpt", "regard"),
    "shards": ("gpt", "regard"),
    "torch": ("gpt", "regard"),
    "old torch": ("gpt", "regard"),
    "gpt2": ("gpt", "huggingface"),
    "llama": ("llama", "huggingface"),
    "mistral": ("mistral", "huggingface"),
    "qwen2": ("qwen2", "huggingface"),
    "bert": ("bert", "huggingface"),
    "roberta": ("roberta", "huggingface"),
    "distilbert": ("distilbert", "huggingface"),
    "vit": ("vit", "huggingface"),
    "timm vit": ("vit", "timm"),
    "davit": ("davit", "regard"),
    "timm davit": ("davit", "timm"),
    "transformer": ("transformer", "regard"),
    "gguf": ("llama", ""),
    "llama2c": ("llama", ""),
}


def write_checkpoint(kind: str, folder: Path) -> tuple[type[Pretrained], Path]:
    """Write a checkpoint of this format; return the class that reads it, and the path to read."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "gguf":
        path = folder / "model.gguf"
        path.write_bytes(make_gguf())
        return GPT, path
    if kind == "llama2c":
        path = folder / "model.bin"
        path.write_bytes(make_llama2c())
        return GPT, path
    name, layout = FORMATS[kind]
    model = MODELS[name]
    model.save_pretrained(folder, layout=layout, shard_bytes=700 if kind == "shards" else 1 << 30)
    if kind.endswith("torch"):
        state = dict(model.state_dict())
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "torch")
        (folder / "model.safetensors").unlink()
    return type(model), folder


def make_llama2c() -> bytes:
    dim, hidden, layers, heads, kv_heads, vocab_size, context = 8, 12, 2, 2, 1, 13, 11
    count = vocab_size * dim + layers * (2 * dim + dim * dim * 2 + dim * 4 * 2 + 3 * hidden * dim) + dim + context * 4
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(5))
    header = struct.pack("<7i", dim, hidden, layers, heads, kv_heads, vocab_size, context)
    return header + numbers.numpy().tobytes()


def make_gguf() -> bytes:
    """A LLaMA without a tokenizer, as llama.cpp lays it out: header, values, tensors, numbers."""

    def text(value: str) -> bytes:
        raw = value.encode()
        return struct.pack("<Q", len(raw)) + raw

    def entry(key: str, value: Any) -> bytes:
        if isinstance(value, str):
            return text(key) + struct.pack("<I", 8) + text(value)
        kind, form = (6, "<f") if isinstance(value, float) else (4, "<I")
        return text(key) + struct.pack("<I", kind) + struct.pack(form, value)

    values = {
        "general.architecture": "llama",
        "general.alignment": 32,
        "llama.block_count": 2,
        "llama.context_length": 11,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 12,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": 13,
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (13, 8), "output_norm.weight": (8,)}
    for layer in range(2):
        inside = {
            "attn_norm": (8,),
            "attn_q": (8, 8),
            "attn_k": (4, 8),
            "attn_v": (4, 8),
            "attn_output": (8, 8),
            "ffn_norm": (8,),
            "ffn_gate": (12, 8),
            "ffn_up": (12, 8),
            "ffn_down": (8, 12),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in inside.items()}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(values))
    head += b"".join(entry(key, value) for key, value in values.items())
    body = b""
    for name, shape in shapes.items():
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(len(body))).numpy().tobytes()
        axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += text(name) + axes + struct.pack("<IQ", 0, len(body))
        body += numbers + bytes(-len(numbers) % 32)
    return head + bytes(-len(head) % 32) + body


# Damage


def damage(rng: random.Random, kind: str, folder: Path) -> str:
    """Change one thing about a checkpoint, and say what."""
    damages: list[Callable[[random.Random, str, Path], str]] = [flip_bits, cut, grow]
    if kind not in ("gguf", "llama2c"):
        damages += [change_value] * 4 + [drop_or_add_key, break_json, nest_json, replace_tensor, replace_tensor]
        damages += [damage_index] * 3 if kind == "shards" else []
    else:
        damages += [write_number] * 4
    return rng.choice(damages)(rng, kind, folder)


def pick_file(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(file for file in folder.iterdir() if file.is_file()))


def flip_bits(rng: random.Random, kind: str, folder: Path) -> str:
    file = pick_file(rng, folder)
    content = bytearray(file.read_bytes())
    early = rng.random() < 0.7  # where headers are
    places = [rng.randrange(min(len(content), 600) if early else len(content)) for _ in range(rng.choice((1, 1, 3, 9)))]
    for place in places:
        content[place] ^= 1 << rng.randrange(8)
    file.write_bytes(bytes(content))
    return f"bits of {file.name} at {places}"


def cut(rng: random.Random, kind: str, folder: Path) -> str:
    file = pick_file(rng, folder)
    content = file.read_bytes()
    size = rng.choice((0, 1, 3, 4, 8, 9, 27, 28, 29, rng.randrange(len(content)), len(content) - 1))
    file.write_bytes(content[:size])
    return f"{file.name} cut to {size}"


def grow(rng: random.Random, kind: str, folder: Path) -> str:
    file = pick_file(rng, folder)
    content, more = file.read_bytes(), bytes(rng.randrange(256) for _ in range(rng.randrange(1, 40)))
    place = rng.choice((0, len(content) // 2, len(content)))
    file.write_bytes(content[:place] + more + content[place:])
    return f"{file.name} with {len(more)} more bytes at {place}"


def write_number(rng: random.Random, kind: str, folder: Path) -> str:
    """A count of a header that is not the one of the file."""
    file = pick_file(rng, folder)
    content = bytearray(file.read_bytes())
    wide = rng.random() < 0.5
    limit = 28 if kind == "llama2c" else min(1400, len(content) - 8)
    place = 4 * rng.randrange(limit // 4) if kind == "llama2c" else rng.randrange(limit)
    number = rng.choice((0, 1, -1, 7, 2**31 - 1, -(2**31), 2**20, 255, 65536))
    raw = struct.pack("<q", rng.choice((number, 2**63 - 1, 2**40))) if wide else struct.pack("<i", number)
    content[place : place + len(raw)] = raw
    file.write_bytes(bytes(content))
    return f"{raw.hex()} in {file.name} at {place}"


def change_value(rng: random.Random, kind: str, folder: Path) -> str:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    inside = config
    key, value = rng.choice(sorted(inside)), rng.choice(NUMBERS)
    while isinstance(inside[key], dict) and inside[key] and rng.random() < 0.7:
        inside = inside[key]
        key = rng.choice(sorted(inside))
    if isinstance(inside[key], list) and inside[key] and rng.random() < 0.7:
        value = [*inside[key][1:], value]
    inside[key] = value
    file.write_text(json.dumps(config))
    return f"{key}={value!r}"


def drop_or_add_key(rng: random.Random, kind: str, folder: Path) -> str:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    key = rng.choice(sorted(config))
    if rng.random() < 0.5:
        del config[key]
        file.write_text(json.dumps(config))
        return f"without {key}"
    text = json.dumps(config)
    twice = json.dumps({key: rng.choice(NUMBERS)})[1:-1]
    file.write_text(f"{text[:-1]}, {twice}}}")
    return f"twice: {twice}"


def break_json(rng: random.Random, kind: str, folder: Path) -> str:
    file = folder / "config.json"
    text = rng.choice(("", "[]", "3", '"x"', "null", "{", "\xff\xfe", "{} {}", "NaN", "[" * 9, "\x00" * 5))
    file.write_text(text, encoding="latin-1")
    return f"config.json is {text!r}"


def nest_json(rng: random.Random, kind: str, folder: Path) -> str:
    file, depth = folder / "config.json", rng.choice((50, 1000, 100_000))
    config = json.loads(file.read_text())
    key = rng.choice(sorted(config))
    del config[key]
    opens, closes = rng.choice((("[", "]"), ('{"a":', "}")))
    file.write_text(json.dumps(config)[:-1] + f', "{key}": {opens * depth}1{closes * depth}}}')
    return f"{key} nested {depth} deep"


def damage_index(rng: random.Random, kind: str, folder: Path) -> str:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    where = index["weight_map"]
    name = rng.choice(sorted(where))
    value = rng.choice((*NUMBERS, "../x", "config.json", "no.safetensors", "a" * 300, "x\0y", where[name]))
    how = rng.randrange(4)
    if how == 0:
        where[name] = value
    elif how == 1:
        del where[name]
    elif how == 2:
        index["weight_map"] = value
    else:
        index["metadata"] = value
    file.write_text(json.dumps(index))
    return f"index {how}: {name}={value!r}"


def odd_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """The same numbers as other kinds of tensors, and other shapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kinds of tensors that torch will drop
        rows = tensor if tensor.ndim == 2 else tensor[None]
        kinds = {
            "int64": tensor.long(),
            "uint8": tensor.to(torch.uint8),
            "bool": tensor > 0,
            "complex64": tensor.to(torch.complex64),
            "float8_e4m3fn": tensor.to(torch.float8_e4m3fn),
            "float8_e5m2": tensor.to(torch.float8_e5m2),
            "float8_e8m0fnu": tensor.to(torch.float8_e8m0fnu),
            "float16": tensor.half(),
            "bfloat16": tensor.bfloat16(),
            "float64": tensor.double(),
            "nan": tensor * float("nan"),
            "sparse": tensor.to_sparse(),
            "meta": tensor.to("meta"),
            "quantised": torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
            "nested": torch.nested.nested_tensor(list(rows.unbind())),
            "jagged": torch.nested.nested_tensor(list(rows.unbind()), layout=torch.jagged),
            "no axis": tensor.flatten()[0],
            "no numbers": tensor[:0],
            "another axis": tensor[None],
            "flat": tensor.flatten(),
            "turned": rows.T.contiguous(),
            "longer": torch.cat((tensor, tensor)),
            "repeated": tensor.flatten()[:1].expand(2**40),
        }
        return kinds | ({"csr": tensor.to_sparse_csr()} if tensor.ndim == 2 else {})


def replace_tensor(rng: random.Random, kind: str, folder: Path) -> str:
    """One tensor, or all, of another kind; or another name, or something that is no tensor."""
    model, layout = FORMATS[kind]
    state = {name: tensor.detach().clone() for name, tensor in MODELS[model].to_checkpoint(layout)[1].items()}
    name = rng.choice(sorted(state))
    torch_file = kind.endswith("torch") or rng.random() < 0.3
    kinds = odd_tensors(state[name])
    odd = rng.choice(sorted(kinds))
    content: Any = state
    what = f"{name} is {odd}"
    if odd == "repeated" and not torch_file:
        odd, what = "bool", f"{name} is bool"
    if rng.random() < 0.2 and odd not in ("repeated", "turned", "longer"):
        state |= {each: odd_tensors(tensor)[odd] for each, tensor in state.items() if odd in odd_tensors(tensor)}
        what = f"all are {odd}"
    elif rng.random() < 0.2:
        state[rng.choice(("", "x", "blocks", "blocks.99.norm", "a" * 5000, "é.weight"))] = state.pop(name)
        what = f"{name} is renamed"
    else:
        state[name] = kinds[odd]
    if torch_file:
        if rng.random() < 0.2:
            content = rng.choice(({name: 3}, {3: kinds[odd]}, [state], {"state_dict": 7}, None, {"state_dict": state}))
            what = f"a file of {type(content).__name__}"
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(content, folder / "pytorch_model.bin")
        return f"torch: {what}"
    for file in folder.glob("pytorch_model*"):
        file.unlink()
    plain = {key: tensor for key, tensor in state.items() if _is_storable(tensor)}
    save_file({key: tensor.contiguous() for key, tensor in plain.items()}, folder / "model.safetensors")
    return f"safetensors: {what}"


def _is_storable(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_meta or tensor.is_quantized)
