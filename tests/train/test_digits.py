"""The digits are learned: what the documents report, within what chance does."""

import pytest

from regard.models.spatial import POSITIONS
from regard.train import SpatialRecipe, ViTRecipe, train

RECIPES = {**{position: SpatialRecipe(position=position) for position in POSITIONS}, "vit": ViTRecipe()}


# A training takes a minute and a half; one in continuous integration.
names = [pytest.param(name, marks=[] if name == "vit" else pytest.mark.long) for name in RECIPES]


@pytest.mark.slow
@pytest.mark.parametrize("name", names)
def test_at_least_97_of_100_digits_are_named_rightly(name):
    run = train(RECIPES[name])
    assert run.accuracy >= 0.97
    assert run.evaluations[0].accuracy < 0.3
