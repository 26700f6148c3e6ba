"""Layers, models and conversions: outputs, gradients, decoding, generated text, and what a reloaded model says."""

from __future__ import annotations

import copy
import hashlib
import tempfile
from typing import Any

import torch
from record import Record, draw, fill_parameters, run_backward
from torch import Tensor, nn

from regard import Alibi, Attention, Causal, Neighborhood, Padding, Quadratic, RelativeTable, Strided, Window
from regard.convert import (
    attention_to_conv,
    conv_to_attention,
    convert_network,
    fit_conv,
    hardness,
    leak,
    restore_network,
    steepness,
)
from regard.layers import (
    AttentionSizes,
    ChannelAttention,
    FeedForward,
    GridAttention,
    GridPositions,
    KVCache,
    LearnedPositions,
    Linear,
    MultiHeadAttention,
    PatchEmbedding,
    Rotary,
    SinusoidalPositions,
    SpatialAttention,
    TableAttention,
    TransformerBlock,
    WindowAttention,
    head_profile,
)
from regard.models import (
    GPT,
    Bert,
    BertConfig,
    DaViT,
    DaViTConfig,
    GPTConfig,
    SpatialConfig,
    SpatialTransformer,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)

TAPS = [[-1, 0], [0, 0], [0, 1]]
TEXT = (torch.arange(22) * 7 % 29).reshape(2, 11)
IMAGE = draw(2, 3, 8, 12, seed=4)


def make_layers() -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    """Every layer in small sizes, with its inputs."""
    x, grid, image = draw(2, 11, 12), draw(2, 5, 7, 12), draw(2, 4, 5, 7)
    layers: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {
        "linear": (Linear(12, 7), (x,)),
        "linear, one row": (Linear(64, 96), (draw(1, 64),)),
        "linear, many rows": (Linear(96, 160), (draw(2, 70, 96),)),
        "attention": (MultiHeadAttention(12, 3), (x,)),
        "attention, grouped": (MultiHeadAttention(12, 6, kv_heads=2, bias=False), (x,)),
        "attention, sizes": (
            MultiHeadAttention(AttentionSizes(12, 3, None, 5, 7, 9, 9, 8)),
            (x, draw(2, 6, 9, seed=1)),
        ),
        "attention, rotary": (MultiHeadAttention(12, 3, attention=Attention(Causal()), rotary=Rotary(4)), (x,)),
        "attention, elu1": (MultiHeadAttention(12, 3, attention=Attention(Causal(), feature_map="elu1")), (x,)),
        "attention, alibi": (MultiHeadAttention(12, 3, attention=Attention(Window(4, 0), bias=Alibi(3))), (x,)),
        "attention, scaled": (MultiHeadAttention(12, 3, attention=Attention(Strided(3), 0.7)), (x,)),
        "channels": (ChannelAttention(12, 3), (x,)),
        "channels, by tokens": (ChannelAttention(12, 3, "tokens"), (grid,)),
        "windows": (WindowAttention(12, 3, (2, 3)), (grid,)),
        "windows, padded": (WindowAttention(12, 3, (3, 4), sees_padding=False), (grid,)),
        "grid": (GridAttention(12, 3, attention=Attention(Neighborhood((5, 7), 1))), (grid,)),
        "patches": (PatchEmbedding(3, 8, 4), (IMAGE,)),
        "patches, overlapping": (PatchEmbedding(3, 8, 3, 2, 1), (IMAGE,)),
        "learned positions": (LearnedPositions(17, 6), (torch.arange(9),)),
        "sinusoidal positions": (SinusoidalPositions(6), (torch.arange(9),)),
        "grid positions": (GridPositions((4, 6), 8, first=1), ((5, 7),)),
        "spatial": (SpatialAttention(4, 6, TAPS), (image,)),
        "spatial, soft": (SpatialAttention(4, 6, TAPS, alpha=2.5), (image,)),
        "spatial, narrow": (SpatialAttention(4, 6, TAPS, head_dim=2, groups=2), (image,)),
        "table": (TableAttention(4, 6, 2, TAPS), (image,)),
    }
    for activation in ("relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu", "reglu"):
        layers[f"feed forward, {activation}"] = (FeedForward(12, 20, activation), (x,))
    for order in ("pre", "post"):
        layers[f"block, {order}"] = (
            TransformerBlock(MultiHeadAttention(12, 3), FeedForward(12, 20), order=order),
            (x,),
        )
    return layers


