"""Descriptions of attention in models: saved as text, and the same bits after loading."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_four_parts
from described import GRID, LINE, MODELS, TEXT, build, even, named, reload, run
from torch import Tensor

from regard import (
    Alibi,
    Attention,
    Causal,
    Full,
    Mask,
    Padding,
    RelativeTable,
    Segments,
    Strided,
    TransformerXL,
    Where,
    Window,
)
from regard.biases import Bias
from regard.errors import CheckpointError, ConfigError, RegardError
from regard.models import GPT, Bert, GPTConfig, Transformer, ViT
from regard.models.attention_text import BIASES, write_attention

CASES = [(kind, described) for kind in MODELS for described in (*LINE, *GRID)]


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # hundreds of saves; the disk need not be waited for


# Saving and loading


def test_every_bias_and_every_pattern_is_among_the_cases():
    from regard.patterns import EVERY

    written = " ".join(write_attention(described) for _, described in CASES)
    assert {type(d.bias).__name__ for d in (*LINE, *GRID) if d.bias is not None} == set(BIASES)
    for kind in EVERY:
        assert f"{kind.__name__}(" in written or kind in (Where, Mask, Segments, Padding), kind


# The fast tests save every third description, in one precision; the slow ones each in both.
SAVED = [
    pytest.param(*case, dtype, marks=[] if place % 3 == 0 and (place % 2 == 0) == single else pytest.mark.slow)
    for place, case in enumerate(CASES)
    for dtype, single in ((torch.float32, True), (torch.float64, False))
]


@pytest.mark.parametrize(("kind", "described", "dtype"), SAVED, ids=named)
def test_outputs_are_the_same_bits_after_saving_and_loading(tmp_path: Path, kind: str, described: Attention, dtype):
    model = build(kind, described).to(dtype)
    again = reload(model, tmp_path)
    expected = run(model)
    assert expected.isfinite().all()
    assert torch.equal(run(again), expected)
    assert again.config == model.config
    assert again.state_dict().keys() == model.state_dict().keys()
    text = json.loads((tmp_path / "config.json").read_text())[MODELS[kind][3]]
    assert text == write_attention(described)


@pytest.mark.parametrize(("kind", "described"), CASES, ids=named)
def test_the_description_is_what_the_model_runs(kind: str, described: Attention):
    plain = {"gpt": ("Full()", "Causal()"), "decoder": ("Full()", "Causal()")}.get(kind, ("Full()",))
    model, without = build(kind, described), build(kind, None)
    theirs = without.state_dict()
    without.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if name in theirs})
    same = torch.equal(run(model), run(without))
    assert same == (write_attention(described) in [f"Attention(pattern={pattern})" for pattern in plain])


@pytest.mark.parametrize("kind", MODELS)
def test_each_layer_may_have_a_description_of_its_own(tmp_path: Path, kind: str):
    described = (Attention(pattern=Window(2, 0)), Attention(bias=RelativeTable(3, distance=4), scale=0.5))
    model = build(kind, described)
    again = reload(model, tmp_path)
    assert torch.equal(run(again), run(model))
    assert not torch.equal(run(model), run(build(kind, described[::-1])))
    assert json.loads((tmp_path / "config.json").read_text())[MODELS[kind][3]] == list(map(write_attention, described))
    assert again.config == model.config
    assert len([name for name in model.state_dict() if name.endswith("score_bias.table")]) == 1


@pytest.mark.parametrize("kind", MODELS)
def test_learned_biases_are_trained_and_restored_layer_by_layer(tmp_path: Path, kind: str):
    torch.manual_seed(0)
    model = build(kind, Attention(bias=RelativeTable(3, distance=4)))
    tables = {name: value for name, value in model.named_parameters() if name.endswith("score_bias.table")}
    assert len(tables) == 2
    assert len({id(table) for table in tables.values()}) == 2
    before = {name: table.detach().clone() for name, table in tables.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.enable_grad():
        tokens = torch.arange(14).reshape(2, 7)
        if kind == "vit":
            output = model(torch.randn(2, 3, 8, 12))
        elif kind in ("encoder", "decoder"):
            output = model(tokens, tokens)
        else:
            output = model(tokens).hidden if kind == "bert" else model(tokens)
        (output * torch.randn_like(output)).sum().backward()
    optimizer.step()
    moved = [name for name, table in tables.items() if not torch.equal(table, before[name])]
    assert len(moved) == 2
    again = reload(model, tmp_path)
    for name, table in tables.items():
        assert torch.equal(dict(again.named_parameters())[name], table)
    first, second = (table.detach() for table in tables.values())
    assert not torch.equal(first, second)
    assert torch.equal(run(again), run(model.eval()))


def test_a_bias_keeps_the_values_it_was_given_and_is_not_shared():
    bias = RelativeTable(3, distance=4)
    with torch.no_grad():
        bias.table.normal_()
    model = GPT(GPTConfig(**TEXT, attention=Attention(bias=bias)))
    layers: list[Any] = [block.attention for block in model.blocks]
    for layer in layers:
        assert layer.score_bias is layer.attention.bias is not bias
        assert torch.equal(layer.score_bias.table, bias.table)
    assert layers[0].score_bias is not layers[1].score_bias


def test_a_configuration_from_text_builds_layers_with_values_of_their_own():
    config = GPTConfig.from_dict(GPTConfig(**TEXT, attention=Attention(bias=RelativeTable(3, distance=4))).to_dict())
    before = torch.get_rng_state()
    GPTConfig.from_dict(config.to_dict())
    assert torch.equal(torch.get_rng_state(), before)  # reading draws nothing
    tables = [block.attention.score_bias.table for block in GPT(config).blocks]
    assert not tables[0].is_meta
    assert not torch.equal(tables[0], tables[1])
    torch.manual_seed(7)
    once = GPT(config)
    torch.manual_seed(7)
    assert all(map(torch.equal, once.state_dict().values(), GPT(config).state_dict().values()))


def test_dtypes_can_be_changed_while_loading(tmp_path: Path):
    model = build("gpt", Attention(bias=Alibi(3, slopes=[0.1, 1 / 3, 2.0])))
    wide = reload(model, tmp_path, dtype=torch.float64)
    assert torch.equal(run(wide), run(model.double()))  # slopes are exact in either


def test_position_alibi_is_exact_in_float64_after_loading(tmp_path: Path):
    model = build("gpt", None, position="alibi", heads=12).double()  # some slopes are no float32 numbers
    assert torch.equal(run(reload(model, tmp_path)), run(model))


# What cannot be written


class Own(Bias):
    """A bias of a user's class."""

    def scores(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        return (query_position - key_position).float()[None] * 0.1

    def score(self, head: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        return (query_position - key_position).float() * 0.1 + 0.0 * head


class Wider(RelativeTable):
    """A known class with other scores."""


UNWRITABLE = {
    "even": Attention(pattern=Window(3, 0) | Where(even)),
    "Mask(": Attention(pattern=Mask(torch.ones(7, 7, dtype=torch.bool).tril())),
    "sigmoid": Attention(feature_map=torch.sigmoid),
    "tensor of shape (3, 7, 7)": Attention(bias=torch.linspace(0, 1, 147).reshape(3, 7, 7)),
    "Own()": Attention(bias=Own()),
    "Wider(heads=3, distance=4)": Attention(bias=Wider(3, distance=4)),
    "encoding=": Attention(bias=TransformerXL(3, dim=4, encoding=lambda delta: torch.stack([delta, delta**2], -1))),
}


@pytest.mark.parametrize("kind", ["gpt", "bert", "vit", "encoder", "decoder"])
@pytest.mark.parametrize("name", UNWRITABLE)
def test_what_has_no_text_runs_and_is_refused_when_it_is_saved(tmp_path: Path, kind: str, name: str):
    model = build(kind, UNWRITABLE[name])
    assert run(model).isfinite().all()
    with pytest.raises(ConfigError, match="cannot be written as text") as caught:
        model.save_pretrained(tmp_path / "saved")
    assert_four_parts(caught.value, name.split("(")[0])
    assert not (tmp_path / "saved" / "config.json").exists()
    if kind != "vit":
        return
    with pytest.raises(RegardError):
        model.save_pretrained(tmp_path / "saved", layout="timm")


@pytest.mark.parametrize("kind", MODELS)
def test_a_description_that_is_set_by_hand_is_refused_when_it_is_saved(tmp_path: Path, kind: str):
    model = build(kind, None)
    stack = getattr(model, kind, None) or model.blocks
    stack[1].attention.attention = dataclasses.replace(stack[1].attention.attention, pattern=Window(1, 0))
    with pytest.raises(CheckpointError, match="no longer the one of its configuration") as caught:
        model.save_pretrained(tmp_path)
    assert_four_parts(caught.value, "1.attention", "Window(1, 0)", "attention=")


# Other layouts


def test_layouts_without_descriptions_refuse_them(tmp_path: Path):
    described = Attention(pattern=Strided(2))
    for kind, layouts in {"gpt": ["huggingface"], "bert": ["huggingface"], "vit": ["huggingface", "timm"]}.items():
        for layout in layouts:
            with pytest.raises(CheckpointError, match=f"layout '{layout}'") as caught:
                build(kind, described).save_pretrained(tmp_path, layout=layout)
            assert_four_parts(caught.value, "Strided(2)")
    for kind in ("encoder", "decoder"):
        with pytest.raises(CheckpointError, match="layout 'torch'") as caught:
            build(kind, described).to_checkpoint("torch")
        assert_four_parts(caught.value, f"{kind}_attention", "Strided(2)")


@pytest.mark.parametrize(
    ("given", "window", "layers"),
    [
        (Attention(), None, None),
        (Attention(pattern=Causal()), None, None),
        (Attention(pattern=Window(3, 0)), 3, None),
        (Attention(pattern=Causal() & Window(3, 5)), 3, None),
        (Attention(pattern=Window(3, 5)), 3, None),
        ((Attention(pattern=Causal()), Attention(pattern=Window(3, 0))), 3, (1,)),
    ],
)
def test_sliding_windows_are_written_as_other_libraries_have_them(tmp_path: Path, given: Any, window: Any, layers: Any):
    llama = {"norm": "rms", "position": "rotary", "feed_forward": "swiglu", "bias": False}
    model = build("gpt", given, **llama, attention_bias="qkv")
    config, state = model.to_checkpoint("huggingface")
    again = GPT.from_checkpoint(config, state)
    assert (again.config.window, again.config.window_layers, again.config.attention) == (window, layers, None)
    assert torch.equal(run(again), run(model))


def test_what_is_no_single_window_is_not_simplified():
    for given in (
        (Attention(pattern=Window(3, 0)), Attention(pattern=Window(2, 0))),
        Attention(pattern=Window(3, 0, step=2)),
        Attention(pattern=Window(3, 0), scale=1.0),
        Attention(bias=Alibi(3)),
    ):
        config = GPTConfig(**TEXT, attention=given)
        assert config.simplify() is config
    both = GPTConfig(**TEXT, attention=Attention(pattern=Window(3, 0)), window=2)
    assert both.simplify() == GPTConfig(**TEXT, window=2)  # the smaller of two windows
    plain = GPTConfig(**TEXT, attention=Attention(), window=2, window_layers=(0,))
    assert plain.simplify() == GPTConfig(**TEXT, window=2, window_layers=(0,))


def test_plain_descriptions_are_left_out_of_other_layouts():
    bert = build("bert", Attention(pattern=Full()))
    assert Bert.from_checkpoint(*bert.to_checkpoint()).config.attention is None
    vit = build("vit", (Attention(), Attention()))
    assert ViT.from_checkpoint(*vit.to_checkpoint("timm"), "timm").config.attention is None
    translator = build("decoder", Attention(pattern=Causal()), final_norm=True)
    assert Transformer.from_checkpoint(*translator.to_checkpoint("torch"), "torch").config.decoder_attention is None
