"""The derivations by hand, held against published numbers and against real runs of random small models."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cost_model import derivations, third_party_models
from cost_model.counting import Counter, count
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def test_parameters_are_the_published_ones() -> None:
    assert derivations.bert(1, 1).parameters == 109_482_240
    assert derivations.bert(1, 1, width=1024, layers=24, hidden=4096).parameters == 335_141_888
    assert derivations.gpt2(1, 1).parameters == 124_439_808
    assert derivations.gpt2(1, 1, width=1600, layers=48).parameters == 1_557_611_200
    assert derivations.vit(1, (224, 224)).parameters == 86_567_656
    assert derivations.vit(1, (384, 384), built_for=(384, 384)).parameters == 86_859_496
    assert derivations.davit(1, (224, 224)).parameters == 28_360_168
    assert derivations.davit(1, (224, 224), depths=(1, 1, 9, 1)).parameters == 49_745_896
    assert derivations.swin(1).parameters == 28_288_354
    assert derivations.swin(1, depths=(2, 2, 18, 2)).parameters == 49_606_258  # Swin-S
    assert derivations.t5(1, 1, 1).parameters == 60_506_624
    base = {"width": 768, "hidden": 3072, "layers": 12, "heads": 12}
    assert derivations.t5(1, 1, 1, **base).parameters == 222_903_552  # T5-base
    assert derivations.gpt2(1, 1).bytes == 497_759_232


def test_products_are_the_published_ones() -> None:
    assert derivations.vit(1, (224, 224)).forward == 17_563_828_224
    assert derivations.davit(1, (224, 224)).forward == 4_521_801_216
    assert derivations.davit(1, (224, 224), depths=(1, 1, 9, 1)).forward == 8_773_012_992
    # The paper prints 4.5 G for Swin-T and 8.7 G for Swin-S.
    assert round(derivations.swin(1).forward / 1e9, 1) == 4.5
    assert round(derivations.swin(1, depths=(2, 2, 18, 2)).forward / 1e9, 1) == 8.7
    # One word through GPT-2: every parameter of a matrix once, and one score and one sum in each layer.
    matrices = 12 * 12 * 768**2 + 768 * 50257
    assert derivations.gpt2(1, 1).forward == matrices + 12 * 2 * 768


def _text(draw: random.Random) -> dict[str, Any]:
    heads = draw.randint(1, 3)
    return {
        "heads": heads,
        "width": 4 * heads * draw.randint(1, 3),
        "layers": draw.randint(1, 3),
        "vocab_size": draw.randint(5, 40),
    }


def _bert(draw: random.Random) -> tuple[nn.Module, dict[str, Any], derivations.Derived]:
    sizes = _text(draw) | {"hidden": draw.randint(3, 29), "positions": 31, "kinds": draw.randint(1, 3)}
    batch, tokens = draw.randint(1, 3), draw.randint(2, 31)
    return (
        third_party_models.bert(**sizes),
        {"input_ids": third_party_models.words(batch, tokens)},
        derivations.bert(batch, tokens, **sizes),
    )


def _gpt2(draw: random.Random) -> tuple[nn.Module, dict[str, Any], derivations.Derived]:
    sizes = _text(draw) | {"positions": 31, "head": draw.random() < 0.7}
    batch, tokens = draw.randint(1, 3), draw.randint(2, 31)
    return (
        third_party_models.gpt2(**sizes),
        {"input_ids": third_party_models.words(batch, tokens)},
        derivations.gpt2(batch, tokens, **sizes),
    )


def _t5(draw: random.Random) -> tuple[nn.Module, dict[str, Any], derivations.Derived]:
    sizes = _text(draw) | {"hidden": draw.randint(3, 29), "size": draw.randint(2, 7), "buckets": 8}
    sizes["decoder_layers"] = draw.randint(1, 3)
    batch, context, tokens = draw.randint(1, 3), draw.randint(2, 17), draw.randint(2, 13)
    inputs = {
        "input_ids": third_party_models.words(batch, context),
        "decoder_input_ids": third_party_models.words(batch, tokens),
    }
    return third_party_models.t5(**sizes), inputs, derivations.t5(batch, context, tokens, **sizes)


def _vit(draw: random.Random) -> tuple[nn.Module, dict[str, Any], derivations.Derived]:
    heads, patch = draw.randint(1, 3), draw.randint(2, 5)
    width = 4 * heads * draw.randint(1, 3)
    image = (patch * draw.randint(1, 5), patch * draw.randint(1, 5))
    sizes = {"built_for": image, "patch": patch, "channels": draw.randint(1, 4), "width": width, "heads": heads}
    sizes |= {"layers": draw.randint(1, 3), "hidden": width * draw.randint(1, 4), "classes": draw.randint(2, 11)}
    batch = draw.randint(1, 3)
    inputs = {"x": third_party_models.picture(batch, image, sizes["channels"])}
    return third_party_models.vit(**sizes), inputs, derivations.vit(batch, image, **sizes)


def _davit(draw: random.Random) -> tuple[nn.Module, dict[str, Any], derivations.Derived]:
    stages = draw.randint(1, 4)
    heads = tuple(draw.randint(1, 3) for _ in range(stages))
    sizes = {
        "heads": heads,
        "widths": tuple(4 * count * draw.randint(1, 2) for count in heads),
        "depths": tuple(draw.randint(1, 2) for _ in heads),
        "window": draw.randint(2, 5),
        "channels": draw.randint(1, 4),
        "classes": draw.randint(2, 11),
        "ratio": draw.randint(1, 4),
    }
    batch, image = draw.randint(1, 2), (draw.randint(9, 60), draw.randint(9, 60))
    inputs = {"x": third_party_models.picture(batch, image, sizes["channels"])}
    return third_party_models.davit(**sizes), inputs, derivations.davit(batch, image, **sizes)


def _swin(draw: random.Random) -> tuple[nn.Module, dict[str, Any], derivations.Derived]:
    stages, patch = draw.randint(1, 3), draw.randint(2, 4)
    sizes = {
        "heads": tuple(draw.randint(1, 2) * 2**stage for stage in range(stages)),
        "width": 8 * draw.randint(1, 2),
        "depths": tuple(draw.randint(1, 3) for _ in range(stages)),
        "window": draw.randint(2, 5),
        "patch": patch,
        "channels": draw.randint(1, 4),
        "classes": draw.randint(2, 11),
        "ratio": draw.randint(1, 4),
    }
    # timm halves the sides it builds for downwards and those it runs upwards, so only even ones are the same.
    even = patch * 2 ** (stages - 1)
    batch, image = draw.randint(1, 2), (even * draw.randint(2, 7), even * draw.randint(2, 7))
    inputs = {"x": third_party_models.picture(batch, image, sizes["channels"])}
    return third_party_models.swin(image=image, **sizes), inputs, derivations.swin(batch, image, **sizes)


RANDOM = {"bert": _bert, "gpt2": _gpt2, "t5": _t5, "vit": _vit, "davit": _davit, "swin": _swin}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 4))])
@pytest.mark.parametrize("name", RANDOM)
def test_a_derivation_is_what_a_random_model_does(name: str, seed: int) -> None:
    model, inputs, derived = RANDOM[name](random.Random(f"{name} {seed}"))
    assert derived.parameters == sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad(), FlopCounterMode(display=False) as theirs, Counter() as ours:
        model(**inputs)
    assert derived.forward == ours.macs
    assert derived.forward == theirs.get_total_flops() // 2
    assert derived.weights == ours.exponentials
    assert derived.backward == count(model, backward=True, learns_input=False, **inputs).macs
