"""Models of transformers and timm, with the arguments of `derivations`; attention is unfused unless `eager=False`."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn
from twins import timm, transformers


def bert(*, width=768, layers=12, heads=12, hidden=3072, vocab_size=30522, positions=512, kinds=2, **how) -> nn.Module:
    config = transformers().BertConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=hidden,
        max_position_embeddings=positions,
        type_vocab_size=kinds,
    )
    return _build_transformers(transformers().BertModel, config, **how)


def gpt2(*, head=True, width=768, layers=12, heads=12, vocab_size=50257, positions=1024, **how) -> nn.Module:
    config = transformers().GPT2Config(
        vocab_size=vocab_size,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        n_positions=positions,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _build_transformers(transformers().GPT2LMHeadModel if head else transformers().GPT2Model, config, **how)


def t5(
    *, width=512, hidden=2048, layers=6, decoder_layers=None, heads=8, size=64, vocab_size=32128, buckets=32, **how
) -> nn.Module:
    config = transformers().T5Config(
        vocab_size=vocab_size,
        d_model=width,
        d_kv=size,
        d_ff=hidden,
        num_layers=layers,
        num_decoder_layers=decoder_layers,
        num_heads=heads,
        relative_attention_num_buckets=buckets,
        use_cache=False,
    )
    return _build_transformers(transformers().T5ForConditionalGeneration, config, **how)


def vit(
    *, built_for=(224, 224), patch=16, channels=3, width=768, layers=12, heads=12, hidden=3072, classes=1000, **how
) -> nn.Module:
    sizes = {"embed_dim": width, "depth": layers, "num_heads": heads, "mlp_ratio": hidden / width}
    patches = {"img_size": built_for, "patch_size": patch, "in_chans": channels}
    return _build_timm("vision_transformer.VisionTransformer", num_classes=classes, **sizes, **patches, **how)


def davit(*, widths=(96, 192, 384, 768), depths=(1, 1, 3, 1), **how) -> nn.Module:
    return _build_windowed("davit.DaVit", embed_dims=widths, depths=depths, **how)


def swin(*, image=(224, 224), width=96, depths=(2, 2, 6, 2), patch=4, **how) -> nn.Module:
    sizes = {"img_size": image, "patch_size": patch, "embed_dim": width, "depths": depths}
    return _build_windowed("swin_transformer.SwinTransformer", **sizes, **how)


def words(batch: int, tokens: int, device: Any = None) -> Tensor:
    return torch.zeros(batch, tokens, dtype=torch.long, device=device)


def picture(batch: int, image: tuple[int, int], channels: int = 3, device: Any = None) -> Tensor:
    return torch.zeros(batch, channels, *image, device=device)


def _build_transformers(kind: Any, config: Any, *, eager: bool = True, device: Any = None) -> nn.Module:
    """A model whose attention is two products, or as it comes: fused."""
    config._attn_implementation = "eager" if eager else "sdpa"
    with torch.device(device or "cpu"):
        return kind(config).eval()


def _build_windowed(
    kind: str, *, heads=(3, 6, 12, 24), window=7, ratio=4, channels=3, classes=1000, **how
) -> nn.Module:
    sizes = {"num_heads": heads, "window_size": window, "mlp_ratio": float(ratio)}
    return _build_timm(kind, in_chans=channels, num_classes=classes, **sizes, **how)


def _build_timm(kind: str, *, eager: bool = True, **sizes: Any) -> nn.Module:
    """A model of timm; each of its attention modules has a flag for fused attention."""
    timm()
    module, name = kind.split(".")
    model = getattr(importlib.import_module(f"timm.models.{module}"), name)(**sizes)
    for part in model.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = not eager
    return model.eval()