def record_layers(record: Record) -> None:
    torch.manual_seed(0)
    for name, (layer, inputs) in make_layers().items():
        _record_module(record, f"layers/{name}", layer, inputs)
    layer = MultiHeadAttention(12, 3, attention=Attention(Causal()))
    fill_parameters(layer)
    x = draw(2, 11, 12)
    record.add("layers/attention weights", layer.weights(x))
    record.add("layers/attention heads", layer.head_contributions(x))
    record.add("layers/attention padded", layer(x, pattern=Padding([11, 4])))
    for name, attention in {
        "kv": Attention(Causal()),
        "window": Attention(Window(3, 0)),
        "state": Attention(Causal(), feature_map="elu1"),
    }.items():
        layer = MultiHeadAttention(12, 3, attention=attention)
        fill_parameters(layer)
        cache = layer.new_cache()
        with torch.no_grad():
            for part in (slice(0, 6), slice(6, 7), slice(7, 9), slice(9, 11)):
                record.add(f"caches/{name} {part.start}", layer(x[:, part], cache=cache))
    cache = KVCache()
    cache.append(draw(2, 3, 6, 4), draw(2, 3, 6, 5))
    cache.crop(4)
    cache.reorder(torch.tensor([1, 0]))
    record.add("caches/reordered", cache.append(draw(2, 3, 1, 4, seed=1), draw(2, 3, 1, 5, seed=2)))
    for name, bias in {
        "quadratic": Quadratic(3, (4, 6), generator=torch.Generator().manual_seed(1)),
        "table": RelativeTable(2, grid=(4, 6)),
    }.items():
        profile = head_profile(bias)
        record.add(
            f"layers/profile {name}", {"mean": profile.mean, "covariance": profile.covariance, "width": profile.width}
        )


