"""The tasks that models are trained on, one module each; importing this package registers their recipes."""

from regard.train.tasks import bert, gpt, images, translate

__all__ = ["bert", "gpt", "images", "translate"]
