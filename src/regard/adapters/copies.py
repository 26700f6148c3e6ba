"""A second instance of a target, which shares nothing with the first that either could change."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

from torch import Tensor, nn

from regard.adapters import external_state
from regard.adapters.deepcopy import deepcopy
from regard.adapters.external_state import CONTAINERS, ExternalState, names_in

KEPT = (*CONTAINERS, Tensor, nn.Module)


def copy_target(target: Any) -> Any:
    """A copy of a module or of a function with what it closes over; the target itself where that fails.

    Functions keep state too: in a closure, in an attribute, in a list at the top of their file. Modules keep it on
    their classes as well.
    """
    try:
        if isinstance(target, types.FunctionType | functools._lru_cache_wrapper):
            return _FunctionCopier().copy_function(target)
        other = deepcopy(target) if isinstance(target, nn.Module) else copy.deepcopy(target)
    except Exception:  # some hold what cannot be copied
        return target
    if isinstance(other, nn.Module) and ExternalState.of(other) is None:
        external_state.isolate(other)
    return other


class _FunctionCopier:
    """Functions that call each other are copied together, so that the copies go on sharing what they shared."""

    def __init__(self) -> None:
        self.memo: dict[int, Any] = {}
        self.functions: dict[int, Any] = {}
        self.cells: dict[int, types.CellType] = {}
        self.globals: dict[int, dict[str, Any]] = {}
        self.seen: set[tuple[int, str]] = set()

    def copy_function(self, target: Any) -> Any:
        if id(target) in self.functions:
            return self.functions[id(target)]
        if isinstance(target, functools._lru_cache_wrapper):
            again = functools.lru_cache(**target.cache_parameters())(self._copy_value(target.__wrapped__))
            self.functions[id(target)] = again
            return again
        own = target.__globals__
        is_third_party = external_state.is_third_party(target.__module__)
        names = own if is_third_party else self.globals.setdefault(id(own), dict(own))
        cells = tuple(self._copy_cell(cell) for cell in target.__closure__ or ())
        other = types.FunctionType(target.__code__, names, target.__name__, target.__defaults__, cells)
        self.functions[id(target)] = other  # it may call itself by name, or keep its state in its own attributes
        for cell, old in zip(cells, target.__closure__ or (), strict=True):
            self._fill_cell(cell, old)
        for name in () if is_third_party else names_in(target.__code__):
            if name in own and (id(own), name) not in self.seen:
                self.seen.add((id(own), name))
                if self._is_kept(own[name], own):
                    names[name] = self._copy_value(own[name])
        other.__defaults__ = copy.deepcopy(target.__defaults__, self.memo)
        other.__kwdefaults__ = copy.deepcopy(target.__kwdefaults__, self.memo)  # type: ignore[assignment]
        other.__dict__.update(copy.deepcopy(target.__dict__, self.memo))
        other.__qualname__, other.__module__ = target.__qualname__, target.__module__
        return other

    @staticmethod
    def _is_kept(value: Any, own: dict[str, Any]) -> bool:
        if isinstance(value, functools._lru_cache_wrapper):
            return not external_state.is_third_party(value.__module__)
        return isinstance(value, KEPT) or (isinstance(value, types.FunctionType) and value.__globals__ is own)

    def _copy_value(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType | functools._lru_cache_wrapper):
            return self.copy_function(value)
        return copy.deepcopy(value, self.memo)

    def _copy_cell(self, cell: types.CellType) -> types.CellType:
        return self.cells.setdefault(id(cell), types.CellType())

    def _fill_cell(self, cell: types.CellType, old: types.CellType) -> None:
        if _is_empty(cell) and not _is_empty(old):
            try:
                cell.cell_contents = self._copy_value(old.cell_contents)
            except Exception:  # it holds what cannot be copied
                cell.cell_contents = old.cell_contents


def _is_empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False
