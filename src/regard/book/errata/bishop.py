"""Errata of the solutions to Bishop & Bishop, Deep Learning, chapter 12, and of one note of Prince's chapter 12."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from regard.book.errata.erratum import Trial, erratum
from regard.book.errata.single_head import attend_rows

DOUBLE = torch.float64


@erratum(
    "bis-12.2:exponents",
    "Bishop 12.2, solution",
    "garbled",
    claim=(
        "The weights are $a_{nm} = e^{\\sum_k x_m} / \\sum_{m'} e^{\\sum_k x_{m'}}$: the exponent does not "
        "contain $x_n$."
    ),
    correction="The exponent is the inner product $x_n^\\top x_m$, and the weights of a row sum to 1.",
)
def _exponents() -> Iterator[Trial]:
    for tokens in (2, 3, 5):
        x = torch.randn(tokens, 2, dtype=DOUBLE)
        claimed = x.sum(1).softmax(0).expand(tokens, tokens)
        computed = attend_rows(x, x, torch.eye(tokens, dtype=DOUBLE), scale=1.0)
        scores = (x @ x.T).exp()
        yield Trial(f"{tokens} tokens of width 2", claimed, computed, scores / scores.sum(1, keepdim=True))


@erratum(
    "bis-12.7:dropped-permutation",
    "Bishop 12.7, solution, last line of the chain",
    "wrong",
    claim=(
        "Permuting the tokens ends in $\\mathrm{Att}(XW^q, XW^k, XW^v)$, without $P$: attention would be invariant."
    ),
    correction=(
        "The $P$ of the line before stays: $\\mathrm{MHA}(PX) = P\\,\\mathrm{MHA}(X)$. Attention is "
        "equivariant, not invariant."
    ),
)
def _dropped_permutation() -> Iterator[Trial]:
    from regard.layers import MultiHeadAttention

    for tokens in (2, 3, 7):
        layer = MultiHeadAttention(4, 2).to(DOUBLE)
        x = torch.randn(1, tokens, 4, dtype=DOUBLE)
        order = torch.arange(tokens).roll(1)
        with torch.no_grad():
            yield Trial(f"{tokens} tokens, rolled by one", layer(x), layer(x[:, order]), layer(x)[:, order])


@erratum(
    "udl-notes:bigbird",
    "Prince, notes of chapter 12",
    "garbled",
    claim="BigBird is ascribed to Ainslie et al. (2020), whose ETC attends to a window and to global tokens only.",
    correction=(
        "BigBird is by Zaheer et al. (2020): window, global and random keys; without random keys it is another pattern."
    ),
)
def _bigbird() -> Iterator[Trial]:
    from regard.patterns import First, Random, Window

    for tokens in (8, 32):
        sparse = Window(1, 1) | First(1)
        bigbird = sparse | Random(2, seed=0)
        union = sparse.matrix(tokens) | Random(2, seed=0).matrix(tokens)
        yield Trial(f"pairs of {tokens} tokens", sparse.pairs(tokens), bigbird.pairs(tokens), int(union.sum()))
