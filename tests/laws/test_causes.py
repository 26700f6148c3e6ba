"""Of several broken laws the likeliest cause is listed first."""

from __future__ import annotations

import pytest
from plain import slow
from zoo.catalogue import EXHIBITS
from zoo.exhibit import Exhibit

from regard.laws import LAWS, check
from regard.laws.causes import FOLLOWS, ORDER, rank_causes

BY_NAME = {exhibit.id: exhibit for exhibit in EXHIBITS}
# Faults of which the tables say another law first than the one that the fault was filed under: a hidden value that
# counts is padding that counts, a row that looks at others looks at their padding, and a wrong Jacobian is a gradient.
OTHERWISE = {"L5-after": "padding", "L10-scale": "padding", "L21-diagonal": "gradients"}
# One of each pair of laws that was seen to break together; half precision takes longest.
SAMPLE = (
    pytest.param("L4-half-overflow", marks=pytest.mark.slow),
    *("CA8", "L22-running", "L23-squeeze", "SM3"),
    *slow("PA1", "L12-functional", "L13-scale"),
)


def first_cause(exhibit: Exhibit) -> tuple[str, int]:
    claims = exhibit.claims
    report = check(exhibit.build("faulty"), kind=exhibit.kind, claims=claims, fast=True, **exhibit.options)
    return next(iter(report.causes)), len(report.causes)


def test_every_law_has_a_place_and_no_law_follows_from_itself():
    assert set(ORDER) == {law.slug for law in LAWS} | {"reference"}
    assert set(FOLLOWS) <= set(ORDER)
    for cause, effects in FOLLOWS.items():
        assert set(effects) <= set(ORDER)
        assert not any(cause in FOLLOWS.get(effect, ()) for effect in effects), cause


def rank(slugs: list[str]) -> dict[str, str]:
    return rank_causes({slug: {} for slug in slugs})


def test_what_follows_from_nothing_stands_before_what_follows():
    assert rank(["jacobian", "gradients", "cost"]) == {"gradients": "", "cost": "", "jacobian": "gradients"}
    assert rank(["padding", "empty-rows"]) == {"empty-rows": "", "padding": ""}
    assert rank(["empty-rows", "masked-values"]) == {"masked-values": "", "empty-rows": "masked-values"}
    assert rank(["padding"]) == {"padding": ""}
    assert rank([]) == {}


def test_a_mask_that_only_half_precision_disobeys_is_the_cause_and_not_the_path():
    masked, unmasked = ({"path": "float16", "mask": mask} for mask in ("left", "none"))
    half, wide = {"side": "left", "dtype": "float16"}, {"side": "left"}
    assert rank_causes({"paths": masked, "padding": half}) == {"padding": "", "paths": "padding"}
    assert rank_causes({"paths": unmasked, "padding": half}) == {"paths": "", "padding": "paths"}
    assert rank_causes({"paths": masked, "padding": wide}) == {"paths": "", "padding": "paths"}
    assert rank_causes({"paths": {"path": "compiled", "mask": "left"}, "padding": half})["padding"] == "paths"
    assert rank_causes({"paths": masked, "causality": half})["causality"] == "paths"


@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_that_breaks_several_laws_is_named_by_its_own(name: str):
    cause, _ = first_cause(BY_NAME[name])
    assert cause in BY_NAME[name].law


@pytest.mark.slow
@pytest.mark.long
def test_every_fault_of_the_zoo_is_named_by_its_own_law_first():
    wrong, several = {}, 0
    for exhibit in EXHIBITS:
        cause, count = first_cause(exhibit)
        several += count > 1
        if cause not in exhibit.law and OTHERWISE.get(exhibit.id) != cause:
            wrong[exhibit.id] = cause
    assert wrong == {}
    assert several > 30
