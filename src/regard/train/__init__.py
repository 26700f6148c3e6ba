"""Training: recipes and tasks for images and text, and one loop that runs them."""

from regard.train.data.images import Images, ImageSplit
from regard.train.head_analysis import Answer, analyze_heads
from regard.train.loop import Interrupted, train
from regard.train.parallel import Parallelism
from regard.train.pruning import Pruned, degenerate_heads, prune, prune_run
from regard.train.recipe import Recipe, read_recipe
from regard.train.run import Evaluation, Run
from regard.train.saved_run import read_history, read_run
from regard.train.task import Task
from regard.train.tasks.bert import BertRecipe
from regard.train.tasks.gpt import GPTRecipe
from regard.train.tasks.images import (
    DaViTRecipe,
    ImageRecipe,
    ResNetRecipe,
    SpatialRecipe,
    ViTRecipe,
    accuracy,
)
from regard.train.tasks.text_classification import TextClassificationRecipe
from regard.train.tasks.translate import TranslationRecipe
from regard.train.teacher_student import TeacherRecipe, TeacherResult, train_student

__all__ = [
    "Answer",
    "BertRecipe",
    "DaViTRecipe",
    "Evaluation",
    "GPTRecipe",
    "ImageRecipe",
    "ImageSplit",
    "Images",
    "Interrupted",
    "Parallelism",
    "Pruned",
    "Recipe",
    "ResNetRecipe",
    "Run",
    "SpatialRecipe",
    "Task",
    "TeacherRecipe",
    "TeacherResult",
    "TextClassificationRecipe",
    "TranslationRecipe",
    "ViTRecipe",
    "accuracy",
    "analyze_heads",
    "degenerate_heads",
    "prune",
    "prune_run",
    "read_history",
    "read_recipe",
    "read_run",
    "train",
    "train_student",
]
