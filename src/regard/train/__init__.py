"""Training of image classifiers with positional heads, recorded epoch by epoch."""

from regard.train.data.images import Images, Part
from regard.train.lesson import Lesson, TeacherRecipe, teacher
from regard.train.loop import Interrupted, accuracy, read_history, read_run, train
from regard.train.pruning import Pruned, degenerate_heads, prune, prune_run
from regard.train.recipe import Recipe, SpatialRecipe, ViTRecipe, read_recipe
from regard.train.run import Epoch, Run

__all__ = [
    "Epoch",
    "Images",
    "Interrupted",
    "Lesson",
    "Part",
    "Pruned",
    "Recipe",
    "Run",
    "SpatialRecipe",
    "TeacherRecipe",
    "ViTRecipe",
    "accuracy",
    "degenerate_heads",
    "prune",
    "prune_run",
    "read_history",
    "read_recipe",
    "read_run",
    "teacher",
    "train",
]
