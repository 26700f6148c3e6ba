"""Models of other libraries with Regard inside, against the same models with the best that they have built in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import regard
from benchmarks.model_cases import library, sentences
from benchmarks.model_contest import ModelCase
from benchmarks.training_cases import make_loop
from regard import downloads

WORDS = 32_000
LLAMA = {"vocab_size": WORDS, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
LLAMA |= {"num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 8192}  # 162 million


def make_llama(attention: str = "sdpa", window: int | None = None) -> Any:
    """A decoder of LLaMA's kind; with a window it is Mistral's, which has the same weights."""
    transformers = library("transformers")
    torch.manual_seed(0)
    if window is None:
        return transformers.LlamaForCausalLM._from_config(
            transformers.LlamaConfig(**LLAMA), attn_implementation=attention
        ).eval()
    config = transformers.MistralConfig(**LLAMA, sliding_window=window)
    return transformers.MistralForCausalLM._from_config(config, attn_implementation=attention).eval()


def draw_tokens(rows: int, tokens: int, words: int = WORDS) -> Tensor:
    return torch.randint(0, words, (rows, tokens), generator=torch.Generator().manual_seed(1))


def use_regard(model: Any) -> Any:
    """A copy of a model of Hugging Face with our attention and nothing else of ours."""
    library("regard.integrations.transformers")
    ours = copy.deepcopy(model)
    ours.set_attn_implementation("regard")
    return ours


def compare(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


# Reading a long prompt


def prefill(name: str, bar: float, window: int | None = None, *, accelerated: bool = False) -> ModelCase:
    """4,096 tokens into a cache, and the logits of the last one."""
    peer, ids = make_llama(window=window), draw_tokens(1, 4096)
    ours = use_regard(peer)
    if accelerated:
        regard.accelerate(ours)

    def run(model: Any) -> Callable[[], Tensor]:
        def read() -> Tensor:
            with torch.inference_mode():
                return model(ids, logits_to_keep=1).logits

        return read

    linear = sum(m.weight.numel() for m in peer.model.modules() if isinstance(m, nn.Linear))
    pairs = 4096 * 4097 // 2 if window is None else 4096 * window - window * (window - 1) // 2
    return ModelCase(
        name,
        "162 million parameters, batch 1" + ("" if window is None else f", sliding window of {window}"),
        run(ours),
        {"transformers sdpa": run(peer)},
        bar,
        compare(run(ours)(), run(peer)()),
        "Hugging Face",
        (4096, "tokens"),
        gflop=1e-9 * (2 * linear * 4096 + 4 * pairs * 768 * 12),
    )


# Training


def train_llama() -> ModelCase:
    peer, ids = make_llama(), draw_tokens(1, 2048)
    ours = use_regard(peer)
    losses = [lambda model=model: model(ids, labels=ids, use_cache=False).loss for model in (ours, peer)]
    return _make_training_case(
        "Llama 160M, 2,048 tokens, training step", "batch 1, float32, AdamW (fused)", (ours, peer), losses, 2048, 1.3
    )


def train_bert() -> ModelCase:
    transformers = library("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(num_labels=5)
    peer = transformers.BertForSequenceClassification._from_config(config, attn_implementation="sdpa").eval()
    ours = use_regard(peer)
    lengths = torch.tensor([512, 460, 397, 331, 268, 205, 142, 79])  # as mixed as the lengths of news articles
    ids, labels = draw_tokens(8, 512, 30_000), torch.arange(8) % 5
    mask = (torch.arange(512) < lengths[:, None]).long()
    losses = [lambda model=model: model(ids, attention_mask=mask, labels=labels).loss for model in (ours, peer)]
    return _make_training_case(
        "BERT-base 8 x 512, mixed lengths, training step",
        f"{int(mask.sum())} of {mask.numel()} tokens are no padding; dropout 0.1, float32, AdamW (fused)",
        (ours, peer),
        losses,
        int(mask.sum()),
        1.15,
    )


def _make_training_case(
    name: str, about: str, models: tuple[Any, Any], losses: list[Callable[[], Tensor]], tokens: int, bar: float
) -> ModelCase:
    with torch.no_grad():  # in eval mode, without dropout
        first = [loss() for loss in losses]
    error = float((first[0] - first[1]).abs() / first[1])
    runs = [make_loop(model, loss) for model, loss in zip(models, losses, strict=True)]
    return ModelCase(
        name,
        about,
        runs[0],
        {"transformers sdpa": runs[1]},
        bar,
        error,
        "Hugging Face",
        (tokens, "tokens"),
        compared="first losses",
    )


# regard.accelerate


def generate(weights: str, bar: float) -> ModelCase:
    transformers = library("transformers")
    torch.manual_seed(0)
    peer = transformers.GPT2LMHeadModel._from_config(transformers.GPT2Config(), attn_implementation="sdpa").eval()
    ours = copy.deepcopy(peer)
    report = regard.accelerate(ours, weights)
    ids = draw_tokens(1, 128, 50_257)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 128, "do_sample": False, "pad_token_id": 0}

    def run(model: Any) -> Callable[[], Tensor]:
        def write() -> Tensor:
            with torch.inference_mode():
                return model.generate(ids, eos_token_id=None, **options)

        return write

    same = int((run(ours)() == run(peer)())[0, 128:].sum())
    return ModelCase(
        f"accelerate GPT-2 124M generate, {weights}",
        "128 tokens read, 128 written, batch 1, greedy; random weights",
        run(ours),
        {"transformers sdpa generate": run(peer)},
        bar,
        # Rounded weights are compared with a bound of their own, by accelerate itself.
        report.difference if weights == "float32" else 0.0,
        "Hugging Face",
        (128, "tokens"),
        notes=[f"{same} of 128 tokens the same", f"logits of the probe differ by {report.difference:.0e}"],
    )


def embed() -> ModelCase:
    """MiniLM on 256 sentences of mixed length, sorted and in batches of 32, padded."""
    transformers = library("transformers")
    folder = downloads.find("minilm")
    torch.manual_seed(0)
    if folder is None:
        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
        peer = transformers.BertModel._from_config(transformers.BertConfig(**sizes), attn_implementation="sdpa").eval()
    else:
        peer = transformers.BertModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    ours = copy.deepcopy(peer)
    regard.accelerate(ours)
    texts = sorted(sentences(), key=len)
    batches = []
    for start in range(0, len(texts), 32):
        rows = texts[start : start + 32]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        batches.append((ids, (torch.arange(longest) < torch.tensor([[len(row)] for row in rows])).long()))

    def run(model: Any) -> Callable[[], Tensor]:
        def embed_all() -> Tensor:
            made = []
            with torch.inference_mode():
                for ids, mask in batches:
                    hidden = model(ids, attention_mask=mask).last_hidden_state
                    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                    made.append(functional.normalize(mean, dim=-1))
            return torch.cat(made)

        return embed_all

    return ModelCase(
        "accelerate MiniLM-L6, 256 sentences",
        f"{sum(map(len, texts))} tokens, sorted by length, batches of 32; "
        + ("real weights" if folder is not None else "random weights"),
        run(ours),
        {"transformers sdpa": run(peer)},
        1.4,
        compare(run(ours)(), run(peer)()),
        "Hugging Face",
        (len(texts), "sentences"),
    )


def classify_images() -> ModelCase:
    timm = library("timm")
    torch.manual_seed(0)
    peer = timm.create_model("vit_small_patch16_224", num_classes=1000).eval()
    nn.init.normal_(peer.head.weight, std=0.02)
    ours = copy.deepcopy(peer)
    regard.accelerate(ours)
    images = torch.randn(8, 3, 224, 224, generator=torch.Generator().manual_seed(1))

    def run(model: Any) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            with torch.inference_mode():
                return model(images)

        return forward

    return ModelCase(
        "accelerate ViT-S/16, batch 8, forward",
        "224 x 224, float32",
        run(ours),
        {"timm": run(peer)},
        1.2,
        compare(run(ours)(), run(peer)()),
        "timm",
        (8, "images"),
        gflop=8 * 2 * 4.5989,
    )


CASES: dict[str, Callable[[], ModelCase]] = {
    "BERT training": train_bert,
    "Llama prefill": lambda: prefill("Llama 160M, 4,096 tokens, prefill", 1.5),
    "Llama prefill accelerated": lambda: prefill(
        "Llama 160M, 4,096 tokens, prefill, accelerate", 1.5, accelerated=True
    ),
    "Llama window": lambda: prefill("Llama 160M, 4,096 tokens, window 512, prefill", 3.0, 512),
    "Llama window accelerated": lambda: prefill(
        "Llama 160M, 4,096 tokens, window 512, prefill, accelerate", 3.0, 512, accelerated=True
    ),
    "Llama training": train_llama,
    "GPT-2 generate float32": lambda: generate("float32", 1.6),
    "GPT-2 generate int8": lambda: generate("int8", 3.0),
    "MiniLM": embed,
    "ViT-S/16": classify_images,
}
