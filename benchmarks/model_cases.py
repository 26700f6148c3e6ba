"""Whole models against their peers: the same weights, the same inputs, outputs compared before anything is timed."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

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


# MiniLM: 256 sentences of mixed length


def sentences(count: int = 256, seed: int = 0) -> list[list[int]]:
    """Token ids of texts as long as real sentences are: 27 tokens on average, up to 128, a few very short."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.exp(torch.randn(count, generator=generator) * 0.65 + 3.1).round().long().clamp(4, 128)
    return [torch.randint(1000, 30000, (int(n),), generator=generator).tolist() for n in lengths]


def minilm() -> ModelCase:
    transformers = library("transformers")
    folder = downloads.find("minilm")
    if folder is None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
        peer = transformers.BertModel(transformers.BertConfig(**sizes), attn_implementation="sdpa").eval()
        ours = Bert.from_checkpoint(peer.config.to_dict(), peer.state_dict())
    else:
        peer = transformers.BertModel.from_pretrained(folder, attn_implementation="sdpa").eval()
        ours = Bert.from_pretrained(folder)
    ours = ours.eval().requires_grad_(False)
    texts = sentences()
    tokens = sum(map(len, texts))

    def theirs(size: int) -> Run:
        def run() -> Tensor:
            order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
            made = torch.empty(len(texts), 384)
            with torch.inference_mode():
                for start in range(0, len(order), size):
                    batch = order[start : start + size]
                    longest = max(len(texts[index]) for index in batch)
                    ids = torch.tensor([texts[i] + [0] * (longest - len(texts[i])) for i in batch])
                    mask = torch.tensor([[1] * len(texts[i]) + [0] * (longest - len(texts[i])) for i in batch])
                    hidden = peer(ids, attention_mask=mask).last_hidden_state
                    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                    made[batch] = nn.functional.normalize(mean, dim=-1)
            return made

        return run

    linear = sum(m.weight.numel() for m in ours.blocks.modules() if isinstance(m, nn.Linear))
    linear += sum(block.attention.projections.weight.numel() for block in ours.blocks)
    return ModelCase(
        "MiniLM-L6, 256 sentences",
        f"{tokens} tokens, {min(map(len, texts))} to {max(map(len, texts))} each; "
        + ("real weights" if folder is not None else "random weights"),
        lambda: ours.embed(texts),
        {f"transformers sdpa, sorted, by {size}": theirs(size) for size in (8, 32)},
        1.4,
        _relative_difference(ours.embed(texts), theirs(32)()),
        "Hugging Face",
        (len(texts), "sentences"),
        gflop=2e-9 * linear * tokens,
    )


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
        1.0,
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
    "MiniLM": minilm,
    "ViT-S/16 forward": lambda: _make_vision_case(
        "ViT-S/16", ViT.from_checkpoint, "vit_small_patch16_224", 4.5989, False
    ),
    "ViT-S/16 training": lambda: _make_vision_case(
        "ViT-S/16", ViT.from_checkpoint, "vit_small_patch16_224", 4.5989, True
    ),
    "DaViT-tiny forward": lambda: _make_vision_case("DaViT-tiny", DaViT.from_checkpoint, "davit_tiny", 4.5218, False),
    "DaViT-tiny training": lambda: _make_vision_case("DaViT-tiny", DaViT.from_checkpoint, "davit_tiny", 4.5218, True),
}
