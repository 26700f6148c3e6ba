"""The tasks that models are trained on, one module each; importing this package registers their recipes."""

from regard.train.tasks import bert, gpt, images, text_classification, translate

__all__ = ["bert", "gpt", "images", "text_classification", "translate"]
