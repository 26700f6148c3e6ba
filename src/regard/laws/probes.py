"""Properties of a subject that are measured where they are not declared.

Laws that do not apply to every subject call these first: whether the order of tokens matters, whether later
tokens are hidden from earlier ones, whether positions are counted from the left edge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.adapters import attention_watch
from regard.adapters.base import Adapter
from regard.adapters.rng import Rng
from regard.laws.compare import FACTOR, compare
from regard.laws.law import Observation, expect_equal

_KNOWN: WeakKeyDictionary[Adapter, dict[str, bool]] = WeakKeyDictionary()


def agree_up_to_rounding(subject: Adapter, expected: Tensor, actual: Tensor, where: Tensor | None = None) -> bool:
    """Whether two outputs agree up to rounding."""
    if expected.shape != actual.shape:
        return False
    factor = FACTOR[torch.float64] if subject.eps < 1e-12 else FACTOR[torch.float32]
    reduction = subject.channels + (expected.shape[1] if expected.ndim > 1 else 1)
    return compare(expect_equal(expected, actual, where=where, reduction=reduction), subject.eps, factor).ratio <= 1


def find_magnitude(output: Tensor) -> float:
    """The largest number of an output, for bounds of rounding; non-finite ones do not count."""
    numbers = output.detach()
    numbers = numbers[numbers.isfinite()]
    return (float(numbers.abs().max()) if numbers.numel() else 0.0) or 1.0


def expect_same_output(
    subject: Adapter, expected: Tensor, actual: Tensor, terms: int, beside: Tensor | None = None, **how: Any
) -> Observation:
    """An observation that two outputs agree up to the rounding of sums over `terms` tokens and the channels.

    Rounding is relative to the largest number of `beside`, of `expected` if None.
    """
    scale = find_magnitude(expected if beside is None else beside)
    return expect_equal(expected, actual, reduction=terms + subject.channels, scale=scale, **how)


def draw_other_content(subject: Adapter, x: Tensor, rng: Rng, factor: float = 1.0) -> Tensor:
    """Other content of the same kind, other at every token."""
    fresh = subject.scaled(x, factor, rng)
    for _ in range(64):
        if fresh.is_floating_point() or not (again := fresh == x).any():
            break
        fresh = torch.where(again, subject.scaled(x, factor, rng), fresh)
    return fresh


def takes_length(subject: Adapter, tokens: int) -> bool:
    """Whether the subject takes this length."""
    return tokens > 0 and subject.lengths(tokens)[0] == tokens


def is_causal(subject: Adapter) -> bool:
    """Whether later tokens change nothing earlier, as far as a short sequence shows."""
    return _measure_once(subject, "causal", _measure_causality)


def counts_positions(subject: Adapter) -> bool:
    """Whether a token that is repeated gives other outputs elsewhere: absolute positions, or edges that show.

    Attention over equal values is that value whatever the weights, so relative positions do not show here.
    """
    return _measure_once(subject, "positions", _measure_positions)


def make_generating_permutations(tokens: int) -> list[Tensor]:
    """Two orders from which every other can be made: move all by one, and swap the first two."""
    swap = torch.arange(tokens)
    swap[:2] = swap[:2].flip(0)
    return [torch.arange(tokens).roll(1), swap]


@torch.no_grad()
def ignores_order(subject: Adapter, x: Tensor) -> bool:
    """Whether, without a mask, tokens in any other order give the same outputs in that order."""
    try:
        before = subject.run(x)
        for order in make_generating_permutations(x.shape[1]):
            expected = before[:, order] if "aligned" in subject.abilities else before
            if not agree_up_to_rounding(subject, expected, subject.run(x[:, order])):
                return False
    except Exception:  # what cannot be run in another order does not ignore it
        return False
    return True


def owes_left_padding(subject: Adapter, x: Tensor, hidden: int) -> bool:
    """Whether `hidden` tokens on the left may be taken away together with their mask.

    The declared convention decides. Without one: yes if the subject is causal or counts no absolute positions, and if
    the pairs that interact are the same when everything moves by `hidden` places (blocks and first tokens do not).
    """
    if subject.conventions.left is not None:
        return subject.conventions.left
    if "aligned" not in subject.abilities:
        return ignores_order(subject, x)
    if "causality" not in subject.context and not is_causal(subject) and counts_positions(subject):
        return False
    return _moves_with_its_tokens(subject, x, hidden)


@torch.no_grad()
def _moves_with_its_tokens(subject: Adapter, x: Tensor, hidden: int) -> bool:
    """Whether a token reaches the same others when the first `hidden` tokens are not there. No mask is given."""
    x, tokens = x[:1], x.shape[1]
    other = draw_other_content(subject, x, Rng(0, "moved"))
    try:
        long, short = subject.run(x), subject.run(x[:, hidden:])
        for place in sorted({hidden, (hidden + tokens) // 2, tokens - 1}):
            changed = x.clone()
            changed[:, place] = other[:, place]
            reached = [
                _find_changed_rows(subject, long, subject.run(changed))[hidden:],
                _find_changed_rows(subject, short, subject.run(changed[:, hidden:])),
            ]
            if not torch.equal(*reached):
                return False
    except Exception:  # what cannot be measured is not asked for
        return False
    return True


def _find_changed_rows(subject: Adapter, before: Tensor, after: Tensor) -> Tensor:
    apart = (before - after).double().abs().nan_to_num(0.0).flatten(2).amax(-1)[0]
    return apart > 16 * subject.eps * find_magnitude(before)


def _measure_once(subject: Adapter, trait: str, measure: Callable[[Adapter], bool]) -> bool:
    known = _KNOWN.setdefault(subject, {})
    if trait not in known:
        known[trait] = measure(subject)
    return known[trait]


@torch.no_grad()
def _measure_causality(subject: Adapter) -> bool:
    if "aligned" not in subject.abilities or "lengths" not in subject.abilities:
        return False
    rng = Rng(0, "causal")
    try:
        tokens = subject.lengths(7)[0]
        x = subject.draw(2, tokens, rng)
        other, before = draw_other_content(subject, x, rng), subject.run(x)
        for kept in sorted({1, tokens // 2, tokens - 1} - {0, tokens}):
            early = torch.arange(tokens).expand(2, tokens) < kept
            changed = torch.where(early.reshape(2, tokens, *[1] * (x.ndim - 2)), x, other)
            if not agree_up_to_rounding(subject, before, subject.run(changed), where=early):
                return False
    except Exception:  # what cannot be measured is not asked for
        return False
    return tokens > 1


@torch.no_grad()
def _measure_positions(subject: Adapter) -> bool:
    if "aligned" not in subject.abilities or "lengths" not in subject.abilities:
        return True
    try:
        tokens = subject.lengths(7)[0]
        x = subject.draw(1, tokens, Rng(0, "positions"))
        x = x[:, :1].expand_as(x).clone()
        output = subject.run(x)
        return not agree_up_to_rounding(subject, output[:, :1].expand_as(output), output)
    except Exception:  # what cannot be measured is not asked for
        return True


def find_visible_lengths(subject: Adapter) -> list[int]:
    """Lengths at which the subject's weights can be observed without mistaking another axis for tokens."""
    try:
        with torch.no_grad():
            found = []
            for tokens in attention_watch.fair_lengths(subject, 3, 11, 67, 131, 13, 7):
                x = subject.draw(2, tokens, Rng(0, "weights"))
                if not any(weights.shape[-2:] == (tokens, tokens) for weights in subject.weights(x)):
                    break
                found.append(tokens)
        return found
    except Exception:  # a third-party module may fail in any way while it is traced
        return []


def table_coarseness(subject: Adapter) -> float:
    """How much coarser tables of positions may be than the computation, in bounds.

    Tokens that move meet other entries of a table, which is often kept in the precision that the subject came in.
    """
    if subject.eps > 1e-12:
        return 1.0
    eps = max(torch.finfo(subject.native).eps, torch.finfo(torch.float32).eps)
    return eps / subject.eps * FACTOR[torch.float32] / FACTOR[torch.float64]
