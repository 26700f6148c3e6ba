"""Parameter counts, to the unit, of models on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.models import GPT, Bert, BertConfig, GPTConfig, Transformer, TransformerConfig, ViT, ViTConfig


def built(model, config):
    with torch.device("meta"):
        return model(config)


def count(*modules: nn.Module | None) -> int:
    """Parameters of all these modules together, tied ones once."""
    return sum(
        parameter.numel()
        for parameter in {
            id(parameter): parameter for module in modules if module is not None for parameter in module.parameters()
        }.values()
    )


BERT = {
    "tiny": (4_385_920, 4_433_468),
    "mini": (11_170_560, 11_267_900),
    "small": (28_763_648, 29_058_876),
    "medium": (41_373_184, 41_668_412),
    "base": (109_482_240, 110_106_428),
    "large": (335_141_888, 336_226_108),
}


@pytest.mark.parametrize("size", BERT)
def test_berts_are_as_large_as_published(size):
    alone, with_heads = BERT[size]
    assert count(built(Bert, BertConfig.bert(size))) == alone
    assert count(built(Bert, BertConfig.bert(size, masked_tokens=True, next_sentence=True))) == with_heads


def test_the_parts_of_bert_base():
    model = built(Bert, BertConfig.bert("base"))
    assert count(model.embedding, model.positions, model.segments, model.norm) == 23_837_184
    assert count(model.blocks) == 85_054_464
    assert count(model.pooler) == 590_592


def test_the_cased_bert_has_fewer_tokens():
    assert count(built(Bert, BertConfig.bert("base", vocab_size=28_996))) == 108_310_272


@pytest.mark.parametrize(
    ("size", "expected"),
    [("small", 124_439_808), ("medium", 354_823_168), ("large", 774_030_080), ("xl", 1_557_611_200)],
)
def test_gpt2s_are_as_large_as_published(size, expected):
    assert count(built(GPT, GPTConfig.gpt2(size))) == expected


VIT = {
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "S/32": 22_878_952,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
}


@pytest.mark.parametrize("name", VIT)
def test_vits_are_as_large_as_published(name):
    assert count(built(ViT, ViTConfig.vit(name))) == VIT[name]


def test_a_larger_image_has_more_positions():
    assert count(built(ViT, ViTConfig.vit("B/16", image=(384, 384)))) == 86_859_496


def test_the_transformers_of_the_paper():
    model = built(Transformer, TransformerConfig.base())
    assert count(model) == 63_082_496
    assert count(model.encoder) == 18_914_304
    assert count(model.decoder) == 25_224_192
    assert count(built(Transformer, TransformerConfig.big())) == 214_245_376


def test_without_the_biases_of_attention():
    # 18 attentions of 4 biases of 512 numbers; the feed-forward parts keep theirs
    assert count(built(Transformer, TransformerConfig.base(attention_bias=False))) == 63_045_632


def test_the_layers_of_the_transformer_are_as_large_as_torchs():
    model = built(Transformer, TransformerConfig.base(final_norm=True))
    torchs = built(lambda _: nn.Transformer(batch_first=True), None)
    assert count(model.encoder[0]) == count(torchs.encoder.layers[0]) == 3_152_384
    assert count(model.decoder[0]) == count(torchs.decoder.layers[0]) == 4_204_032
    assert count(model.encoder[0].feed_forward) == 2_099_712
    assert count(model.encoder, model.decoder, model.encoder_norm, model.decoder_norm) == count(torchs) == 44_140_544
