"""What attention is at the ends of its temperature: selection, permutation, a running linear layer, the mean, a shift.

Each is the house's own multi-head attention with weights set by hand, and says on which conditions it is what it says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.calculus import sinusoidal, sinusoidal_rotation
from regard.errors import CalculusError, ConfigError, InputError
from regard.layers.multihead import MultiHeadAttention
from regard.layers.projections import AttentionSizes
from regard.patterns import Window

# The temperature


def required_scale(gap: float, keys: int, tolerance: float) -> float:
    r"""The inverse temperature at which a query leaves at most `tolerance` of its weight to other keys than its best.

        1 - p_best <= (keys - 1) e^{-scale gap} <= tolerance    for    scale >= ln((keys - 1) / tolerance) / gap

    `gap` is by how much the best score is ahead of the second, before `scale`. No finite `scale` serves for all tokens:
    the gap may be as small as one likes, and with two best keys there is none.

        >>> from regard.layers.limits import required_scale
        >>> round(required_scale(0.5, keys=6, tolerance=1e-12), 3)
        58.481
    """
    if not gap > 0 or not tolerance > 0 or keys < 1:
        raise CalculusError(
            "No temperature singles out a key.",
            asked=f"required_scale({gap}, keys={keys}, tolerance={tolerance})",
            because="the best key must be ahead of the others, and a finite scale always leaves something to them",
            instead="a gap above 0 and a tolerance above 0; scale=math.inf for none at all",
        )
    return max(0.0, math.log(max(keys - 1, 1) / tolerance) / gap)


def score_gap(query: Tensor, key: Tensor, best: Tensor | Sequence[int] | None = None) -> float:
    """By how much the key that each query should find is ahead of all others, at least; negative if one is not.

    `query (query, dim)`, `key (key, dim)`; `best` names a key for each query, its own place unless given.

        >>> from regard.layers.limits import score_gap
        >>> score_gap(torch.eye(3), torch.eye(3)), score_gap(*[torch.tensor([[1.0, 0.0], [3.0, 1.0]])] * 2)
        (1.0, -2.0)
    """
    scores = query @ key.mT
    index = torch.arange(len(query)) if best is None else torch.as_tensor(best)
    wanted = scores.gather(1, index[:, None].to(scores.device))
    others = scores.scatter(1, index[:, None].to(scores.device), -math.inf)
    return float((wanted[:, 0] - others.amax(1)).detach().min())


# Layers


@torch.no_grad()
def identity_attention(dim: int, scale: float = math.inf) -> MultiHeadAttention:
    r"""Attention that hands every token on as it is: each token finds itself.

        output_n = sum_m softmax_m(scale x_n . x_m) x_m = x_n

    on three conditions together. `W^o W^v` is the identity, which holds here. `scale` is infinite, or large
    (`required_scale`). And every token is its own best key, `x_n . x_n > x_n . x_m`: it is if tokens are distinct and
    of equal length (Cauchy and Schwarz), and otherwise need not be. A large `scale` alone only selects: of the tokens
    (1, 0) and (3, 1) both find the second.

        >>> from regard.layers.limits import identity_attention
        >>> identity_attention(2)(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        >>> identity_attention(2)(torch.tensor([[1.0, 0.0], [3.0, 1.0]])).tolist()
        [[3.0, 1.0], [3.0, 1.0]]
    """
    layer = MultiHeadAttention(dim, 1, attention=Attention(scale=scale), bias=False)
    _set_weights(layer, *[torch.eye(dim)] * 4)
    return layer


class Positioned(nn.Module):
    """Attention over tokens that have their positions beside them: more channels, and not added to the others.

        output = attention([tokens, positions])

    `positions(count)` are the positions of so many tokens, `(token, channel)`.
    """

    def __init__(self, attention: MultiHeadAttention, positions: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.attention, self.positions = attention, positions

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.append_positions(x))

    def weights(self, x: Tensor) -> Tensor:
        """Attention weights `(*batch, head, query, key)`."""
        return self.attention.weights(self.append_positions(x))

    def append_positions(self, x: Tensor) -> Tensor:
        """The tokens with their positions, `(*batch, token, channel + position)`."""
        positions = self.positions(x.shape[-2]).to(x)
        return torch.cat((x, positions.expand(*x.shape[:-1], -1)), -1)


@torch.no_grad()
def permutation_attention(order: Sequence[int], dim: int, scale: float = math.inf) -> Positioned:
    r"""Attention that puts tokens into another order, whatever they say: `output_n = x_{order[n]}`.

        key_m = e_m,   query_n = e_{order[n]},   score = 1 where m = order[n], else 0

    `e_m` is position `m` as a vector of zeros and a one, which stands beside each token. Content has no say, so every
    gap is 1; with `scale=inf` it is exact. It needs `W^o W^v = I` and an order that names each token once: without
    that it is a selection, where some tokens are lost.

        >>> from regard.layers.limits import permutation_attention
        >>> permutation_attention([2, 0, 1], dim=1)(torch.tensor([[5.0], [6.0], [7.0]])).flatten().tolist()
        [7.0, 5.0, 6.0]
    """
    count = len(order)
    if sorted(order) != list(range(count)) or not count:
        raise ConfigError(
            "This is no order of tokens.",
            asked=f"order {list(order)}",
            because=f"a permutation of {count} tokens names each of 0 to {count - 1} once",
            instead="order=[2, 0, 1]",
        )

    def one_hot(tokens: int) -> Tensor:
        if tokens != count:
            raise InputError(
                "The order is one of another number of tokens.",
                asked=f"{tokens} tokens",
                found=f"an order of {count}",
                because="each place says which token it takes",
                instead=f"{count} tokens",
            )
        return torch.eye(count)

    layer = MultiHeadAttention(
        AttentionSizes(dim + count, 1, key=count, value=dim, output=dim), attention=Attention(scale=scale), bias=False
    )
    content, position = torch.eye(dim + count).split((dim, count))
    _set_weights(layer, torch.eye(count)[list(order)].T @ position, position, content, torch.eye(dim))
    return Positioned(layer, one_hot)


@torch.no_grad()
def running_linear(linear: nn.Linear) -> MultiHeadAttention:
    r"""Attention that is a linear layer running along the tokens: `output_n = W x_n + b`, a convolution of width 1.

        A = I:   every query sees its own token only, `pattern=Window(0, 0)`

    The condition is on the weights and not on the temperature. `scale=0` is no such layer: it sees everything alike, so
    that all outputs are one and the same, `mean_pooling`.

        >>> from regard.layers.limits import running_linear
        >>> linear, x = torch.nn.Linear(3, 5), torch.randn(2, 7, 3)
        >>> torch.equal(running_linear(linear)(x), linear(x))
        True
    """
    return _make_content_free(linear, Attention(pattern=Window(0, 0), scale=0.0))


@torch.no_grad()
def mean_pooling(linear: nn.Linear) -> MultiHeadAttention:
    r"""Attention with one output for all tokens, `output_n = W mean(x) + b`: `scale=0`, and all weights are 1 / tokens.

    >>> from regard.layers.limits import mean_pooling
    >>> linear, x = torch.nn.Linear(3, 5), torch.randn(2, 7, 3)
    >>> torch.testing.assert_close(mean_pooling(linear)(x), linear(x.mean(1, keepdim=True)).expand(-1, 7, -1))
    """
    return _make_content_free(linear, Attention(scale=0.0))


# Convolution by absolute positions


def sinusoidal_gap(dim: int, tokens: int) -> float:
    r"""By how much a sinusoidal position is nearer to itself than to any other of a text.

        gap = dim / 2 - max over 0 < d < tokens of sum_i cos(w_i d)

    It is the neighbour's, `d = 1`, for all usual sizes.

        >>> from regard.layers.limits import sinusoidal_gap
        >>> [round(sinusoidal_gap(dim, tokens=1024), 7) for dim in (64, 128, 512)]
        [1.0831683, 1.9063162, 6.8979022]
    """
    table = sinusoidal(torch.arange(tokens), dim, dtype=torch.float64)
    return dim / 2 - float((table[1:] @ table[0]).max())


@torch.no_grad()
def shift_attention(steps: Sequence[int], taps: Tensor, dim: int, scale: float) -> Positioned:
    r"""A one-dimensional convolution as attention with absolute sinusoidal positions: one head for each tap.

        query_n = PE(n),   key_m = R_{-step} PE(m) = PE(m - step),   score = sum_i cos(w_i (n + step - m))

    is largest where `m = n + step`: `W^k` is a rotation, and the head attends `step` tokens ahead. `taps` is `(tap,
    out, in)`, `dim` the channels of the positions, which stand beside the tokens. With `scale >= ln(2 / tolerance) /
    sinusoidal_gap(dim, tokens)` a head leaves `tolerance` to its two neighbours, and much less to the others; a finite
    `scale` is needed to be learned, an infinite one is exact. A short step beyond an end of the text finds the token
    there, less sharply.

        >>> from regard.layers.limits import shift_attention
        >>> ahead = shift_attention([1], torch.ones(1, 1, 1), dim=64, scale=math.inf)
        >>> ahead(torch.tensor([[5.0], [6.0], [7.0]])).flatten().tolist()
        [6.0, 7.0, 7.0]
    """
    heads, out, inside = taps.shape
    if heads != len(steps):
        raise ConfigError(
            "Steps and taps are not as many.",
            asked=f"{len(steps)} steps, taps {tuple(taps.shape)}",
            because="each head attends at one offset and has one matrix (out, in)",
            instead="taps of shape (step, out, in)",
        )
    sizes = AttentionSizes(inside + dim, heads, key=dim, value=inside, output=out)
    layer = MultiHeadAttention(sizes, attention=Attention(scale=scale), bias=False).to(taps)
    content, position = torch.eye(inside + dim, dtype=torch.float64).split((inside, dim))
    turned = [sinusoidal_rotation(-step, dim, dtype=torch.float64) @ position for step in steps]
    outputs = torch.cat(list(taps), 1)  # (out, head * in)
    _set_weights(layer, position.repeat(heads, 1), torch.cat(turned), content.repeat(heads, 1), outputs)
    return Positioned(layer, lambda tokens: sinusoidal(torch.arange(tokens), dim, dtype=torch.float64))


def _make_content_free(linear: nn.Linear, attention: Attention) -> MultiHeadAttention:
    """Attention whose weights do not depend on content, with the matrix of a linear layer."""
    inside, out = linear.in_features, linear.out_features
    letters = "" if linear.bias is None else "o"
    layer = MultiHeadAttention(
        AttentionSizes(inside, 1, key=1, value=inside, output=out), attention=attention, bias=letters
    )
    layer.to(linear.weight)
    nothing = torch.zeros(1, inside)
    _set_weights(layer, nothing, nothing, torch.eye(inside), linear.weight)
    if linear.bias is not None:
        layer.output.bias.copy_(linear.bias)
    return layer


def _set_weights(layer: MultiHeadAttention, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
    for mine, given in zip(layer.projections.weights(), (query, key, value), strict=True):
        mine.copy_(given)
    layer.output.weight.copy_(output)
