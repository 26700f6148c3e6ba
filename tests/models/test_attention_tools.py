"""Descriptions in models, and their cost, laws and pictures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard import Alibi, Attention, Blocks, First, RelativeTable, Strided, TransformerXL, Window, check, cost, show
from regard.models import GPT, Bert, BertConfig, GPTConfig, Transformer, TransformerConfig, ViT, ViTConfig
from regard.visualize import attention_maps

TEXT = {"vocab_size": 31, "context_length": 17, "dim": 12, "layers": 3, "heads": 3, "hidden_dim": 7}
MIXED = (
    Attention(pattern=Window(2, 0)),
    Attention(bias=RelativeTable(3, distance=4)),
    Attention(feature_map="elu1"),
)
DESCRIBED: dict[str, Any] = {
    "window": Attention(pattern=Window(2, 0)),
    "table": Attention(bias=RelativeTable(3, distance=4)),
    "transformer-xl": Attention(bias=TransformerXL(3, dim=4)),
    "linear": Attention(feature_map="elu1"),
    "per layer": MIXED,
}


def build(kind: str, attention: Any) -> tuple[Any, dict[str, int]]:
    if kind == "gpt":
        return GPT(GPTConfig(**TEXT, attention=attention)).eval(), {"tokens": 7}
    if kind == "bert":
        return Bert(BertConfig(**TEXT, attention=attention)).eval(), {"tokens": 7}
    if kind == "vit":
        sizes = {"image": (8, 12), "patch": 4, "classes": 5, "dim": 12, "layers": 3, "heads": 3}
        return ViT(ViTConfig(**sizes, attention=attention)).eval(), {}
    config = TransformerConfig(**TEXT, encoder_attention=attention, decoder_attention=attention)
    return Transformer(config).eval(), {"tokens": 7, "context_tokens": 5}


# Every description in a GPT, and one in another model; the slow tests put each in each.
FAST = {*(("gpt", name) for name in DESCRIBED), ("bert", "window")}
CELLS = [
    pytest.param(kind, name, marks=[] if (kind, name) in FAST else pytest.mark.slow, id=f"{name}-{kind}")
    for kind in ("gpt", "bert", "vit", "transformer")
    for name in DESCRIBED
]


@pytest.mark.parametrize(("kind", "name"), CELLS)
def test_the_cost_is_that_of_every_layer(kind: str, name: str):
    model, sizes = build(kind, DESCRIBED[name])
    found = cost(model, **sizes)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    if name == "per layer":
        # as much as a third of three models of which each has one of the descriptions in all of its layers
        alone = [cost(build(kind, each)[0], **sizes) for each in MIXED]
        assert 3 * found.macs == sum(each.macs for each in alone)
        assert 3 * found.parameters == sum(each.parameters for each in alone)


def test_products_are_those_that_run():
    model, sizes = build("bert", (Attention(scale=2.0), Attention(bias=Alibi(3)), Attention()))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(1, 7, dtype=torch.long))
    plain, _ = build("bert", None)
    with FlopCounterMode(display=False) as other, torch.no_grad():
        plain(torch.ones(1, 7, dtype=torch.long))
    assert cost(model, **sizes).flops == cost(plain, **sizes).flops
    assert counter.get_total_flops() == other.get_total_flops()


def test_pictures_show_what_each_layer_sees():
    model, _ = build("gpt", (Attention(pattern=Window(1, 0)), Attention(pattern=Strided(2)), Attention(bias=Alibi(3))))
    tokens = torch.arange(7)[None]
    near, strided, every = (look.rows([5])[0, 0] > 0 for look in attention_maps(model, tokens))
    assert near.nonzero().flatten().tolist() == [4, 5]
    assert strided.nonzero().flatten().tolist() == [1, 3, 5]
    assert every.nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert len(show(model, tokens).data["layers"]) == 3


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "described"),
    [
        ("gpt", Attention(pattern=Window(2, 0))),
        pytest.param("gpt", Attention(pattern=Blocks(3)), marks=pytest.mark.long),
        pytest.param("bert", Attention(pattern=First(1) | Window(1, 0)), marks=pytest.mark.long),
        pytest.param("bert", Attention(feature_map="elu1"), marks=pytest.mark.long),
        pytest.param("vit", Attention(bias=RelativeTable(3, distance=4)), marks=pytest.mark.long),
        ("vit", Attention(feature_map="elu1")),
    ],
    ids=str,
)
def test_the_laws_hold(kind: str, described: Attention):
    report = check(build(kind, described)[0])
    assert report.ok, report.failed
