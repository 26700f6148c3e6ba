"""Train on real images, and watch where heads learn to look."""

from regard.train.data.images import Images, Part
from regard.train.loop import Interrupted, accuracy, read_run, train
from regard.train.recipe import Recipe, SpatialRecipe, ViTRecipe, read_recipe
from regard.train.run import Epoch, Run

__all__ = [
    "Epoch",
    "Images",
    "Interrupted",
    "Part",
    "Recipe",
    "Run",
    "SpatialRecipe",
    "ViTRecipe",
    "accuracy",
    "read_recipe",
    "read_run",
    "train",
]
