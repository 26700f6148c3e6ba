"""Configurations round-trip through JSON, and refuse unknown fields."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from agreement import refused

from regard.errors import ConfigError
from regard.models import BertConfig, DaViTConfig, GPTConfig, SpatialConfig, TransformerConfig, ViT, ViTConfig
from regard.models.config import Config


@dataclass(frozen=True)
class Tower(Config):
    dim: int
    depths: tuple[int, ...] = (1, 2)
    window: tuple[int, int] = (3, 5)
    rate: float = 0.5
    tied: bool = True
    norm: Literal["layer", "rms"] = "layer"
    hidden: int | None = None


@dataclass(frozen=True)
class Steeple(Tower):
    """One that checks for itself, and may rely on the types."""

    bells: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.dim % 2 == 0 or sum(self.depths) + sum(self.window) + self.rate < 0:
            raise ConfigError("Steeples are odd.", because="an even one falls", instead="dim=7")


def test_a_configuration_survives_json():
    tower = Tower(dim=7, depths=(2, 3, 5), rate=1, norm="rms", hidden=11)
    assert Tower.from_dict(json.loads(json.dumps(tower.to_dict()))) == tower


def test_fields_left_out_have_their_defaults():
    assert Tower.from_dict({"dim": 7}) == Tower(dim=7)


def test_an_unknown_field_is_refused_and_the_nearest_is_named():
    with pytest.raises(ConfigError, match="has no field 'depth'") as caught:
        Tower.from_dict({"dim": 7, "depth": [1]})
    assert caught.value.instead == "depths=[1]"
    assert "depths" in caught.value.because


def test_an_unknown_field_like_no_other_is_refused_too():
    with pytest.raises(ConfigError, match="leave it out"):
        Tower.from_dict({"dim": 7, "zzz": 1})


def test_a_missing_field_without_default_is_named():
    with pytest.raises(ConfigError, match="needs 'dim'"):
        Tower.from_dict({"rate": 0.1})


@pytest.mark.parametrize(
    ("field", "value", "because"),
    [
        ("dim", "7", "dim is int"),
        ("dim", True, "dim is int"),
        ("dim", 7.5, "dim is int"),
        ("dim", None, "dim is int"),
        ("depths", [1, "2"], "depths is tuple"),
        ("depths", 3, "depths is tuple"),
        ("window", [3], "window is tuple"),
        ("rate", "0.1", "rate is float"),
        ("tied", 1, "tied is bool"),
        ("norm", "batch", "one of 'layer', 'rms'"),
        ("hidden", "x", "hidden is int or None"),
    ],
)
@pytest.mark.parametrize("build", [Tower.from_dict, lambda fields: Tower(**fields), lambda fields: Steeple(**fields)])
def test_a_value_of_another_type_is_refused_with_the_type_it_should_have(build, field, value, because):
    with pytest.raises(ConfigError) as caught:
        build({"dim": 7} | {field: value})
    assert because in caught.value.because
    assert caught.value.asked.startswith(f"{field}={value!r}")


@pytest.mark.parametrize(("field", "value"), [("hidden", None), ("hidden", 3), ("rate", 2), ("window", (3, 5))])
def test_a_value_of_its_type_is_taken(field: str, value: object):
    assert getattr(Tower.from_dict({"dim": 7, field: value}), field) == value


@pytest.mark.parametrize(
    "fields",
    [{"dim": 10**30}, {"dim": -(10**30)}, {"dim": 7, "depths": (3, 10**30)}, {"dim": 7, "hidden": 2**63}],
)
def test_a_size_beyond_64_bits_is_refused(fields):
    with refused(ConfigError, next(reversed(fields)), "64-bit"):
        Tower(**fields)
    assert Tower(2**63 - 1, rate=1e30).rate == 1e30  # rates are floats, and may be large


def test_lists_become_tuples_however_a_configuration_is_built():
    steeple = Steeple(7, depths=[2, 3], bells=[[1, 2], (3, 5)])  # pyright: ignore[reportArgumentType]
    assert (steeple.depths, steeple.bells) == ((2, 3), ((1, 2), (3, 5)))
    assert steeple == Steeple.from_dict(json.loads(json.dumps(steeple.to_dict())))
    assert hash(steeple) == hash(dataclasses.replace(steeple, window=[3, 5]))


def test_a_subclass_still_checks_for_itself():
    with pytest.raises(ConfigError, match="Steeples are odd"):
        Steeple(8)


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: GPTConfig(heads="12"), "heads is int"),
        (lambda: GPTConfig(dim=24.0), "dim is int"),
        (lambda: GPTConfig(norm_eps=-1.0), "norm_eps=-1.0"),
        (lambda: BertConfig(dropout=True), "dropout is float"),
        (lambda: TransformerConfig(norm_eps=math.inf), "norm_eps=inf"),
        (lambda: ViTConfig(image=224), "image is tuple[int, int]"),
        (lambda: ViTConfig(norm_eps=math.nan), "norm_eps=nan"),
        (lambda: SpatialConfig(layers=-1), "layers=-1"),
        (lambda: SpatialConfig(dim=0), "dim=0"),
        (lambda: SpatialConfig(patch=0), "patch=0"),
        (lambda: SpatialConfig(classes=0), "classes=0"),
        (lambda: SpatialConfig(dropout=2.0), "dropout=2.0"),
        (lambda: SpatialConfig(attention_dropout=2.0), "attention_dropout=2.0"),
        (lambda: DaViTConfig(eps=-1.0), "eps=-1.0"),
        (lambda: DaViTConfig(expansion=-1.0), "hidden channel"),
        (lambda: DaViTConfig(expansion=0.01), "hidden channel"),
        (lambda: DaViTConfig(expansion=math.nan), "hidden channel"),
    ],
)
def test_no_model_is_built_of_what_it_cannot_use(build, word):
    with refused(ConfigError, word):
        build()


def test_a_list_is_as_good_an_image_as_a_tuple():
    config = ViTConfig(image=[8, 12], patch=4, classes=5, dim=6, layers=1, heads=2)  # pyright: ignore[reportArgumentType]
    assert config.image == (8, 12)
    assert ViT(config)(torch.zeros(1, 3, 8, 12)).shape == (1, 5)
