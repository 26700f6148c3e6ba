"""Errata of TTIC 31230's problems on transformers: scores, and the time of a parallel machine."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional as F

from regard.attention import attend
from regard.biases import Quadratic
from regard.book.errata.erratum import Trial, erratum

DOUBLE = torch.float64


@erratum(
    "ttic-1:scale",
    "TTIC 1, definition",
    "incomplete",
    claim=(
        "Self-attention has no factor $1/\\sqrt U$ and no output matrix; the note gives $Z$ where it means the weights."
    ),
    correction=(
        "Transformers have both. $Z = \\sum e^{s}$ is the normaliser, and the weights are $\\alpha = e^{s} / Z$."
    ),
)
def _scale() -> Iterator[Trial]:
    for tokens in (2, 3, 5):
        query, key, value = (torch.randn(1, 1, tokens, 4, dtype=DOUBLE) for _ in range(3))
        exponentials = (query @ key.mT / 2).exp()
        corrected = exponentials / exponentials.sum(-1, keepdim=True) @ value
        claimed = attend(query, key, value, scale=1.0)
        yield Trial(f"{tokens} tokens, U = 4", claimed, F.scaled_dot_product_attention(query, key, value), corrected)


def _reduce_in_pairs(count: int) -> int:
    """Steps of a machine that adds neighbours, all pairs at once, until one number is left."""
    steps = 0
    while count > 1:
        count, steps = (count + 1) // 2, steps + 1
    return steps


@erratum(
    "ttic-1b:serial-sum",
    "TTIC 1b, solution",
    "wrong",
    claim="With serial inner products the layer takes $O(J + \\ln T)$: the sum over $T$ values is counted as a tree.",
    correction=(
        "That sum is an inner product over $T$ as well: serial, it takes $T$ steps, so the time is $O(J + T)$."
    ),
)
def _serial_sum() -> Iterator[Trial]:
    for tokens in (2, 4, 16, 32):
        width = 4
        before_output = width + width + 2 + _reduce_in_pairs(tokens)  # projections, scores, and the softmax by a tree
        case = f"J = U = {width}, T = {tokens}: steps until the last output is there"
        claimed = before_output + 1 + _reduce_in_pairs(tokens)
        yield Trial(case, claimed, _run_with_depth(tokens, width), before_output + tokens)


class _Timed(NamedTuple):
    """A number that knows when it is there: one step after the later of the two that it was made from."""

    value: float
    step: int = 0

    def combine(self, other: _Timed, value: float) -> _Timed:
        return _Timed(value, max(self.step, other.step) + 1)


def _serial_product(left: list[_Timed], right: list[_Timed]) -> _Timed:
    """An inner product whose terms are added one after the other."""
    terms = [a.combine(b, a.value * b.value) for a, b in zip(left, right, strict=True)]
    return functools.reduce(lambda total, term: total.combine(term, total.value + term.value), terms)


def _add_as_tree(terms: list[_Timed]) -> _Timed:
    while len(terms) > 1:
        pairs = [a.combine(b, a.value + b.value) for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[2 * len(pairs) :]
    return terms[0]


def _run_with_depth(tokens: int, width: int) -> int:
    """Self-attention of one query, number by number: the step at which its last output is there."""
    draw = torch.randn(tokens + 3 * width, width, dtype=DOUBLE).tolist()
    rows = [[_Timed(value) for value in row] for row in draw]
    x, weights = rows[:tokens], [rows[tokens + part * width : tokens + (part + 1) * width] for part in range(3)]
    query, key, value = ([[_serial_product(row, w) for w in part] for row in x] for part in weights)
    exponentials = []
    for k in key:
        score = _serial_product(query[0], k)
        exponentials.append(_Timed(math.exp(score.value), score.step + 1))
    total = _add_as_tree(exponentials)
    alpha = [e.combine(total, e.value / total.value) for e in exponentials]
    outputs = [_serial_product(alpha, [v[channel] for v in value]) for channel in range(width)]
    made = torch.tensor([[[number.value for number in row] for row in part] for part in (query, key, value)])
    expected = torch.softmax(made[0, 0] @ made[1].T, 0) @ made[2]
    assert torch.allclose(torch.tensor([output.value for output in outputs]), expected, atol=1e-5)
    return max(output.step for output in outputs)


@erratum(
    "ttic-1:stable-softmax",
    "TTIC 1, solution",
    "incomplete",
    claim="A softmax over $T$ scores needs one reduction, the sum.",
    correction=(
        "In floating point it needs the largest score first: a second reduction of $\\lceil \\lg T \\rceil$ "
        "steps, the same order."
    ),
)
def _stable_softmax() -> Iterator[Trial]:
    for tokens in (2, 5, 64):
        scores = torch.linspace(-800, 800, tokens, dtype=DOUBLE)
        naive = scores.exp() / scores.exp().sum()
        stable = (scores - scores.max()).exp()
        assert _reduce_in_pairs(tokens) == math.ceil(math.log2(tokens))
        yield Trial(f"{tokens} scores up to 800", naive, torch.softmax(scores, 0), stable / stable.sum())


@erratum(
    "ttic-2:name",
    "TTIC 2",
    "garbled",
    claim='Attention by positions is called a "so-called spatial transformer".',
    correction=(
        "A spatial transformer network (Jaderberg et al. 2015) resamples an image by an affine map; attention by "
        "relative positions"
        " is a mean over neighbours. At the identity the first copies the image, the second blurs it."
    ),
)
def _name() -> Iterator[Trial]:
    for size in (3, 5):
        image = torch.rand(1, 1, size, size, dtype=DOUBLE)
        grid = F.affine_grid(torch.eye(2, 3, dtype=DOUBLE)[None], [1, 1, size, size], align_corners=True)
        resampled = F.grid_sample(image, grid, align_corners=True)
        places = torch.cartesian_prod(*(torch.arange(size, dtype=DOUBLE),) * 2)
        weights = (-(torch.cdist(places, places) ** 2)).softmax(1)
        computed = (weights @ image.flatten()).view_as(image)
        bias = Quadratic(1, (size, size), centre=torch.zeros(1, 2), alpha=1.0, dtype=DOUBLE)
        tokens = image.flatten()[None, None, :, None]
        attended = attend(torch.zeros_like(tokens), torch.zeros_like(tokens), tokens, scale=0.0, bias=bias)
        yield Trial(f"an image of {size} x {size}", resampled, computed, attended.detach().view_as(image))
