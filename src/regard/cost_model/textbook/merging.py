"""Value and output matrices, apart or as one."""

from __future__ import annotations

from regard.cost_model.symbols import size_symbols
from regard.cost_model.textbook.table import Table, rows, sizes
from regard.errors import CostError


def merge(tokens: int, width: int, heads: int, value_dim: int | None = None) -> Table:
    """Each head's value and output matrix as two, through `value_dim` channels, or multiplied together into one.

        head_h = A_h (X W_h^v) W_h^o = A_h (X W^(h)),    W^(h) = W_h^v W_h^o

    Two cost `2 D e` numbers a head and one costs `D^2`, so that one is smaller if values have more than half the
    channels of a token, as in Cordonnier's layers, where they have all of them; with D / H channels it is larger. The
    weighted sum runs over e channels apart and over D merged.

    Bishop and Bishop, Deep Learning (2024), exercise 12.5.
    """
    if value_dim is None and width % heads:
        raise CostError(
            "The channels cannot be shared evenly between the heads.",
            asked=f"{heads} heads of {width} channels",
            because=f"{width} is no multiple of {heads}",
            instead="a number of heads that divides the channels, or value_dim",
        )
    N, D, H, e = size_symbols("N D H e")
    inner = width // heads if value_dim is None else value_dim
    apart, merged = 2 * D * H * e, H * D**2
    apart_macs, merged_macs = 2 * N * D * H * e + N**2 * H * e, N * H * D**2 + N**2 * H * D
    return Table(
        f"Value and output matrices of {heads:,} heads, {width:,} channels, {inner:,} in a value, {tokens:,} tokens",
        rows(
            sizes(N=tokens, D=width, H=heads, e=inner),
            [
                ("weights apart", apart),
                ("weights merged", merged),
                ("weights saved", apart - merged),
                ("MAC apart", apart_macs),
                ("MAC merged", merged_macs),
                ("MAC saved", apart_macs - merged_macs),
                ("equal weights at so many channels", D / 2),
                ("equal MAC at so many channels", D * (D + N) / (2 * D + N)),
            ],
        ),
        "A negative saving is a loss: thin values are the cheap form of the merged matrix.",
    )
