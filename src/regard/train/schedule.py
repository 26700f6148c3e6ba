"""Learning-rate schedules, as functions of the step."""

from __future__ import annotations

import math

from regard.train.recipe import Recipe


def learning_rate_at(recipe: Recipe, step: int, steps: int) -> float:
    r"""The learning rate of a step, counted from 0, with `w = warmup_steps` (below 1 a share of all steps).

        rate (step + 1) / w                                                         for step < w, then
        cosine      low + (rate - low) (1 + cos(pi (step - w) / (steps - w))) / 2
        linear      low + (rate - low) (steps - step) / (steps - w)
        constant    rate
        noam        rate dim^-1/2 min(s^-1/2, s w^-3/2), s = step + 1               for all steps

    Sources: Loshchilov and Hutter, SGDR (ICLR 2017), without restarts; Vaswani et al. (2017), equation 3.

    >>> from regard.train import SpatialRecipe
    >>> recipe = SpatialRecipe(learning_rate=1.0, warmup_steps=0.25)
    >>> [round(learning_rate_at(recipe, step, 8), 3) for step in range(8)]
    [0.5, 1.0, 1.0, 0.933, 0.75, 0.5, 0.25, 0.067]
    """
    rate, low = recipe.learning_rate, min(recipe.min_learning_rate, recipe.learning_rate)
    warm = math.ceil(recipe.warmup_steps * steps if recipe.warmup_steps < 1 else recipe.warmup_steps)
    if recipe.schedule == "noam":
        dim = recipe.dim  # pyright: ignore[reportAttributeAccessIssue] (a recipe without it is refused)
        return rate * dim**-0.5 * min((step + 1) ** -0.5, (step + 1) * max(warm, 1) ** -1.5)
    if step < warm:
        return rate * (step + 1) / warm
    if recipe.schedule == "constant":
        return rate
    done = (step - warm) / max(steps - warm, 1)
    share = 1 - done if recipe.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return low + (rate - low) * max(share, 0.0)
