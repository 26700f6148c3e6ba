"""Whole models against their peers: the same weights, the same inputs, outputs compared before anything is timed."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.encoder_peers import (
    first_token_by_ctranslate2,
    hidden_by_ctranslate2,
    hidden_by_onnxruntime,
    hidden_by_transformers,
    make_encoder,
)
from benchmarks.model_contest import ModelCase
from benchmarks.timing import Run
from regard import downloads
from regard.layers.linear import use_huge_pages
from regard.models import GPT, Bert, DaViT, ViT


@cache
def library(name: str):
    """A library of others, imported quietly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def _relative_difference(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).abs().max() / theirs.abs().max())


# GPT-2, 124 million parameters: 128 tokens read, 128 written, one at a time


def gpt2() -> ModelCase:
    transformers = library("transformers")
    torch.manual_seed(0)
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    ours = GPT.from_checkpoint(peer.config.to_dict(), peer.state_dict()).eval().requires_grad_(False)
    use_huge_pages(ours)
    prompt = torch.randint(0, 50257, (1, 128), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(prompt)
    words = {"max_new_tokens": 128, "min_new_tokens": 128, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        error = _relative_difference(ours(prompt), peer(prompt).logits)

    def theirs() -> Tensor:
        with torch.inference_mode():
            return peer.generate(prompt, attention_mask=mask, **words)

    # The output matrix is the embedding, so every parameter but the positions is read once for a token.
    read = 4 * (sum(p.numel() for p in ours.parameters()) - 1024 * 768)
    same = torch.tensor(ours.generate(prompt, max_new_tokens=128).tokens[0]) == theirs()[0, 128:]
    return ModelCase(
        "GPT-2 124M, 128 read + 128 written",
        "batch 1, greedy, with cache; random weights",
        lambda: torch.tensor(ours.generate(prompt, max_new_tokens=128).tokens[0]),
        {"transformers generate": theirs},
        2.0,
        error,
        "Hugging Face",
        (128, "tokens"),
        bytes_each=read,
        notes=[f"{int(same.sum())} of 128 tokens the same"],
    )


# GPT-2 reads 512 tokens and predicts the next one


def gpt2_prefill() -> ModelCase:
    transformers = library("transformers")
    torch.manual_seed(0)
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    ours = GPT.from_checkpoint(peer.config.to_dict(), peer.state_dict()).eval().requires_grad_(False)
    use_huge_pages(ours)
    prompt = torch.randint(1, 50257, (1, 512), generator=torch.Generator().manual_seed(1))

    def read() -> Tensor:
        with torch.inference_mode():
            return ours(prompt, last_only=True)[0, -1].argmax(keepdim=True)

    def theirs() -> Tensor:
        with torch.inference_mode():
            return peer(prompt, logits_to_keep=1).logits[0, -1].argmax(keepdim=True)

    with torch.no_grad():
        error = _relative_difference(ours(prompt), peer(prompt).logits)
    absent: dict[str, str] = {}
    makers = {
        "transformers": lambda: theirs,
        "CTranslate2": lambda: first_token_by_ctranslate2(peer, prompt),
    }
    peers = _build_peers(makers, absent)
    same = [name for name, run in peers.items() if int(run()) == int(read())]  # type: ignore[arg-type]
    blocks = sum(p.numel() for p in ours.blocks.parameters() if p.dim() == 2)
    return ModelCase(
        "GPT-2 124M, prefill of 512 tokens, float32",
        "batch 1, with the arg-max of the last token; random weights",
        read,
        peers,
        1.1,
        error,
        "the better of CTranslate2 and Hugging Face",
        (512, "tokens"),
        compared="logits",
        gflop=2e-9 * (512 * blocks + 50257 * 768),
        notes=[f"the same next token: {', '.join(same)}"],
        absent=absent,
    )


# MiniLM: 256 sentences of mixed length


def sentences(count: int = 256, seed: int = 0) -> list[list[int]]:
    """Token ids of texts as long as real sentences are: 27 tokens on average, up to 128, a few very short."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.exp(torch.randn(count, generator=generator) * 0.65 + 3.1).round().long().clamp(4, 128)
    return [torch.randint(1000, 30000, (int(n),), generator=generator).tolist() for n in lengths]


def _load_minilm() -> tuple[Bert, Any, str]:
    """Ours, that of transformers, and whether their weights are real."""
    transformers = library("transformers")
    folder = downloads.find("minilm")
    if folder is None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
        peer = transformers.BertModel(transformers.BertConfig(**sizes, attn_implementation="sdpa")).eval()
        ours = Bert.from_checkpoint(peer.config.to_dict(), peer.state_dict())
    else:
        peer = transformers.BertModel.from_pretrained(folder, attn_implementation="sdpa").eval()
        ours = Bert.from_pretrained(folder)
    return ours.eval().requires_grad_(False), peer, "random weights" if folder is None else "real weights"


def minilm() -> ModelCase:
    ours, peer, weights = _load_minilm()
    texts = sentences()
    dim, tokens = ours.config.dim, sum(map(len, texts))
    theirs = {
        "transformers sdpa": lambda: hidden_by_transformers(peer),
        "CTranslate2": lambda: hidden_by_ctranslate2(peer),
        "onnxruntime": lambda: hidden_by_onnxruntime(peer),
    }
    absent: dict[str, str] = {}
    peers, groups = {}, {}
    for name, hidden in _build_peers(theirs, absent).items():
        for size in (8, 32):
            peers[f"{name}, sorted, by {size}"] = make_encoder(hidden, texts, size, dim)
            groups[f"{name}, sorted, by {size}"] = name.removesuffix(" sdpa")
    linear = sum(m.weight.numel() for m in ours.blocks.modules() if isinstance(m, nn.Linear))
    linear += sum(block.attention.projections.weight.numel() for block in ours.blocks)
    return ModelCase(
        "MiniLM-L6, 256 sentences",
        f"{tokens} tokens, {min(map(len, texts))} to {max(map(len, texts))} each; {weights}",
        lambda: ours.embed(texts),
        peers,
        {"CTranslate2": 1.15, "transformers": 1.7, "onnxruntime": None},
        _relative_difference(ours.embed(texts), peers["transformers sdpa, sorted, by 32"]()),
        "",
        (len(texts), "sentences"),
        gflop=2e-9 * linear * tokens,
        groups=groups,
        absent=absent,
    )


def minilm_int8() -> ModelCase:
    """Weights and activations in 8 bits on all sides; each side's error against float32 is a note."""
    ours, peer, weights = _load_minilm()
    texts = sentences()
    dim = ours.config.dim
    exact = ours.embed(texts)
    ours.quantize("int8")
    theirs = {
        "CTranslate2 int8": lambda: hidden_by_ctranslate2(peer, "int8"),
        "onnxruntime int8": lambda: hidden_by_onnxruntime(peer, int8=True),
    }
    absent: dict[str, str] = {}
    peers, groups = {}, {}
    for name, hidden in _build_peers(theirs, absent).items():
        for size in (8, 32):
            peers[f"{name}, by {size}"] = make_encoder(hidden, texts, size, dim)
            groups[f"{name}, by {size}"] = name
    runs = {"regard": lambda: ours.embed(texts)} | {name: run for name, run in peers.items() if name.endswith("by 32")}
    errors = {name: float((run() - exact).abs().max()) for name, run in runs.items()}
    return ModelCase(
        "MiniLM-L6, 256 sentences, int8",
        f"weights and activations in 8 bits; {weights}",
        lambda: ours.embed(texts),
        peers,
        {"CTranslate2 int8": None, "onnxruntime int8": None},
        0.0,
        "",
        (len(texts), "sentences"),
        notes=["largest error of a unit vector's numbers: " + "; ".join(f"{n} {e:.1e}" for n, e in errors.items())],
        groups=groups,
        absent=absent,
    )


def _build_peers(makers: Mapping[str, Callable[[], Any]], absent: dict[str, str]) -> dict[str, Any]:
    """The engines that run here; the others are named with the reason."""
    built = {}
    for name, make in makers.items():
        try:
            built[name] = make()
        except Exception as reason:  # an engine of others that fails must not hide the rest
            absent[name] = f"{type(reason).__name__}: {reason}"
    return built


# Images: ViT-S/16 and DaViT-tiny, forward and one step of training, batch 8


def _make_vision_case(name: str, make: Callable, architecture: str, gmac: float, train: bool) -> ModelCase:
    timm = library("timm")
    torch.manual_seed(0)
    peer = timm.create_model(architecture, num_classes=1000)
    with torch.no_grad():  # heads begin as zeros, which would make every output the same
        for module in peer.modules():
            if isinstance(module, nn.Linear) and not module.weight.any():
                nn.init.normal_(module.weight, std=0.02)
    ours = make({"architecture": architecture, "num_classes": 1000}, peer.state_dict(), "timm")
    images = torch.randn(8, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(0, 1000, (8,), generator=torch.Generator().manual_seed(2))
    peer.eval()
    ours.eval()
    with torch.no_grad():
        error = _relative_difference(ours(images), peer(images))
    runs: list[Run] = [
        _make_training_step(m, images, labels) if train else _make_forward(m, images) for m in (ours, peer)
    ]
    return ModelCase(
        f"{name}, batch 8, {'training step' if train else 'forward'}",
        "224 x 224, float32" + (", AdamW (fused)" if train else ""),
        runs[0],
        {"timm": runs[1]},
        1.15 if train else 1.25,
        error,
        "timm",
        (8, "images"),
        gflop=8 * 2 * gmac * (3 if train else 1),
    )


def _make_forward(model: nn.Module, images: Tensor) -> Run:
    def run() -> Tensor:
        with torch.inference_mode():
            return model(images)

    return run


def _make_training_step(model: nn.Module, images: Tensor, labels: Tensor) -> Run:
    model = copy.deepcopy(model).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimiser.step()
        return loss.detach()

    return run


CASES: dict[str, Callable[[], ModelCase]] = {
    "GPT-2": gpt2,
    "GPT-2 prefill": gpt2_prefill,
    "MiniLM": minilm,
    "MiniLM int8": minilm_int8,
    "ViT-S/16 forward": lambda: _make_vision_case(
        "ViT-S/16", ViT.from_checkpoint, "vit_small_patch16_224", 4.5989, False
    ),
    "ViT-S/16 training": lambda: _make_vision_case(
        "ViT-S/16", ViT.from_checkpoint, "vit_small_patch16_224", 4.5989, True
    ),
    "DaViT-tiny forward": lambda: _make_vision_case("DaViT-tiny", DaViT.from_checkpoint, "davit_tiny", 4.5218, False),
    "DaViT-tiny training": lambda: _make_vision_case("DaViT-tiny", DaViT.from_checkpoint, "davit_tiny", 4.5218, True),
}
