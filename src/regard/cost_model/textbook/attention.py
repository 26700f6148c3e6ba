"""Questions about one attention: its parameters, its heads, one token more, and features instead of exponentials."""

from __future__ import annotations

import sympy

from regard.cost_model.symbols import size_symbols
from regard.cost_model.textbook.table import Table, rows, sizes
from regard.errors import CostError


def attention(tokens: int, width: int) -> Table:
    """Parameters of self-attention, and of a fully connected layer between as many numbers.

    Prince, *Understanding Deep Learning*, problem 12.1.
    """
    N, D = size_symbols("N D")
    return Table(
        f"Self-attention of {tokens:,} tokens with {width:,} channels",
        rows(
            sizes(N=tokens, D=width),
            [
                ("weights", 3 * D**2),
                ("biases", 3 * D),
                ("attention weights", N**2),
                ("fully connected weights", D**2 * N**2),
                ("fully connected biases", D * N),
            ],
        ),
        "Attention weights are computed, not learned. Of the biases those of the keys never reach the output.",
    )


def mha(tokens: int, width: int, heads: int, head_dim: int | None = None) -> Table:
    """What heads cost: nothing in products if each has D / H channels; the attention weights are H times as many.

    Prince, problem 12.5. The last two rows are for heads that keep all D channels.
    """
    N, D, H, d = size_symbols("N D H d")
    values = sizes(N=tokens, D=width, H=heads)
    if head_dim is None and width % heads:
        raise CostError(
            "The channels cannot be shared evenly between the heads.",
            asked=f"{heads} heads of {width} channels",
            because=f"{width} is no multiple of {heads}",
            instead="a number of heads that divides the channels, or head_dim",
        )
    if head_dim is not None:
        values |= sizes(d=head_dim)
    inner = D / H if head_dim is None else d
    return Table(
        f"{heads:,} heads over {tokens:,} tokens with {width:,} channels",
        rows(
            values,
            [
                ("query, key and value weights", 3 * D * H * inner),
                ("projection MAC", 3 * N * D * H * inner),
                ("score MAC", N**2 * H * inner),
                ("score MAC of a head", N**2 * inner),
                ("value MAC", N**2 * H * inner),
                ("stored attention weights", H * N**2),
                ("weights with full heads", 3 * H * D**2),
                ("score MAC with full heads", H * N**2 * D),
            ],
        ),
        meanings={"d": "head dim"},
    )


def append(tokens: int, width: int) -> Table:
    """One token more, after `tokens` whose keys and values are cached: its own three vectors, N + 1 scores, one sum.

    Prince, problem 12.7. Earlier outputs do not change: they are masked at the new key.
    """
    N, D = size_symbols("N D")
    step = sympy.expand(3 * D**2 + 2 * (N + 1) * D)
    return Table(
        f"One token more after {tokens:,} with {width:,} channels",
        rows(
            sizes(N=tokens, D=width),
            [
                ("one token more", step),
                ("all from the beginning", (N + 1) * step),
                ("all, only pairs that meet", 3 * (N + 1) * D**2 + (N + 1) * (N + 2) * D),
                ("times as much", N + 1),
                ("cached numbers", 2 * N * D),
            ],
        ),
        "From the beginning the whole square is computed. Multiply-adds, without the output matrix.",
        meanings={"N": "tokens in the cache, before the new one"},
    )


def linear(tokens: int, width: int) -> Table:
    """Features instead of exponentials: two sums that do not depend on the query, so no square of tokens.

    Prince, problem 12.10. As many features as channels; the normaliser is the term without a square of D.
    """
    N, D = size_symbols("N D")
    softmax, summed = 2 * N**2 * D, 2 * N * D**2 + 2 * N * D
    return Table(
        f"Linear attention of {tokens:,} tokens with {width:,} channels",
        rows(
            sizes(N=tokens, D=width),
            [
                ("softmax MAC", softmax),
                ("linear MAC", summed),
                ("times as much", sympy.cancel(softmax / summed)),
                ("equal at so many tokens", D + 1),
                ("recurrent step MAC", 2 * D**2),
                ("recurrent step with its normaliser", 2 * D**2 + 2 * D),
                ("state numbers", D * (D + 1)),
            ],
        ),
    )


def parameters(heads: int, input: int, hidden: int, value: int, output: int) -> Table:
    """Parameters of multi-head attention whose sizes are all free, with a bias at the output only.

        H D (2 d + e) + H e O + O

    The assignment on Cordonnier, Loukas and Jaggi (2020), question a1.
    """
    H, D, d, e, out = size_symbols("H D d e O")
    projections, joined = H * D * (2 * d + e), H * e * out
    return Table(
        f"{heads:,} heads from {input:,} to {output:,} channels",
        rows(
            sizes(H=heads, D=input, d=hidden, e=value, O=output),
            [
                ("query, key and value weights", projections),
                ("output weights", joined),
                ("output biases", out),
                ("parameters", projections + joined + out),
            ],
        ),
        meanings={"D": "width of the input"},
    )
