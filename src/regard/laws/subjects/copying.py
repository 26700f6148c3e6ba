"""A second instance of a target, which shares nothing with the first that either could change."""

from __future__ import annotations

import copy
import types
from typing import Any

from torch import Tensor, nn


def instance(target: Any) -> Any:
    """A copy of a module or of a function with what it closes over; the target itself where that cannot be had.

    Functions keep state too: in a closure, in an attribute, in a list at the top of their file.
    """
    try:
        if isinstance(target, types.FunctionType):
            return _function(target)
        return copy.deepcopy(target)
    except Exception:  # some hold what cannot be copied
        return target


def _function(target: types.FunctionType) -> types.FunctionType:
    memo: dict[int, Any] = {}
    names = dict(target.__globals__)
    for name in target.__code__.co_names:
        if isinstance(value := names.get(name), dict | list | set | Tensor | nn.Module):
            names[name] = copy.deepcopy(value, memo)
    cells = tuple(_cell(cell, memo) for cell in target.__closure__ or ())
    other = types.FunctionType(target.__code__, names, target.__name__, target.__defaults__, cells)
    other.__defaults__ = copy.deepcopy(target.__defaults__, memo)
    other.__kwdefaults__ = copy.deepcopy(target.__kwdefaults__, memo)  # type: ignore[assignment]
    other.__dict__.update(copy.deepcopy(target.__dict__, memo))
    other.__qualname__, other.__module__ = target.__qualname__, target.__module__
    if names.get(target.__name__) is target:
        names[target.__name__] = other  # it may call itself by name, or keep its state in its own attributes
    return other


def _cell(cell: types.CellType, memo: dict[int, Any]) -> types.CellType:
    try:
        return types.CellType(copy.deepcopy(cell.cell_contents, memo))
    except Exception:  # an empty cell, or one that holds what cannot be copied
        return cell
