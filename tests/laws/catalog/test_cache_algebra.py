"""Cache algebra: reordering and cropping, by methods and on bare trees."""

from __future__ import annotations

import pytest
from caches import RIGHT, WRONG_ALGEBRA, Returned
from plain import slow_but

from regard.laws import check

CANNOT = ("inside", "switched")  # nothing there reorders or crops


@pytest.mark.parametrize("name", slow_but(("window", "filled", "inside", "model"), RIGHT))
def test_a_cache_that_is_right_obeys_the_law(name):
    target, kind = RIGHT[name]
    verdict = check(target, kind=kind, claims=["cache-algebra"], seed=3, fast=True).verdicts["cache-algebra"]
    assert verdict.outcome == ("not applicable" if name in CANNOT else "holds")
    assert verdict.refused == 0


@pytest.mark.parametrize("name", WRONG_ALGEBRA)
def test_a_cache_that_is_wrong_breaks_the_law(name):
    verdict = check(WRONG_ALGEBRA[name], kind="layer", claims=["cache-algebra"]).verdicts["cache-algebra"]
    assert verdict.outcome == "broken"
    assert verdict.counterexample is not None
    assert ("cropped" if "crop" in name or "trim" in name else "reordered") in verdict.counterexample.changed


def test_a_reorder_of_the_module_is_tried_too():
    class Reordering(Returned):
        def reorder_cache(self, cache, index):
            return cache if self.fault else (cache[0][index], cache[1][index], cache[2])

    assert check(Reordering(), kind="layer", claims=["cache-algebra"], fast=True).ok
    assert not check(Reordering(fault="keeps the order"), kind="layer", claims=["cache-algebra"], fast=True).ok
