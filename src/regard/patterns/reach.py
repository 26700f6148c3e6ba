"""How many layers a pattern needs until every token has heard of every other."""

from __future__ import annotations

import torch

from regard.patterns.base import Pattern


def layers_to_connect(*layers: Pattern, tokens: int) -> int | None:
    """The number of layers after which every query depends on every key, or `None` if that never happens.

    The patterns are applied in turn, again and again: `layers_to_connect(GridWindow(...), GridStride(...),
    tokens=256)` asks about a model that alternates them. With residual connections a token always keeps itself.

        >>> layers_to_connect(Window(1, 1), tokens=12)
        11
    """
    masks = [pattern.matrix(tokens).reshape(-1, tokens, tokens)[0] for pattern in layers]
    heard, still = torch.eye(tokens, dtype=torch.float32), 0
    for depth in range(1, len(masks) * (tokens + 1) + 1):
        before = heard
        heard = ((masks[(depth - 1) % len(masks)].float() @ heard + heard) > 0).float()
        if bool((heard > 0).all()):
            return depth
        still = still + 1 if torch.equal(before, heard) else 0
        if still >= len(masks):
            return None
    return None