def make_models() -> dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Every model in small sizes, with what it reads."""
    text = {"vocab_size": 29, "context_length": 32, "dim": 12, "layers": 2, "heads": 3}
    source = {key: text[key] for key in ("vocab_size", "dim", "layers", "heads")} | {"hidden_dim": 20}
    bert = BertConfig(**text, masked_tokens=True, next_sentence=True)
    spatial = {"image": (8, 12), "dim": 8, "layers": 2, "hidden_dim": 16}
    vit = {"image": (8, 12), "patch": 4, "classes": 5, "dim": 12, "layers": 2, "heads": 3}
    davit = {"dims": (8, 16), "heads": (2, 4), "depths": (1, 1), "window": 2, "classes": 5}
    left, right = {"lengths": [11, 6]}, {"source_lengths": [11, 5], "target_lengths": [4, 11]}
    models: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {
        "gpt": (GPT(GPTConfig(**text)), (TEXT,), {}),
        "gpt, padded": (GPT(GPTConfig(**text)), (TEXT,), left),
        "gpt, alibi": (GPT(GPTConfig(**text, position="alibi")), (TEXT,), left),
        "gpt, sinusoidal": (GPT(GPTConfig(**text, position="sinusoidal", tie_embeddings=False)), (TEXT,), {}),
        "gpt, window": (GPT(GPTConfig(**text, window=3)), (TEXT,), left),
        "llama": (GPT(GPTConfig.llama(**text | {"heads": 6, "kv_heads": 2}, hidden_dim=20)), (TEXT,), left),
        "bert": (Bert(bert), (TEXT, TEXT % 2), {}),
        "bert, padded": (Bert(bert), (TEXT,), left),
        "transformer": (Transformer(TransformerConfig(**source)), (TEXT, TEXT.flip(1)), {}),
        "transformer, padded": (Transformer(TransformerConfig(**source)), (TEXT, TEXT.flip(1)), right),
        "transformer, pre": (
            Transformer(TransformerConfig(**source, order="pre", shared=False)),
            (TEXT, TEXT.flip(1)),
            right,
        ),
        "vit": (ViT(ViTConfig(**vit)), (IMAGE,), {}),
        "vit, mean": (ViT(ViTConfig(**vit, pool="mean", qkv_bias=False)), (IMAGE,), {}),
        "davit": (DaViT(DaViTConfig(**davit)), (draw(2, 3, 24, 20),), {}),
        "davit, tokens": (DaViT(DaViTConfig(**davit, merge=3, scale="tokens")), (draw(2, 3, 24, 20),), {}),
    }
    for position in ("quadratic", "gaussian", "learned", "content"):
        config = SpatialConfig(**spatial, position=position, heads=4)
        models[f"spatial, {position}"] = (SpatialTransformer(config), (IMAGE,), {})
    return models


def record_models(record: Record) -> None:
    torch.manual_seed(0)
    for name, (model, inputs, words) in make_models().items():
        where = f"models/{name}"
        _record_module(record, where, model, inputs, words)
        with tempfile.TemporaryDirectory() as folder, record.case(f"{where} reloaded"):
            model.save_pretrained(folder)
            record.add(f"{where} reloaded", _first(type(model).from_pretrained(folder)(*inputs, **words)))
        if not isinstance(model, GPT | Transformer):
            continue
        prompts = [[3, 1, 4, 1, 5], [9, 2], [6]]
        for label, how in {
            "greedy": {"max_new_tokens": 9},
            "stopped": {"max_new_tokens": 9, "stop_tokens": (4, 17)},
            "beam": {"max_new_tokens": 7, "num_beams": 3, "stop_tokens": 4},
            "sampled": {"max_new_tokens": 9, "temperature": 1.3, "top_k": 9, "top_p": 0.9, "seed": 5},
        }.items():
            with record.case(f"generation/{name} {label}"):
                found = model.generate(prompts, **how)
                record.add(f"generation/{name} {label}", [found.tokens, found.scores, found.finished])
        with torch.no_grad():
            logits, cache = model.prefill(TEXT[:, :6], None, 9)
            record.add(f"decode/{name} 0", logits)
            for token in range(6, 11):
                record.add(f"decode/{name} {token}", model.decode_step(TEXT[:, token : token + 1], cache))


def record_conversions(record: Record) -> None:
    torch.manual_seed(0)
    x = draw(2, 4, 9, 11, dtype=torch.float64)
    convolutions = {
        "plain": nn.Conv2d(4, 6, 3, padding=1),
        "strided": nn.Conv2d(4, 6, (2, 3), stride=2, dilation=2, padding=2, groups=2, bias=False),
        "reflect": nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        "circular": nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular"),
    }
    for name, conv in convolutions.items():
        fill_parameters(conv.double())
        for label, how in {
            "taps": {},
            "minimal": {"heads": "minimal"},
            "soft": {"exact": False, "tolerance": 1e-4},
        }.items():
            where = f"convert/{name} {label}"
            with record.case(where):
                layer = conv_to_attention(conv, **how)
                record.add(where, layer(x))
                record.add(f"{where} back", attention_to_conv(layer).conv.weight)
    network = nn.Sequential(nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Conv2d(5, 3, 1)).double()
    fill_parameters(network)
    record.add("convert/network", convert_network(network)(x))
    record.add("convert/network back", restore_network(convert_network(network))(x))
    fit = fit_conv(nn.Conv2d(4, 2, 3, padding=1).double(), x)
    record.add("convert/fit", fit.conv.weight.shape)
    numbers = [steepness(1e-6), leak(3.0), leak(3.0, null=True), hardness(torch.float32).rounds]
    record.add("convert/width", [float(number) for number in numbers])


def _record_module(record: Record, where: str, module: nn.Module, inputs: tuple, words: dict | None = None) -> None:
    words = words or {}
    state = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        state.update(name.encode() + tensor.contiguous().numpy().tobytes())
    record.add(f"{where} initial state", state.hexdigest())
    fill_parameters(module.eval())
    for label, dtype in {"f32": torch.float32, "f64": torch.float64}.items():
        with record.case(f"{where} {label}"):
            copied = copy.deepcopy(module).to(dtype)
            cast = [_cast(value, dtype) for value in inputs]
            leaves = [(f"input {index}", value) for index, value in enumerate(cast) if isinstance(value, Tensor)]
            call = lambda: _first(copied(*cast, **words))  # noqa: B023, E731
            record.add(f"{where} {label}", run_backward(call, [*leaves, *copied.named_parameters()]))
            with torch.no_grad():
                record.add(f"{where} {label} inference", call())
    with record.case(f"{where} training"):
        torch.manual_seed(7)  # dropout
        record.add(f"{where} training", _first(copy.deepcopy(module).train()(*inputs, **words)))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype).clone().requires_grad_() if floating else value


def _first(output: Any) -> Tensor:
    """The tensor of an output; those of a tuple beside each other."""
    if isinstance(output, Tensor):
        return output
    return torch.cat([each.flatten() for each in output if each is not None])
