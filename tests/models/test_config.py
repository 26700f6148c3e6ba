"""Configurations go to JSON and come back the same, and refuse what they do not know."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import pytest

from regard.errors import ConfigError
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


def test_a_configuration_survives_json():
    tower = Tower(dim=7, depths=(2, 3, 5), rate=1, norm="rms", hidden=11)
    assert Tower.from_dict(json.loads(json.dumps(tower.to_dict()))) == tower


def test_fields_left_out_have_their_defaults():
    assert Tower.from_dict({"dim": 7}) == Tower(dim=7)


def test_an_unknown_field_is_refused_and_the_nearest_is_named():
    with pytest.raises(ConfigError, match="does not know 'depth'") as caught:
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
def test_a_value_of_another_type_is_refused_with_the_type_it_should_have(field: str, value: object, because: str):
    with pytest.raises(ConfigError) as caught:
        Tower.from_dict({"dim": 7} | {field: value})
    assert because in caught.value.because


@pytest.mark.parametrize(("field", "value"), [("hidden", None), ("hidden", 3), ("rate", 2), ("window", (3, 5))])
def test_a_value_of_its_type_is_taken(field: str, value: object):
    assert getattr(Tower.from_dict({"dim": 7, field: value}), field) == value
