"""The receptive field of stacked layers: how many of them a pattern needs."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.errors import PatternError
from regard.patterns.arguments import check_integer
from regard.patterns.base import Pattern


def layers_to_connect(*layers: Pattern, tokens: int) -> int | None:
    """The number of layers until every receptive field covers the sequence, or `None` if that never happens.

        R_0 = I,     R_d = R_{d-1} | M_d R_{d-1},     the smallest d with R_d >= C

    M_d: the mask of layer `d`, 1 where a query may see a key; R_d: row `i` is the receptive field of token `i` after
    `d` layers, with residual connections, so that a token keeps what it has; products are boolean. C is what has to be
    covered: all tokens, or for layers with a direction all tokens on that side. Layers have a direction when none of
    them sees a later key (a decoder: all tokens up to the query itself), or none an earlier one.

    The patterns are applied in turn, again and again: `layers_to_connect(GridWindow(...), GridStride(...), tokens=256)`
    is about a model that alternates them. Where a pattern differs between batch rows, every row has to be covered.

        >>> layers_to_connect(Window(1, 1), tokens=12)
        11
        >>> layers_to_connect(Causal(), tokens=16), layers_to_connect(Window(2, 0), tokens=16)  # of decoders
        (1, 8)
        >>> layers_to_connect(Causal() & Blocks(4), tokens=16)  # no layer attends beyond its block
    """
    masks = _read_masks(layers, tokens)
    period = masks[0]
    for mask in masks[1:]:
        period = _compose(mask, period)
    everything = _find_coverable(period)
    # Receptive fields only grow, so the number of periods is found by doubling and then by halving. A field that still
    # grows does so by a token a period at least: after `tokens` of them it has stopped.
    powers = [period]
    while not _covers(powers[-1], everything):
        if 2 ** (len(powers) - 1) >= tokens:
            return None
        powers.append(_compose(powers[-1], powers[-1]))
    field, depth = torch.eye(tokens, dtype=torch.bool), 0
    for exponent in range(len(powers) - 2, -1, -1):
        longer = _compose(powers[exponent], field)
        if not _covers(longer, everything):
            field, depth = longer, depth + len(masks) * 2**exponent
    for mask in masks:
        field, depth = _compose(mask, field), depth + 1
        if _covers(field, everything):
            break
    return depth


def _read_masks(layers: tuple[Pattern, ...], tokens: int) -> list[Tensor]:
    """The masks of one period with the residual connection, `(row, query, key)`."""
    if not layers or not all(isinstance(pattern, Pattern) for pattern in layers):
        raise PatternError(
            "A receptive field needs the patterns of its layers.",
            asked=f"layers_to_connect({', '.join(repr(pattern) for pattern in layers)})",
            because="every layer has a pattern that says which keys a query sees",
            instead="layers_to_connect(Window(1, 1), tokens=12)",
        )
    if check_integer("layers_to_connect", "tokens", tokens) < 1:
        raise PatternError(
            "A receptive field needs a sequence.",
            asked=f"tokens={tokens}",
            because="a sequence without tokens has nothing to cover",
            instead="tokens=1 or more",
        )
    same = torch.eye(tokens, dtype=torch.bool)
    return [pattern.matrix(tokens).reshape(-1, tokens, tokens) | same for pattern in layers]


def _find_coverable(period: Tensor) -> Tensor:
    """What the receptive fields can hold at most, `(query, key)`: all tokens, or those on one side of the query."""
    everything = torch.ones(period.shape[-2:], dtype=torch.bool)
    if not bool(period.triu(1).any()):
        return everything.tril()
    return everything if bool(period.tril(-1).any()) else everything.triu()


def _covers(field: Tensor, everything: Tensor) -> bool:
    return bool((field | ~everything).all())


def _compose(later: Tensor, earlier: Tensor) -> Tensor:
    """The receptive field of a layer after others: the union of the fields of the keys that it sees."""
    return later.float() @ earlier.float() > 0
