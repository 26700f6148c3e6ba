"""Errata of a deep-learning course's homework on attention, problems 1.1 and 1.2. Tokens are columns, as there."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from regard.book.errata.erratum import Trial, attempt, erratum
from regard.book.errata.single_head import attend_rows
from regard.calculus import perturb_key, softmax

DOUBLE = torch.float64
SCORES = torch.tensor([1.0, 2.0, 3.0], dtype=DOUBLE)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE)


@erratum(
    "nyu-1.1a:values",
    "NYU 1.1a",
    "garbled",
    claim=(
        "$V \\in R^{t \\times M}$ with an $M$ that appears nowhere else; read as the $n$ queries, $H = VA$ is "
        "undefined."
    ),
    correction="$V \\in R^{t \\times m}$: one value for each of the $m$ keys.",
)
def _values() -> Iterator[Trial]:
    for queries, keys in ((2, 2), (2, 3), (5, 4)):
        key, query = _random(3, keys), _random(3, queries)
        weights = softmax(key.T @ query, dim=0)  # (m, n)
        defined = [not _is_undefined(lambda w=width, a=weights: _random(4, w) @ a) for width in (queries, keys)]
        yield Trial(f"n = {queries}, m = {keys}: V of this width can be multiplied", defined[0], defined[1], True)


def _is_undefined(compute: object) -> bool:
    return not isinstance(attempt(compute), Tensor)  # type: ignore[arg-type]


@erratum(
    "nyu-1.1b:sign",
    "NYU 1.1b, solution",
    "wrong",
    claim="softargmax is $e^{-\\beta z_i} / \\sum_j e^{-\\beta z_j}$.",
    correction="$e^{+\\beta z_i} / \\sum_j e^{\\beta z_j}$. With the minus sign it is the softargmin.",
)
def _sign() -> Iterator[Trial]:
    for beta in (0.5, 1.0, 4.0):
        exponentials = [(sign * beta * SCORES).exp() for sign in (-1, 1)]
        claimed, corrected = (each / each.sum() for each in exponentials)
        yield Trial(f"z = (1, 2, 3), beta = {beta:g}", claimed, softmax(SCORES, beta=beta), corrected)


@erratum(
    "nyu-1.1b:argmin",
    "NYU 1.1b, solution",
    "wrong",
    claim="With $\\beta = 1$ we get the argmin.",
    correction="$\\beta = 1$ is the ordinary softmax; the arg-max is the limit $\\beta \\to \\infty$.",
)
def _argmin() -> Iterator[Trial]:
    one_hot = torch.eye(3, dtype=DOUBLE)
    exponentials = SCORES.exp()
    yield Trial("z = (1, 2, 3), beta = 1", one_hot[0], softmax(SCORES, beta=1.0), exponentials / exponentials.sum())
    yield Trial("z = (1, 2, 3), beta = inf", one_hot[0], softmax(SCORES, beta=float("inf")), one_hot[2])


@erratum(
    "nyu-1.1b:what-grows",
    "NYU 1.1b, solution",
    "garbled",
    claim="$\\beta = 1/\\sqrt d$ keeps the entries of $A$ from growing.",
    correction=(
        "Entries of $A$ are in $[0, 1]$ whatever $\\beta$. The scores have standard deviation $\\sqrt d$, and it "
        "is their growth,"
        " which saturates the softmax, that $1/\\sqrt d$ undoes. (The sum is over the $m$ keys, not over $d$.)"
    ),
)
def _what_grows() -> Iterator[Trial]:
    from regard.calculus import dot_product_moments

    for dim in (4, 64, 1024):
        query, key = _random(50, dim), _random(50, dim)
        scores = query @ key.T
        grows = bool(softmax(scores).max() > 1), bool(scores.std() > 1.5)
        std = dot_product_moments(dim).variance ** 0.5
        yield Trial(
            f"d = {dim}, unscaled: (weights above 1, scores wider than 1.5)", (True, False), grows, (False, std > 1.5)
        )


@erratum(
    "nyu-1.1c:limit",
    "NYU 1.1c, solution",
    "wrong",
    claim=("$H = V$ for $\\beta \\to 1$, and the rows and the columns of $A$ sum to 1."),
    correction=(
        "At $\\beta = 1$ nothing is copied. For $\\beta \\to \\infty$ each column of $A$ selects the best key (ties "
        "average), and only columns sum to 1: two queries may select the same value, so $H = V$ only for the "
        "identity selection."
    ),
)
def _limit() -> Iterator[Trial]:
    for tokens in (2, 3, 5):
        key, query, value = _random(2, tokens), _random(2, tokens), _random(3, tokens)
        query[:, 1] = query[:, 0]  # two queries that agree
        scores = key.T @ query
        for beta in (1.0, math.inf):
            computed = attend_rows(query.T, key.T, value.T, scale=beta).T
            corrected = value @ scores.softmax(0) if beta == 1 else value[:, scores.argmax(0)]
            yield Trial(
                f"H for {tokens} tokens, the first two queries equal, beta = {beta:g}", value, computed, corrected
            )
        times_chosen = torch.bincount(scores.argmax(0), minlength=tokens).double()
        rows = softmax(scores, beta=math.inf, dim=0).sum(1)
        yield Trial(f"sums of the rows of A for {tokens} tokens, beta = inf", torch.ones_like(rows), rows, times_chosen)


@erratum(
    "nyu-1.1c:words",
    "NYU 1.1c and d, solution",
    "garbled",
    claim='It is called a "fully concentrated network" with a "space weight matrix".',
    correction=(
        "Attention is a fully connected layer with the weight matrix $A^T \\otimes I$: sparse in the limit, one "
        "entry in each"
        " row, and dense with entries $1/m$ for $\\beta = 0$."
    ),
)
def _words() -> Iterator[Trial]:
    for tokens, channels in ((2, 1), (3, 2), (5, 3)):
        key, query, value = _random(2, tokens), _random(2, tokens), _random(channels, tokens)
        for beta, nonzero in ((float("inf"), 1), (0.0, tokens)):
            weights = softmax(key.T @ query, beta=beta, dim=0)
            matrix = torch.kron(weights.T.contiguous(), torch.eye(channels, dtype=DOUBLE))
            columns = attend_rows(query.T, key.T, value.T, scale=beta).flatten()
            assert torch.allclose(matrix @ value.T.flatten(), columns)
            filled = int((matrix[0] != 0).sum())
            case = (
                f"m = {tokens}, t = {channels}, beta = {beta:g}: nonzero entries in a row of the fully connected layer"
            )
            yield Trial(case, tokens * channels, filled, nonzero)


@erratum(
    "nyu-1.1d:uniform",
    "NYU 1.1d, solution",
    "wrong",
    claim="For $\\beta = 0$, $H_{ij} = 1/d$.",
    correction="$A_{ij} = 1/m$, and each column of $H$ is the mean of the values.",
)
def _uniform() -> Iterator[Trial]:
    for keys, dim in ((2, 2), (3, 2), (5, 4)):
        key, query, value = _random(dim, keys), _random(dim, 2), _random(3, keys)
        computed = attend_rows(query.T, key.T, value.T, scale=0.0).T
        claimed = torch.full((3, 2), 1 / dim, dtype=DOUBLE)
        yield Trial(f"m = {keys}, d = {dim}", claimed, computed, value.mean(1, keepdim=True).expand(3, 2))


@erratum(
    "nyu-1.1e:perturbation",
    "NYU 1.1e, solution",
    "wrong",
    claim="A perturbed key $k + \\varepsilon$ has its weight scaled down, always.",
    correction=(
        "$a' = \\sigma(\\mathrm{logit}\\,a + \\beta \\varepsilon^T q)$: up or down as the sign of $\\varepsilon^T "
        "q$; the output moves"
        " on the segment between the value and the mean of the others."
    ),
)
def _perturbation() -> Iterator[Trial]:
    query, key, value = _random(3), _random(4, 3), _random(4, 2)
    weights = softmax(key @ query)
    for size in (0.1, 1.0, 10.0):
        for sign in (-1, 1):
            change = sign * size
            moved = key.clone()
            moved[0] += change * query / (query @ query)
            law = perturb_key(weights[:1], (weights @ value)[None], value[0], torch.tensor([change], dtype=DOUBLE))
            rises = bool(softmax(moved @ query)[0] > weights[0])
            output = attend_rows(query[None], moved, value, scale=1.0)
            assert torch.allclose(law.output, output)
            yield Trial(f"beta eps.q = {change:+g}: the weight rises", False, rises, bool(law.weight[0] > weights[0]))


@erratum(
    "nyu-1.1f:elongation",
    "NYU 1.1f, solution",
    "wrong",
    claim=(
        "A key that is $\\alpha$ times as long has its weight scaled by $1/\\alpha$, and the others rise by "
        "$\\alpha/(m-1)$."
    ),
    correction=(
        "The odds of the key are multiplied by $e^{\\beta(\\alpha-1) k^T q}$, up or down as the sign of $k^T q$; "
        "the others share"
        " one factor $(1-a')/(1-a)$, whatever $m$."
    ),
)
def _elongation() -> Iterator[Trial]:
    for keys in (2, 3, 6):
        query, key = _random(3), _random(keys, 3)
        before = softmax(key @ query)
        longer = key.clone()
        longer[0] *= 2
        odds = before[0] / (1 - before[0]) * (key[0] @ query).exp()
        raised = odds / (1 + odds)
        corrected = torch.cat((raised[None], before[1:] * (1 - raised) / (1 - before[0])))
        claimed = torch.cat((before[:1] / 2, before[1:] + 2 / (keys - 1)))
        yield Trial(f"{keys} keys, alpha = 2: weights", claimed, softmax(longer @ query), corrected)


@erratum(
    "nyu-1.2a:layout",
    "NYU 1.2a, solution",
    "wrong",
    claim="With tokens in columns, a head's values are $V W_i^V$ and the output is $O W^O$.",
    correction=(
        "Matrices stand on the left: $W_i^V V$ and $W^O O$. On the right the shapes match only if $n$ happens "
        "to equal the width."
    ),
)
def _layout() -> Iterator[Trial]:
    for width, tokens in ((3, 3), (3, 4), (4, 7)):
        weight, value = _random(2, width), _random(width, tokens)
        claimed = attempt(lambda w=weight, v=value: v @ w.T)
        computed = torch.stack([weight @ column for column in value.T], 1)  # token by token
        yield Trial(f"width {width}, {tokens} tokens", claimed, computed, weight @ value)
