"""Errata of the solutions to Prince, Understanding Deep Learning, problems 12.1 to 12.5."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from regard.book.errata.erratum import Trial, attempt, erratum
from regard.book.errata.single_head import attend_rows
from regard.calculus import jacobian, softmax

DOUBLE = torch.float64
SATURATED = torch.tensor([-3.0, 1.0, 100.0, 5.0, -1.0], dtype=DOUBLE)


def _count(module: nn.Module, name: str) -> int:
    return sum(parameter.numel() for key, parameter in module.named_parameters() if key.endswith(name))


@erratum(
    "udl-12.1:biases",
    "Prince 12.1, solution",
    "wrong",
    claim="Queries, keys and values have 3 biases.",
    correction="Each of the three has one bias for each of its $D$ outputs: $3D$.",
)
def _biases() -> Iterator[Trial]:
    for width in (1, 2, 4, 512):
        projections = nn.ModuleList(nn.Linear(width, width, device="meta") for _ in range(3))
        yield Trial(f"D = {width}", 3, _count(projections, "bias"), 3 * width)


@erratum(
    "udl-12.1:fully-connected-biases",
    "Prince 12.1, solution",
    "wrong",
    claim="The fully connected layer on all $DN$ inputs has $N^2$ biases.",
    correction="It has one bias for each output: $DN$.",
)
def _fully_connected_biases() -> Iterator[Trial]:
    for tokens, width in ((1, 1), (1, 2), (3, 4), (5, 7)):
        layer = nn.Linear(tokens * width, tokens * width, device="meta")
        yield Trial(f"N = {tokens}, D = {width}", tokens**2, _count(layer, "bias"), width * tokens)


@erratum(
    "udl-12.2:residual",
    "Prince 12.2, solution",
    "incomplete",
    claim="Inputs and outputs have the same size so that layers can be stacked; nothing else depends on it.",
    correction=(
        "Layers of different sizes can be stacked too. The residual $X + \\mathrm{Sa}[X]$ is what needs equal sizes."
    ),
)
def _residual() -> Iterator[Trial]:
    for inside, outside in ((2, 2), (2, 3), (4, 7)):
        layer, following = nn.Linear(inside, outside), nn.Linear(outside, inside)
        x = torch.randn(5, inside)
        stacks = tuple(following(layer(x)).shape) == (5, inside)
        adds = isinstance(attempt(lambda x=x, layer=layer: x + layer(x)), Tensor)
        case = f"from {inside} to {outside} channels: the residual is defined"
        yield Trial(case, stacks, adds, inside == outside)


def _columns(x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...]) -> Tensor:
    """Self-attention of Prince's chapter, tokens in columns: $V\\,\\mathrm{Softmax}[K^T Q]$ with biases, unscaled."""
    query, key, value = ((w @ x + b).T for w, b in zip(weights, biases, strict=True))
    return attend_rows(query, key, value, scale=1.0).T


@erratum(
    "udl-12.3:cancelled-permutation",
    "Prince 12.3, solution, equation 12",
    "wrong",
    claim=(
        "In $\\mathrm{Softmax}[(KP)^T QP]$ the permutations cancel by $P^T P = I$, which leaves "
        "$VP\\,\\mathrm{Softmax}[K^T Q]$."
    ),
    correction=(
        "The two permutations stand on both sides of $K^T Q$ and cannot cancel there. $\\mathrm{Softmax}[P^T S P] ="
        " P^T\\,\\mathrm{Softmax}[S]\\,P$, and then $V P P^T\\,\\mathrm{Softmax}[S]\\,P = \\mathrm{Sa}[X] P$, with "
        "biases too,"
        " because $\\beta 1^T P = \\beta 1^T$."
    ),
)
def _cancelled_permutation() -> Iterator[Trial]:
    for tokens in (2, 3, 5):
        x = torch.randn(3, tokens, dtype=DOUBLE)
        weights = tuple(torch.randn(3, 3, dtype=DOUBLE) for _ in range(3))
        biases = tuple(torch.randn(3, 1, dtype=DOUBLE) for _ in range(3))
        permutation = torch.eye(tokens, dtype=DOUBLE).roll(1, 0)
        query, key, value = (w @ x + b for w, b in zip(weights, biases, strict=True))
        claimed = value @ permutation @ softmax(key.T @ query, dim=0)
        computed = _columns(x @ permutation, weights, biases)
        yield Trial(f"{tokens} tokens in columns", claimed, computed, _columns(x, weights, biases) @ permutation)


@erratum(
    "udl-12.4:sensitivity",
    "Prince 12.4, solution, conclusion",
    "wrong",
    claim=(
        "At $z = (-3, 1, 100, 5, -1)$ the softmax is very sensitive: small changes of the input change the output much."
    ),
    correction=(
        "It is saturated: the largest derivative is 5.6e-42, a change by 1 does not change the output in "
        "double precision."
    ),
)
def _sensitivity() -> Iterator[Trial]:
    for step in (1e-3, 1.0):
        for index in range(5):
            moved = SATURATED.clone()
            moved[index] += step
            change = float((softmax(moved) - softmax(SATURATED)).abs().max())
            bound = float(jacobian(SATURATED).abs().sum()) * step * 2.71828**step
            yield Trial(
                f"z_{index + 1} + {step:g}: the output moves by more than 1e-6", True, change > 1e-6, bound > 1e-6
            )


@erratum(
    "udl-12.4:empty-code",
    "Prince 12.4, solution, code block",
    "garbled",
    claim=(
        "The block that should compute the Jacobian is empty, and the sum reuses the index $j$; read so, "
        "$J_{jj} = y_j (1 - \\sum_j y_j)$."
    ),
    correction="$J_{ij} = y_i (\\delta_{ij} - y_j)$.",
)
def _empty_code() -> Iterator[Trial]:
    for scores in ((0.0, 1.0), (0.0, 1.0, 3.0)):
        z = torch.tensor(scores, dtype=DOUBLE)
        y = softmax(z)
        computed = torch.func.jacrev(lambda z: torch.softmax(z, 0))(z).diagonal()
        yield Trial(f"diagonal at z = {scores}", y * (1 - y.sum()), computed, y * (1 - y))


@erratum(
    "udl-12.5:parameters",
    "Prince 12.5, solution",
    "wrong",
    claim='A head\'s projection has $(D/H)^2$ weights; $H$ of them have $D^2/H$, which "remains the same" as $D^2$.',
    correction=(
        "A head projects $D$ channels to $D/H$: $D \\cdot D/H$ weights, $D^2$ for $H$ heads. The weights of "
        "attention grow to $HN^2$."
    ),
)
def _parameters() -> Iterator[Trial]:
    for width, heads in ((2, 1), (2, 2), (12, 3), (512, 8)):
        layers = nn.ModuleList(nn.Linear(width, width // heads, bias=False, device="meta") for _ in range(heads))
        yield Trial(f"D = {width}, H = {heads}", width**2 // heads, _count(layers, "weight"), width**2)
