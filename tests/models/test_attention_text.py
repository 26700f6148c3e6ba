"""Descriptions of attention in configurations: what is refused, what is parsed and never run, what is equal."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_four_parts
from described import GRID, LINE, MODELS, TEXT, build, named, randomise, reload, run

from regard import (
    Alibi,
    Attention,
    Axial,
    Causal,
    First,
    Gaussian,
    Neighborhood,
    Padding,
    RelativeTable,
    RowColumn,
    Segments,
    Strided,
    TransformerXL,
    Window,
)
from regard.errors import CheckpointError, ConfigError, InputError, RegardError
from regard.models import GPT, BertConfig, GPTConfig, Transformer, TransformerConfig
from regard.models.attention_text import comparison_key, read_attention, write_attention


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # hundreds of saves; the disk need not be waited for


# What is refused


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_one_description_for_each_layer_means_as_many_as_layers(kind: str, count: int):
    with pytest.raises(ConfigError, match="number of layers") as caught:
        build(kind, [Attention()] * count)
    assert_four_parts(caught.value, f"{count} descriptions", "2 layers", MODELS[kind][3])


WRONG: dict[str, tuple[Any, str]] = {
    "heads": (Attention(bias=Alibi(5)), "for 5 heads"),
    "channels": (Attention(bias=TransformerXL(3, dim=8)), "of 8 channels"),
    "features and bias": (Attention(feature_map="elu1", bias=Alibi(3)), "scores"),
    "features and window": (Attention(feature_map="elu1", pattern=Window(2, 0)), "Window"),
    "hard features": (Attention(feature_map="elu1", scale=math.inf), "hard limit"),
    "rows": (Attention(pattern=Padding([3, 5])), "rows of one batch"),
    "segments": (Attention(pattern=Segments([[0, 0, 1]])), "rows of one batch"),
    "mask": (Attention(pattern=torch.ones(7, 7, dtype=torch.bool)), "not made of patterns"),  # type: ignore[arg-type]
    "nan": (Attention(scale=math.nan), "not a number"),
    "list": (Attention(bias=[1.0]), "neither a bias nor a tensor"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", WRONG)
def test_descriptions_that_no_layer_can_run_are_refused(kind: str, name: str):
    described, words = WRONG[name]
    with pytest.raises(ConfigError, match="cannot run this attention") as caught:
        build(kind, described)
    assert_four_parts(caught.value, words, MODELS[kind][3])
    with pytest.raises(ConfigError, match="in layer 1"):
        build(kind, (Attention(), described))


def test_features_that_are_unknown_are_refused():
    with pytest.raises(RegardError, match="no such feature map"):
        build("gpt", Attention(feature_map="elu2"))


def test_options_of_a_gpt_join_the_description_or_are_refused():
    windowed = GPTConfig(**TEXT, window=3, attention=Attention(pattern=Strided(2))).describe_layer(0)
    assert windowed.pattern == Window(3, 0) & Strided(2)
    biased = GPTConfig(**TEXT, position="alibi", attention=Attention(pattern=Window(2, 0))).describe_layer(1)
    assert write_attention(biased) == "Attention(pattern=Window(2, 0), bias=Alibi(heads=3))"
    with pytest.raises(ConfigError, match="one bias"):
        GPTConfig(**TEXT, position="alibi", attention=(Attention(), Attention(bias=Alibi(3))))
    with pytest.raises(ConfigError, match="linear attention"):
        GPTConfig(**TEXT, position="alibi", attention=Attention(feature_map="elu1"))
    with pytest.raises(ConfigError, match="linear attention") as caught:
        GPTConfig(**TEXT, window=3, window_layers=(1,), attention=Attention(feature_map="elu1"))
    assert "Window(3, 0)" in str(caught.value)


@pytest.mark.parametrize("described", [Attention(pattern=Causal()), Attention(bias=Alibi(3))], ids=named)
def test_cross_attention_by_position_is_refused(described: Attention):
    with pytest.raises(ConfigError, match="cannot depend on positions") as caught:
        TransformerConfig(**TEXT, hidden_dim=7, cross_attention=(Attention(), described))
    assert_four_parts(caught.value)


@pytest.mark.parametrize("described", [Attention(scale=0.3), Attention(feature_map="elu1")], ids=named)
def test_cross_attention_has_a_scale_or_features(tmp_path: Path, described: Attention):
    model = randomise(Transformer(TransformerConfig(**TEXT, hidden_dim=7, cross_attention=described)).eval())
    assert torch.equal(run(reload(model, tmp_path)), run(model))
    without = Transformer(TransformerConfig(**TEXT, hidden_dim=7)).eval()
    without.load_state_dict(model.state_dict())
    assert not torch.equal(run(without), run(model))
    alone = [model.generate([prompt], max_new_tokens=5).tokens[0] for prompt in ([3, 1, 4], [5])]
    assert [list(row) for row in model.generate([[3, 1, 4], [5]], max_new_tokens=5).tokens] == [
        list(row) for row in alone
    ]


def test_an_image_of_another_grid_is_refused_before_the_model_runs():
    for described in (
        Attention(pattern=First(1) | Neighborhood((3, 2), 1, start=1)),
        Attention(pattern=Axial((2, 3))),
        Attention(bias=RowColumn(3, grid=(3, 2), start=1)),
        Attention(bias=Gaussian(3, grid=(2, 3))),
    ):
        with pytest.raises(ConfigError, match="another grid") as caught:
            build("vit", described)
        assert_four_parts(caught.value, "2 x 3 patches")
    larger = torch.randn(1, 3, 12, 12)
    assert build("vit", Attention(pattern=Window(2, 2)))(larger, resize=True).shape == (1, 5)
    for described in GRID:
        with pytest.raises(InputError, match="another grid of patches"):
            build("vit", described)(larger, resize=True)


# Text


@pytest.mark.parametrize("described", [*LINE, *GRID], ids=named)
def test_text_gives_the_description_back(described: Attention):
    text = write_attention(described)
    again = read_attention(text)
    assert write_attention(again) == text
    assert comparison_key(again) == comparison_key(described)
    assert hash(comparison_key(again)) == hash(comparison_key(described))


MALICIOUS = (
    "__import__('os').system('touch {0}')",
    "Attention(pattern=__import__('os').system('touch {0}'))",
    "Attention(bias=open('{0}', 'w'))",
    "Attention(bias=Alibi(heads=open('{0}', 'w')))",
    "Attention(scale=(lambda: open('{0}', 'w'))())",
    "Attention(pattern=Where(lambda i, j: open('{0}', 'w')))",
    "Attention(feature_map=eval(\"open('{0}', 'w')\"))",
    "Attention(bias=[open('{0}', 'w') for _ in '1'][0])",
)
BROKEN = (
    "",
    "Attention",
    "Attention(",
    "Window(3, 0)",
    "Attention(Causal())",
    "Attention(mask=Causal())",
    "Attention(scale=1.0, scale=2.0)",
    "Attention(scale=nan)",
    "Attention(scale=True)",
    "Attention(scale='1')",
    "Attention(bias=Alibi())",
    "Attention(bias=Alibi(heads=0))",
    "Attention(bias=Alibi(heads=3, device='cuda'))",
    "Attention(bias=Alibi(heads=3, **{}))",
    "Attention(bias=Alibi(heads=100000000000))",
    "Attention(bias=TransformerXL(heads=1048576, dim=1048576))",
    "Attention(bias=Quadratic(heads=3, centre=[[1/3]]))",
    "Attention(bias=Causal())",
    "Attention(bias=Own())",
    "Attention(pattern=Alibi(heads=3))",
    "Attention(feature_map=Elu1(1))",
    "Attention(pattern=Window(10000000000000000000000, 0))",
    "Attention(pattern=" + "~" * 100_000 + "Causal())",
    "(" * 100_000,
    "\0",
)


@pytest.mark.parametrize("text", [*MALICIOUS, *BROKEN], ids=lambda text: text[:50])
def test_text_that_was_edited_by_hand_is_parsed_and_never_run(tmp_path: Path, text: str):
    model = build("gpt", Attention(pattern=Window(3, 0)))
    model.save_pretrained(tmp_path)
    trap = tmp_path / "trap"
    config = json.loads((tmp_path / "config.json").read_text())
    config["attention"] = text.format(trap) if "{0}" in text else text
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RegardError) as caught:
        GPT.from_pretrained(tmp_path)
    assert caught.value.because
    assert caught.value.instead
    assert not trap.exists()


def test_a_bias_that_is_too_large_for_memory_is_refused_by_its_shape(tmp_path: Path):
    model = build("gpt", Attention(bias=RelativeTable(3, distance=4)))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["attention"] = "Attention(bias=RelativeTable(heads=3, distance=1000000000000))"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="misshapen"):
        GPT.from_pretrained(tmp_path)


@pytest.mark.parametrize("value", [3, "Causal()", ["Causal()"], [3, 4], {"pattern": "Causal()"}, True])
def test_what_is_no_description_is_refused(value: Any):
    with pytest.raises(ConfigError):
        GPTConfig.from_dict(TEXT | {"attention": value})


# Configurations are values


def test_configurations_are_equal_if_they_are_written_alike():
    def config(*described: Attention) -> BertConfig:
        return BertConfig(**TEXT, attention=described[0] if len(described) == 1 else described)

    one, other = (config(Attention(pattern=Window(3, 0), bias=RelativeTable(3, distance=4))) for _ in "12")
    assert one == other
    assert hash(one) == hash(other)
    again = BertConfig.from_dict(json.loads(json.dumps(one.to_dict())))
    assert again == one
    assert hash(again) == hash(one)
    assert repr(again) == repr(one)
    assert "RelativeTable(heads=3, distance=4)" in repr(one)
    different = (
        config(Attention(pattern=Window(2, 0), bias=RelativeTable(3, distance=4))),
        config(Attention(pattern=Window(3, 0), bias=RelativeTable(3, distance=5))),
        config(Attention(pattern=Window(3, 0), bias=Alibi(3))),
        config(Attention(pattern=Window(3, 0))),
        config(*[Attention(pattern=Window(3, 0), bias=RelativeTable(3, distance=4))] * 2),
        BertConfig(**TEXT),
    )
    assert all(one != each for each in different)
    assert len({one, other, again, *different}) == 1 + len(different)
    assert one != GPTConfig(**TEXT, attention=one.attention)
    bias = torch.zeros(3, 7, 7)
    assert config(Attention(bias=bias)) == config(Attention(bias=bias)) != config(Attention(bias=bias.clone()))
    assert dataclasses.replace(one, layers=3).layers == 3


def test_a_configuration_holds_what_it_was_given():
    described = Attention(bias=RelativeTable(3, distance=4))
    assert GPTConfig(**TEXT, attention=described).attention is described
    assert GPTConfig(**TEXT, attention=[described, described]).attention == (described, described)  # type: ignore[arg-type]
