"""Formulas by hand, in letters for every size: one for each description, layer and model of Regard.

A rule takes the target, the sizes that are asked for and how it is run, and returns named parts with their formulas
and the number of every letter. `pieces.py` has what rules are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from regard.biases import Bias
from regard.cost.asked import Asked, Counted
from regard.cost.rules import attention, layers, text, vision
from regard.cost.setting import Setting

Rule = Callable[[Any, Asked, Setting], Counted]
RULES: dict[type, Rule] = {**attention.RULES, **layers.RULES, **text.RULES, **vision.RULES}
# What modules with a rule are made of beside one another.
PARTS = {nn.Dropout, nn.Identity, nn.ModuleList, nn.Sequential, *layers.PARTS, *text.PARTS, *vision.PARTS}


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
