"""Formulas by hand, in letters for every size: one for each description, layer and model of Regard.

A rule takes the target, the sizes that are asked for and how it is run, and returns named parts with their formulas
and the number of every letter. `pieces.py` has what rules are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from regard.biases import Bias
from regard.cost_model.asked import Asked, Counted
from regard.cost_model.rules import attention, layers, text, vision
from regard.cost_model.setting import Setting
from regard.errors import CostError
from regard.layers import GridPositions

Rule = Callable[[Any, Asked, Setting], Counted]
RULES: dict[type, Rule] = {**attention.RULES, **layers.RULES, **text.RULES, **vision.RULES}
# What modules with a rule are made of beside one another.
PARTS = {nn.Dropout, nn.Identity, nn.ModuleList, nn.Sequential, *layers.PARTS, *text.PARTS, *vision.PARTS}


# What reads rows of tokens, for which an image has no meaning.
TEXT = {*text.RULES, *(kind for kind in layers.RULES if kind not in vision.RULES and kind is not GridPositions)}


def check_sizes(target: Any, asked: Asked) -> None:
    """Refuses a size that would be ignored: one that a module has itself, or an image where a text is read."""
    if not isinstance(target, nn.Module):
        return
    name = type(target).__name__
    for size in ("heads", "kv_heads", "dim", "value_dim"):
        if getattr(asked, size) is not None:
            raise CostError(
                f"{name} has sizes of its own.",
                asked=f"{size}={getattr(asked, size)}",
                because=f"{size} is for a description, such as Attention(...), which has none",
                instead=f"a {name} of that size, asked about without {size}",
            )
    if asked.image is not None and type(target) in TEXT:
        raise CostError(
            f"{name} is asked about an image.",
            asked=f"cost({name}, image={asked.image})",
            because="it reads tokens in a row",
            instead=f"tokens={asked.image[0] * asked.image[1]}",
        )


def rule_for(target: Any) -> Rule | None:
    """The rule for exactly this class, made of exactly the classes it knows: one that inherits may do something else.

    A block with somebody's own norm, or a layer that was exchanged for another, has to be followed instead.
    """
    rule = RULES.get(type(target))
    if rule is not None and isinstance(target, nn.Module) and not all(_is_known(part) for part in target.modules()):
        return None
    return rule


def _is_known(part: nn.Module) -> bool:
    return type(part) in RULES or type(part) in PARTS or isinstance(part, Bias)
