"""Errata of a deep-learning course's homework on attention, problem 1.3: what self-attention becomes at its limits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.book.errata.erratum import Trial, attempt, erratum
from regard.book.errata.single_head import attend_rows
from regard.layers.limits import mean_pooling, running_linear, shift_attention

DOUBLE = torch.float64


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


@erratum(
    "nyu-1.3a:shapes",
    "NYU 1.3a, solution",
    "wrong",
    claim="$Q_i \\in R^{d'h \\times e}$, and $O_i$ projects the values a second time.",
    correction=(
        "$W_i^Q \\in R^{d' \\times e}$, $Q_i = W_i^Q X \\in R^{d' \\times n}$, $O_i = V_i A_i$, $W^O \\in R^{e "
        "\\times hd''}$."
    ),
)
def _shapes() -> Iterator[Trial]:
    heads, dim = 2, 3
    for width, tokens in ((4, 5), (6, 2)):
        weight, x = _random(dim, width), _random(width, tokens)
        case = f"h = {heads}, d' = {dim}, e = {width}, n = {tokens}: shape of Q_i"
        yield Trial(case, (dim * heads, width), tuple((weight @ x).shape), (dim, tokens))


@erratum(
    "nyu-1.3c:permutation",
    "NYU 1.3c, solution",
    "incomplete",
    claim="With a large $\\beta$, self-attention is a permutation of its inputs.",
    correction=(
        "It is a selection: it needs $W^O W^V = I$ and an arg-max that is a bijection. Here the longer token wins "
        "for both queries."
    ),
)
def _permutation() -> Iterator[Trial]:
    yield from (
        _select(torch.tensor(tokens, dtype=DOUBLE))
        for tokens in (((1.0, 0.0), (3.0, 1.0)), ((1.0, 0.0), (0.0, 2.0), (3.0, 1.0)))
    )


def _select(x: Tensor) -> Trial:
    computed = attend_rows(x, x, x, scale=math.inf)
    best = (x @ x.T).argmax(1)
    different = len({tuple(row) for row in computed.tolist()})
    return Trial(
        f"tokens {[tuple(row) for row in x.tolist()]}: different outputs", len(x), different, len(set(best.tolist()))
    )


@erratum(
    "nyu-1.3d:mean",
    "NYU 1.3d, solution",
    "wrong",
    claim="$\\beta = 0$ gives a linear layer that runs over the tokens.",
    correction=(
        "$\\beta = 0$ gives the mean over all tokens; $A = I$ gives the linear layer on each token, a "
        "convolution with a kernel of one."
    ),
)
def _mean() -> Iterator[Trial]:
    linear = nn.Linear(3, 2).to(DOUBLE)
    for tokens in (1, 2, 5):
        x = _random(1, tokens, 3)
        with torch.no_grad():
            uniform, running = mean_pooling(linear)(x), running_linear(linear)(x)
            convolution = F.conv1d(x.mT, linear.weight[..., None], linear.bias).mT
            mean = linear(x.mean(1, keepdim=True)).expand_as(uniform)
            claimed, computed, corrected = map(_join, ((convolution, running), (uniform, running), (mean, convolution)))
            yield Trial(f"{tokens} tokens: (beta = 0, A = I)", claimed, computed, corrected)


def _join(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


@erratum(
    "nyu-1.3e:convolution",
    "NYU 1.3e, solution",
    "wrong",
    claim="With a $\\beta$ that is neither large nor small, self-attention is a convolution.",
    correction=(
        "Weights that depend on content are not shift-invariant filters. One hard head for each tap, at a fixed "
        "offset, and an"
        " output projection make a convolution."
    ),
)
def _convolution() -> Iterator[Trial]:
    # A convolution is linear in its input: twice the input, twice the output.
    taps = _random(3, 2, 2)
    hard = shift_attention([-1, 0, 1], taps, dim=64, scale=math.inf)
    for tokens in (2, 3, 7):
        x = _random(tokens, 2)
        soft = [attend_rows(each, each, each, scale=1.0) for each in (x, 2 * x)]
        with torch.no_grad():
            padded = F.pad(x.T[None], (1, 1), mode="replicate")
            agrees = torch.allclose(hard(x[None])[0].T[None], F.conv1d(padded, taps.permute(1, 2, 0)), atol=1e-9)
        is_linear = torch.allclose(soft[1], 2 * soft[0], rtol=1e-6)
        yield Trial(
            f"{tokens} tokens: (beta = 1 is linear, hard heads are a convolution)",
            (True, True),
            (is_linear, agrees),
            (False, True),
        )


@erratum(
    "nyu-1.3a:undefined-head",
    "NYU 1.3a, solution",
    "garbled",
    claim="$O_i$ is built from $V W_i^V$, which is $(e \\times n)(d'' \\times e)$.",
    correction="The value projection stands on the left, once: $V_i = W_i^V X$ and $O_i = V_i A_i$.",
)
def _undefined_head() -> Iterator[Trial]:
    for tokens in (2, 5):
        x, weight = _random(4, tokens), _random(3, 4)
        value = weight @ x
        computed = attend_rows(x.T, x.T, value.T, scale=1.0).T
        claimed = attempt(lambda x=x, weight=weight: x @ weight)
        yield Trial(f"e = 4, d'' = 3, n = {tokens}", claimed, computed, value @ (x.T @ x).softmax(0))
