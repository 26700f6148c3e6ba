"""Which rows of a query or key projection turn together."""

from __future__ import annotations

from torch import Tensor

from regard.errors import CheckpointError


def halves_from_pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows of a projection for a rotary embedding of neighbours, reordered for one of halves.

    Rotary embedding turns dim/2 planes in each head. llama2.c and llama.cpp take channels (2i, 2i+1) as plane i,
    Hugging Face takes (i, i + dim/2). Scores are sums over channels, so reordering the rows of query and key alike
    changes nothing else, and is exact: no number is computed.

        halves[h, i] = pairs[h, 2i],   halves[h, i + dim/2] = pairs[h, 2i + 1]

    >>> halves_from_pairs(torch.tensor([0, 1, 2, 3, 10, 11, 12, 13]), heads=2)
    tensor([ 0,  2,  1,  3, 10, 12, 11, 13])
    """
    return _reorder_rows(weight, heads, to_halves=True)


def pairs_from_halves(weight: Tensor, heads: int) -> Tensor:
    """The inverse.

    >>> pairs_from_halves(torch.tensor([0, 2, 1, 3]), heads=1)
    tensor([0, 1, 2, 3])
    """
    return _reorder_rows(weight, heads, to_halves=False)


def _reorder_rows(weight: Tensor, heads: int, *, to_halves: bool) -> Tensor:
    rows, *rest = weight.shape
    if heads <= 0 or rows % (2 * heads):
        raise CheckpointError(
            "This projection cannot be cut into heads whose channels turn in pairs.",
            found=f"{rows} rows, {heads} heads",
            because="each head needs an even number of rows",
            instead="check the file's count of heads",
        )
    planes = rows // heads // 2
    inner = (planes, 2) if to_halves else (2, planes)
    return weight.reshape(heads, *inner, *rest).transpose(1, 2).reshape(rows, *rest)
