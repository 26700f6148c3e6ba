"""Questions about steps: how many one after the other, and how many for one score of a relative encoding."""

from __future__ import annotations

import sympy

from regard.cost_model import depth
from regard.cost_model.symbols import size_symbols
from regard.cost_model.textbook.table import Table, rows, sizes


def encoding(tokens: int | tuple[int, int], dim: int) -> Table:
    """Operations of the scores of relative attention, entry by entry and with queries and keys made once.

    Each of the four terms is two products of a matrix with a vector and an inner product, 2 D (2 D - 1) + 2 D - 1 =
    4 D^2 - 1 operations, and three additions join them: 16 D^2 - 1, the square of D and not its cube. All entries
    together are counted by the leading term. With queries and keys made once, 4 N D^2 + 2 N^2 D operations make all
    products of two contents.

    A quadratic encoding needs no products: a score is looked up, and on a grid of R by W tokens, a pair of `tokens`,
    there are (2 R - 1) (2 W - 1) different ones. Its weights are a product over rows and columns, so that the sums over
    values are two, 2 N (R + W) D operations instead of 2 N^2 D: the power 3/2 of N instead of its square.

    The assignment on Cordonnier, Loukas and Jaggi (2020), question b2.
    """
    N, D, R, W = size_symbols("N D R W")
    if isinstance(tokens, int):
        values, count, where = sizes(N=tokens, D=dim), N, f"{tokens:,} tokens"
        grid = []
    else:
        values, count, where = sizes(R=tokens[0], W=tokens[1], D=dim), R * W, f"{tokens[0]} x {tokens[1]} tokens"
        square, apart = 2 * (R * W) ** 2 * D, 2 * R * W * (R + W) * D
        grid = [
            ("quadratic encoding, different scores", (2 * R - 1) * (2 * W - 1)),
            ("sums over values, pair by pair", square),
            ("sums over values, rows and columns apart", apart),
            ("sums: times as much", sympy.cancel(square / apart)),
        ]
    entry = 4 * (4 * D**2 - 1) + 3
    naive, cached = 16 * count**2 * D**2, 4 * count * D**2 + 2 * count**2 * D
    return Table(
        f"Relative scores of {where} with {dim:,} channels",
        rows(
            values,
            [
                ("one entry, naively", sympy.expand(entry)),
                ("exponent of D", sympy.log(entry.subs(D, 2 * D) / entry, 2)),
                ("all entries, naively", naive),
                ("queries and keys made once", cached),
                ("times as much", sympy.cancel(naive / cached)),
                ("quadratic encoding, lookups", count**2),
                *grid,
            ],
        ),
        "Operations: a multiplication or an addition each.",
    )


def parallel(tokens: int | tuple[int, int], width: int, heads: int, head_dim: int | None = None) -> Table:
    """Steps of self-attention if everything that can run at once does: sums are trees, every operation is one step.

    A row of attention weights takes an inner product over a head's channels, exp, a sum over the tokens and a division;
    the layer, one inner product over the channels before that and one over the tokens after. The stable softmax looks
    for the largest score and subtracts it first. A pair of `tokens` is a grid: one tree over all X Y of them.

    TTIC 31230, problems on transformers, 1 and 2; no output matrix, no scale. Chains instead of trees take as many
    steps as numbers for each inner product, and for the exponentials and their sum; the division is one step more.
    """
    N, D, H, d, R, W = size_symbols("N D H d R W")
    values = sizes(D=width, H=heads)
    if isinstance(tokens, int):
        values |= sizes(N=tokens)
        count, where = N, f"{tokens:,} tokens"
    else:
        values |= sizes(R=tokens[0], W=tokens[1])
        count, where = R * W, f"a grid of {tokens[0]} x {tokens[1]} tokens"
    inner = D / H
    if head_dim is not None:
        values |= sizes(d=head_dim)
        inner = d
    row = depth.inner(inner) + depth.softmax(count, stable=False)
    stable = depth.inner(inner) + depth.softmax(count, stable=True)
    around = depth.inner(D) + depth.inner(count)
    chains = D + inner + 2 * count
    return Table(
        f"Steps of self-attention over {where} with {width:,} channels and {heads:,} heads",
        rows(
            values,
            [
                ("a row of weights", row),
                ("a row of weights, stable", stable),
                ("the layer", around + row),
                ("the layer, stable", around + stable),
                ("work (MAC)", 3 * count * D * H * inner + 2 * count**2 * H * inner),
                ("sums as chains", chains),
                ("sums as chains, with the division", chains + 1),
            ],
        ),
    )
