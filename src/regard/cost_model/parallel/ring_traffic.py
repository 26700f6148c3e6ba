"""The keys that each device sends when a sequence is cut over several, exactly and, where there is one, as a formula.

Of c devices that share N tokens, with N divisible by c (by 2 c for zigzag), the one that sends most sends

    Full, Causal          (c - 1) N / c         its own tokens to all others, at worst
    a window of w keys    w min(2, c - 1)       zigzag: the ends of its two chunks; w <= N / (2 c)
                          min(w, (c - 1) N / c) contiguous: the end of its chunk

Any other pattern has the number that `plan_exchange` finds for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from regard.cost_model.symbols import size_symbols
from regard.distributed.exchange import PIECE_TOKENS, PIECES, Exchange, Piece, plan_exchange
from regard.distributed.sequence_layout import SequenceLayout
from regard.patterns import Pattern
from regard.patterns.submatrix import count_tokens

N, c, w = size_symbols("N c w")
MOST_COUNTED = 1 << 16  # tokens for which the pairs of an unknown pattern are counted


@dataclass(frozen=True)
class RingTokens:
    """Keys that travel for one attention.

    Attributes:
        sent, received: of every device, in tokens.
        most: what the device that sends most of them sends, as a formula; `values` are the numbers of its letters.
        most_received: what the device that receives most of them receives.
        steps: in how many messages, for these sizes.
        piece: the largest that arrives at once; `largest_piece` is its number.
        imbalance: pairs of the busiest device over the mean.
        is_counted: whether `imbalance` was counted; 1 is assumed where it was not.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    most: sympy.Expr
    most_received: sympy.Expr
    values: dict[sympy.Symbol, Any]
    steps: sympy.Expr
    piece: sympy.Expr
    largest_piece: int
    imbalance: float = 1.0
    is_counted: bool = True


def find_ring_tokens(pattern: Pattern, layout: SequenceLayout) -> RingTokens:
    """What `ring_attend` sends for a pattern, in tokens; keys and values are as wide as the model has them."""
    exchanges = [plan_exchange(pattern, layout, layout, rank) for rank in range(layout.processes)]
    sent = tuple(each.keys_sent for each in exchanges)
    received = tuple(each.keys_received for each in exchanges)
    steps = max(sum(1 for transfer in each.transfers if transfer.sent) for each in exchanges)
    pieces = [piece.count for each in exchanges for piece in _list_received(each)]
    known: dict[sympy.Symbol, Any] = {N: sympy.Integer(layout.tokens), c: sympy.Integer(layout.processes)}
    values: dict[sympy.Symbol, Any] = {}
    most: Any = sympy.Integer(max(sent))
    for formula, letters in _list_closed_forms(pattern, layout.kind):
        if formula.xreplace(known | letters) == most:
            most, values = formula, letters
            break
    largest = max(pieces, default=0)
    limit = sympy.Max(PIECE_TOKENS, sympy.ceiling(N / (PIECES * c)))
    known |= values
    candidates = (sympy.Min(each, limit) for each in ((w, 2 * w) if values else (N / c,)) if most.free_symbols)
    piece = next((each for each in candidates if each.xreplace(known) == largest), sympy.Integer(largest))
    imbalance, is_counted = _find_imbalance(pattern, layout, exchanges)
    return RingTokens(
        sent, received, most, most if max(sent) == max(received) else sympy.Integer(max(received)), values,
        steps=sympy.Integer(steps),
        piece=piece,
        largest_piece=largest,
        imbalance=imbalance, is_counted=is_counted,
    )  # fmt: skip


def _list_received(exchange: Exchange) -> list[Piece]:
    return [transfer.received for transfer in exchange.transfers if transfer.received is not None]


def _list_closed_forms(pattern: Pattern, kind: str) -> list[tuple[Any, dict[sympy.Symbol, Any]]]:
    if pattern.is_full or pattern.is_causal:
        return [((c - 1) * N / c, {})]
    window = pattern.sliding_window
    if window is None:
        return []
    formula = w * sympy.Min(2, c - 1) if kind == "zigzag" else sympy.Min(w, (c - 1) * N / c)
    return [(formula, {w: sympy.Integer(window)})]


def _find_imbalance(pattern: Pattern, layout: SequenceLayout, exchanges: list[Exchange]) -> tuple[float, bool]:
    size, tokens = layout.processes, layout.tokens
    if pattern.is_full or (pattern.is_causal and layout.kind == "zigzag"):
        return size * max(layout.count(rank) for rank in range(size)) / tokens, True
    if pattern.is_causal:
        chunk = tokens / size
        return size * (chunk * (size - 1) + (chunk + 1) / 2) * chunk / (tokens * (tokens + 1) / 2), True
    if tokens > MOST_COUNTED:
        return 1.0, False
    pairs = []
    for exchange in exchanges:
        pieces = [piece for piece in (exchange.local, *_list_received(exchange)) if piece is not None]
        pairs.append(sum(piece.pattern.pairs(count_tokens(piece.queries), piece.count) for piece in pieces))
    return (size * max(pairs) / sum(pairs) if sum(pairs) else 1.0), True
