"""Training of image classifiers with positional heads, recorded epoch by epoch."""

from regard.train.data.images import Images, ImageSplit
from regard.train.loop import Interrupted, accuracy, read_history, read_run, train
from regard.train.pruning import Pruned, degenerate_heads, prune, prune_run
from regard.train.recipe import Recipe, SpatialRecipe, ViTRecipe, read_recipe
from regard.train.run import Epoch, Run
from regard.train.teacher_student import TeacherRecipe, TeacherResult, train_student

__all__ = [
    "Epoch",
    "ImageSplit",
    "Images",
    "Interrupted",
    "Pruned",
    "Recipe",
    "Run",
    "SpatialRecipe",
    "TeacherRecipe",
    "TeacherResult",
    "ViTRecipe",
    "accuracy",
    "degenerate_heads",
    "prune",
    "prune_run",
    "read_history",
    "read_recipe",
    "read_run",
    "train",
    "train_student",
]
