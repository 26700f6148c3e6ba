"""Small models with attention descriptions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard import (
    Alibi,
    Attention,
    Axial,
    Blocks,
    Causal,
    First,
    Full,
    Gaussian,
    GridStride,
    GridWindow,
    Neighborhood,
    Quadratic,
    Random,
    RelativeTable,
    RowColumn,
    Selected,
    Shift,
    Strided,
    TransformerXL,
    Window,
)
from regard.features import FavorPlus, Taylor2
from regard.models import GPT, Bert, BertConfig, GPTConfig, Transformer, TransformerConfig, ViT, ViTConfig
from regard.models.attention_text import write_attention

TEXT = {"vocab_size": 31, "context_length": 17, "dim": 12, "layers": 2, "heads": 3}
MODELS: dict[str, tuple[type, type, dict[str, Any], str]] = {
    "gpt": (GPT, GPTConfig, TEXT | {"hidden_dim": 7}, "attention"),
    "bert": (Bert, BertConfig, TEXT | {"hidden_dim": 7, "pooler": False}, "attention"),
    "vit": (
        ViT,
        ViTConfig,
        {"image": (8, 12), "patch": 4, "classes": 5, "dim": 12, "layers": 2, "heads": 3},
        "attention",
    ),
    "encoder": (Transformer, TransformerConfig, TEXT | {"hidden_dim": 7}, "encoder_attention"),
    "decoder": (Transformer, TransformerConfig, TEXT | {"hidden_dim": 7}, "decoder_attention"),
}
LINE = (
    Attention(pattern=Full()),
    Attention(pattern=Causal()),
    Attention(pattern=Window(2, 1, step=2)),
    Attention(pattern=Strided(3)),
    Attention(pattern=First(2) | Window(1, 1)),
    Attention(pattern=Selected([1, 4]) & ~Window(0, 1)),
    Attention(pattern=Random(2, seed=5) | Blocks(3)),
    Attention(scale=0.0),
    Attention(scale=-1.5),
    Attention(scale=math.inf),
    Attention(bias=Alibi(3)),
    Attention(bias=Alibi(3, slopes=[0.1, 1 / 3, 2.0])),
    Attention(bias=Gaussian(3)),
    Attention(bias=Quadratic(3, centre=[[0.1], [-1.0], [2 / 3]], alpha=0.3)),
    Attention(bias=RelativeTable(3, distance=4), pattern=Window(5, 5)),
    Attention(bias=Shift(3, steps=[[0], [-1], [-2]]), scale=0.5),
    Attention(bias=TransformerXL(3, dim=4, scale=0.7)),
    Attention(feature_map="elu1"),
    Attention(feature_map=Taylor2()),
    Attention(feature_map=FavorPlus(features=11, seed=3), scale=0.25),
)
# six patches of an image, or six tokens after the first
GRID = (
    Attention(pattern=First(1) | Neighborhood((2, 3), 1, start=1)),
    Attention(pattern=First(1) | GridWindow((2, 3), (1, 2), start=1)),
    Attention(pattern=First(1) | GridStride((2, 3), 2, start=1)),
    Attention(pattern=First(1) | Axial((2, 3), start=1), scale=2.0),
    Attention(bias=RelativeTable(3, grid=(2, 3), start=1)),
    Attention(bias=RowColumn(3, grid=(2, 3), start=1)),
    Attention(bias=Gaussian(3, grid=(2, 3), start=1)),
    Attention(bias=Quadratic(3, grid=(2, 3), start=1)),
    Attention(bias=TransformerXL(3, dim=4, grid=(2, 3), start=1)),
)


def named(value: Any) -> str:
    return write_attention(value) if isinstance(value, Attention) else str(value)


def build(kind: str, attention: Any, **changes: Any) -> Any:
    """A small model with this description and random values everywhere, biases included."""
    model, config, sizes, field = MODELS[kind]
    made = model(config(**(sizes | {field: attention} | changes))).eval()
    return randomise(made)


def randomise(model: Any) -> Any:
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source, dtype=torch.float64) * 0.4)
    return model


def run(model: Any) -> Tensor:
    """What a model says of a text of seven tokens, or of an image of as many."""
    tokens = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        if isinstance(model, ViT):
            dtype = model.class_token.dtype
            return model(
                torch.randn(2, 3, 8, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
            )
        if isinstance(model, Transformer):
            return model(tokens, tokens.flip(1))
        return model(tokens).hidden if isinstance(model, Bert) else model(tokens)


def reload(model: Any, folder: Path, **words: Any) -> Any:
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, **words)


def even(i: Tensor, j: Tensor) -> Tensor:
    return (i + j) % 2 == 0
