"""Classifies a product as scores, a weighted sum of values, or a projection of rows, by the sizes of its axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass
class Product:
    """A product with a meaning.

    Attributes:
        kind: `"scores"` of query and key, `"sum"` of weights and value, or `"rows"`: tokens times a matrix.
        left, right: its operands as `(batch, head, token, ...)`: query and key, or weights and value.
        ordered: whether the heads lay on one axis.
    """

    kind: Literal["scores", "sum", "rows"]
    left: Tensor
    right: Tensor
    ordered: bool = True


def by_heads(tensor: Tensor, batch: int) -> tuple[Tensor, bool]:
    """`(..., rows, columns)` as `(batch, head, rows, columns)`, and whether the heads lay on one axis."""
    lead, tail = tensor.shape[:-2], tensor.shape[-2:]
    count = math.prod(lead)
    if len(lead) >= 2 and lead[0] != batch and batch in lead:
        axis = list(lead).index(batch)
        tensor, lead = tensor.movedim(axis, 0), (lead[axis], *lead[:axis], *lead[axis + 1 :])
    if (lead and lead[0] == batch) or (len(lead) == 1 and count % batch == 0):
        return tensor.reshape(batch, count // batch, *tail).detach(), len(lead) <= 2
    return tensor.reshape(1, count, *tail).detach(), False


def of_matmul(left: Tensor, right: Tensor, batch: int, tokens: int) -> Product | None:
    """The meaning of `left @ right`."""
    if left.ndim < 2 or right.ndim < 2:
        return None
    square = (tokens, tokens)
    ours, theirs = tuple(left.shape[-2:]) == square, tuple(right.shape[-2:]) == square
    if ours and theirs:
        return None
    if right.ndim == 2 and not theirs and not ours and tokens not in right.shape:
        return Product("rows", left, right)
    lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    if not ours and not theirs and (left.shape[-2], right.shape[-1]) == square:
        return _make_product("scores", left, right.transpose(-1, -2), lead, batch)
    if ours and not (left.ndim == 2 and right.ndim > 2):
        return _make_product("sum", left, right, lead, batch)
    if theirs and left.shape[-1] == tokens and not (right.ndim == 2 and left.ndim > 2):
        return _make_product("sum", right.transpose(-1, -2), left.transpose(-1, -2), lead, batch)
    return None


def _make_product(kind: Literal["scores", "sum"], left: Tensor, right: Tensor, lead: torch.Size, batch: int) -> Product:
    wide = [part.expand(*lead, *part.shape[-2:]) for part in (left, right)]
    (first, ordered), (second, _) = (by_heads(part, batch) for part in wide)
    return Product(kind, first, second, ordered)


def of_einsum(equation: str, left: Tensor, right: Tensor, batch: int, tokens: int) -> Product | None:
    """The meaning of `einsum(equation, left, right)`."""
    read = _read_equation(equation, left, right)
    if read is None:
        return None
    ours, theirs, out, sizes = read
    summed = [axis for axis in ours if axis in theirs and axis not in out]
    for (first, mine), (second, other) in (((left, ours), (right, theirs)), ((right, theirs), (left, ours))):
        long = [axis for axis in mine if sizes[axis] == tokens]
        key = [axis for axis in long if axis in summed]
        query = [axis for axis in long if axis in out and axis not in other]
        if len(long) == 2 and len(key) == 1 and len(query) == 1:
            lead = [axis for axis in mine if axis not in long]
            features = [axis for axis in other if axis not in lead and axis != key[0]]
            lead = _batch_first(lead, sizes, batch)
            return _make_product(
                "sum",
                _permute_axes(first, mine, [*lead, query[0], key[0]], sizes),
                _permute_axes(second, other, [*lead, key[0], *features], sizes).flatten(len(lead) + 1),
                torch.Size(sizes[axis] for axis in lead),
                batch,
            )
    long = [axis for axis in out if sizes[axis] == tokens]
    if len(long) == 2 and len(summed) == 1:
        query, key = long if long[0] in ours else long[::-1]
        if query in ours and query not in theirs and key in theirs and key not in ours:
            lead = _batch_first([axis for axis in out if axis not in long], sizes, batch)
            return _make_product(
                "scores",
                _permute_axes(left, ours, [*lead, query, summed[0]], sizes),
                _permute_axes(right, theirs, [*lead, key, summed[0]], sizes),
                torch.Size(sizes[axis] for axis in lead),
                batch,
            )
    if len(long) == 1 and (long[0] not in ours or long[0] not in theirs) and summed:
        return Product("rows", left, right)
    return None


def _read_equation(equation: str, left: Tensor, right: Tensor) -> tuple[str, str, str, dict[str, int]] | None:
    """The axes of both operands and of the result, dots spelled out, and their sizes."""
    equation = equation.replace(" ", "")
    if "->" not in equation:
        return None
    inputs, out = equation.split("->")
    terms = inputs.split(",")
    spare = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in equation]
    dots = max(
        part.ndim - len(term.replace("...", "")) if "..." in term else 0
        for part, term in zip((left, right), terms, strict=True)
    )
    spelled = []
    for part, term in zip((left, right), terms, strict=True):
        count = part.ndim - len(term.replace("...", ""))
        spelled.append(term.replace("...", "".join(spare[dots - count : dots])))
    out = out.replace("...", "".join(spare[:dots]))
    sizes: dict[str, int] = {}
    for part, term in zip((left, right), spelled, strict=True):
        for axis, size in zip(term, part.shape, strict=True):
            sizes[axis] = max(sizes.get(axis, 1), size)
    if any(len(set(term)) < len(term) for term in spelled):
        return None
    return spelled[0], spelled[1], out, sizes


def _batch_first(lead: list[str], sizes: dict[str, int], batch: int) -> list[str]:
    first = next((axis for axis in lead if sizes[axis] == batch), None)
    return lead if first is None else [first, *(axis for axis in lead if axis != first)]


def _permute_axes(tensor: Tensor, axes: str, wanted: list[str], sizes: dict[str, int]) -> Tensor:
    """The tensor with the wanted axes in their order; those it lacks are spread."""
    present = [axis for axis in wanted if axis in axes]
    if len(present) != len(axes):
        raise ValueError(f"{axes} does not fit {wanted}")
    tensor = tensor.permute([axes.index(axis) for axis in present])
    for place, axis in enumerate(wanted):
        if axis not in axes:
            tensor = tensor.unsqueeze(place)
    return tensor.expand([sizes[axis] for axis in wanted])


def spread(left: Tensor, right: Tensor, tokens: int, batch: int | None = None) -> Product | None:
    """Weights `(..., T, T, 1)` times values `(..., 1, T, dim)`, to be summed afterwards."""
    for first, second in ((left, right), (right, left)):
        if first.ndim < 4 or tuple(first.shape[-3:]) != (tokens, tokens, 1):
            continue
        if second.ndim < 3 or second.shape[-2] != tokens or second.shape[-1] in (1, tokens) or second.shape[-3] != 1:
            continue
        weights, value = first.squeeze(-1), second.squeeze(-3)
        if batch is None:
            return Product("sum", weights, value)
        lead = torch.broadcast_shapes(weights.shape[:-2], value.shape[:-2])
        return _make_product("sum", weights, value, lead, batch)
    return None


def shares(part: Tensor, whole: Tensor) -> bool:
    """Whether one tensor is a view of the other."""
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
