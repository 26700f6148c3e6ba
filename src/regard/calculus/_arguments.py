"""Validation of arguments: tensors, arrays and lists of numbers become tensors; anything else raises."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor

from regard.errors import CalculusError

# Axes that are summed over: a size of 1 does not broadcast there.
SUMMED = ("head", "dim", "key", "key_row", "key_column")


def read_tensor(function: str, name: str, value: Any, like: Any = None) -> Tensor:
    """The value as a floating-point tensor, of the dtype and device of `like` where it is a list of numbers.

    A floating-point tensor is returned as it is; an integer or boolean one raises. Lists have no dtype and may hold
    integers.

        >>> from regard.calculus._arguments import read_tensor
        >>> read_tensor("softmax", "scores", [1, 2, 3])
        tensor([1., 2., 3.])
    """
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise CalculusError(
                f"{function} needs floating-point numbers.",
                asked=f"{name} of {value.dtype} with shape {tuple(value.shape)}",
                because="the formula is one of real numbers",
                instead=f"{name}.float(), or {name}.double()",
            )
        return value
    try:
        if value is None or isinstance(value, str | bytes):
            raise TypeError
        found = torch.as_tensor(value)
        if found.dtype == torch.bool or found.is_complex():
            raise TypeError
    except (TypeError, ValueError, RuntimeError, OverflowError) as failure:
        raise CalculusError(
            f"{function} needs floating-point numbers.",
            asked=f"{name} = {_shorten(value)}",
            because="it is neither a tensor nor a list of real numbers with rows of equal length",
            instead=f"{name}=torch.tensor([0.5, 1.0, 2.0]), or a list of numbers",
        ) from failure
    if isinstance(like, Tensor) and like.is_floating_point():
        return torch.as_tensor(
            value, dtype=like.dtype, device=like.device
        )  # a list keeps the precision of `like`, not float32's
    return found if found.is_floating_point() else found.to(torch.get_default_dtype())


def read_tensors(function: str, **values: Any) -> list[Tensor]:
    """Several tensors; lists of numbers take the dtype and device of the first tensor among them."""
    like = next((value for value in values.values() if isinstance(value, Tensor)), None)
    return [read_tensor(function, name, value, like) for name, value in values.items()]


def read_shaped(function: str, **arguments: tuple[Any, str]) -> list[Tensor]:
    """Several tensors, each given with the names of its last axes; raises if their shapes are incompatible."""
    tensors = read_tensors(function, **{name: value for name, (value, _) in arguments.items()})
    axes = (names for _, names in arguments.values())
    check_axes(function, **dict(zip(arguments, zip(tensors, axes, strict=True), strict=True)))
    return tensors


def read_mask(function: str, name: str, value: Any, scores: Tensor) -> Tensor:
    """A boolean tensor that broadcasts to the scores."""
    try:
        mask = value if isinstance(value, Tensor) else torch.as_tensor(value, device=scores.device)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        mask = None
    if mask is None or mask.dtype != torch.bool:
        raise CalculusError(
            f"{function} needs a boolean mask.",
            asked=f"{name} = {_shorten(value)}" if mask is None else f"{name} of {mask.dtype}",
            because="True means visible, and no other number says so",
            instead=f"{name}=scores > 0, or {name}=mask.bool()",
        )
    check_axes(function, scores=(scores, ""), **{name: (mask, "")})
    return mask


def read_axis(function: str, dim: Any, tensor: Tensor) -> int:
    """An axis of the tensor as a negative index, which stays valid when axes are added in front."""
    axis = read_whole_number(function, "dim", dim)
    if not -tensor.ndim <= axis < tensor.ndim:
        raise CalculusError(
            f"{function} has no such axis.",
            asked=f"dim = {axis}",
            found=f"a tensor with shape {tuple(tensor.shape)}",
            because="an axis is counted from 0, or from -1 backwards",
            instead="dim=-1, the last",
        )
    return axis if axis < 0 else axis - tensor.ndim


def read_whole_number(function: str, name: str, value: Any, least: int | None = None) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise CalculusError(
            f"{function} needs an integer.",
            asked=f"{name} = {_shorten(value)}",
            because=f"{type(value).__name__} is not an integer",
            instead=f"{name}={2 if least is None else max(least, 2)}",
        ) from None
    if least is not None and number < least:
        raise CalculusError(
            f"{function} needs a larger number.",
            asked=f"{name} = {number}",
            because=f"{name} is {least} or more",
            instead=f"{name}={max(least, 2)}",
        )
    return number


def read_number(function: str, name: str, value: Any) -> float:
    """A real number; infinity is allowed."""
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise CalculusError(
            f"{name} is not a number.",
            asked=f"{name} = {_shorten(value)}",
            because="the formula is one of real numbers",
            instead=f"{name}=1.0",
        )
    return number


def check_axes(function: str, **arguments: tuple[Tensor, str]) -> None:
    """Raise if shapes are incompatible.

    Each tensor comes with the names of its last axes. Axes of one name have one size, or 1 where they may broadcast;
    the axes before them (the batch) broadcast.
    """
    sizes: dict[str, int] = {}
    for name, (tensor, axes) in arguments.items():
        names = axes.split()
        if tensor.ndim < len(names):
            raise _make_shape_error(function, arguments, f"{name} has {len(names)} axes at least: {', '.join(names)}")
        for axis, size in zip(names, tensor.shape[tensor.ndim - len(names) :], strict=True):
            known = sizes.setdefault(axis, size)
            if known == size:
                continue
            if axis in SUMMED or 1 not in (known, size):
                raise _make_shape_error(
                    function, arguments, f"the axis {axis} has {known} entries in one and {size} in another"
                )
            sizes[axis] = max(known, size) if 0 not in (known, size) else 0
    try:
        torch.broadcast_shapes(*(t.shape[: t.ndim - len(axes.split())] for t, axes in arguments.values()))
    except RuntimeError:
        raise _make_shape_error(function, arguments, "the axes of the batch do not broadcast") from None


def check_dtypes(function: str, **tensors: Tensor) -> None:
    """Raise if the tensors of a product have different dtypes."""
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        raise CalculusError(
            f"{function} needs tensors of one dtype.",
            asked=", ".join(f"{name} of {tensor.dtype}" for name, tensor in tensors.items()),
            because="a product of matrices has one dtype",
            instead="tensor.to(query.dtype) for the others",
        )


def _make_shape_error(function: str, arguments: dict[str, tuple[Tensor, str]], because: str) -> CalculusError:
    shapes = [
        f"{name} {tuple(tensor.shape)}" + (f"  # ... {axes}" if axes else "")
        for name, (tensor, axes) in arguments.items()
    ]
    return CalculusError(
        f"The shapes of {function} do not belong together.",
        asked="\n".join(shapes),
        because=because,
        instead="tensors with these axes, the batch before them: "
        + ", ".join(
            f"{name} (*batch{''.join(f', {axis}' for axis in axes.split())})" for name, (_, axes) in arguments.items()
        )
        if any(axes for _, axes in arguments.values())
        else "tensors that broadcast, as (2, 1, 7) and (3, 7) do",
    )


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
