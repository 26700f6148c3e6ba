"""What a module keeps outside itself: on its classes, at the top of its file, in the caches of its functions.

A copy of the module shares all this with the original. Here each copy is given its own, which is in place while the
copy runs. Contents are exchanged, not names: a second name of the same
dictionary sees the exchange too.
"""

from __future__ import annotations

import copy
import dis
import functools
import sys
import threading
import types
from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from enum import EnumMeta
from typing import Any

from torch import Tensor, nn

CONTAINERS = (dict, list, set, deque)
FOLLOWED = (type, types.FunctionType, functools._lru_cache_wrapper)
PLAIN = (int, float, str, tuple, type(None), Tensor)
# Packages whose internal state is not isolated, and the number of entries beyond which a container is not either.
THIRD_PARTY = {"torch", "regard", "transformers", "timm", "numpy", "einops", "x_transformers", *sys.stdlib_module_names}
LARGEST = 2000
MISSING = object()


def is_third_party(module: str | None) -> bool:
    return (module or "builtins").split(".")[0] in THIRD_PARTY


def isolate(module: nn.Module) -> None:
    """Surroundings of its own for a copy, if there is anything outside it that it could change."""
    try:
        own = ExternalState(module)
        if own.locations or own.caches:
            module.register_forward_pre_hook(own.enter, prepend=True)
            module.register_forward_hook(own.leave, always_call=True)
    except Exception:  # inspecting a third-party class may raise anything; the copy then shares
        return


class ExternalState:
    """The state outside a module, of one copy of it.

    Attributes:
        places: where it lies: a holder (a class, or the names of a file) and a name.
        held: for each place the value that is swapped out: the copy's own while it is idle, another's while it runs.
        caches: functions with an lru_cache. They are cleared whenever another copy has run.
    """

    # The copy that ran last.
    latest: ExternalState | None = None
    lock = threading.RLock()

    def __init__(self, module: nn.Module) -> None:
        self.locations: list[tuple[Any, str]] = []
        self.caches: list[Any] = []
        self.held: list[tuple[Any, Any]] = []
        self.inside = 0
        memo: dict[int, Any] = {}
        known: set[int] = set()
        for holder, name in dict.fromkeys(_find_locations(module, self.caches)):
            value = _get_value(holder.holder, name)
            if id(value) in known or not _is_small(value):
                continue
            try:
                mine = _copy_value(value, memo)
            except Exception:  # it holds what cannot be copied
                continue
            if isinstance(value, CONTAINERS):
                known.add(id(value))
            self.locations.append((holder.holder, name))
            self.held.append(mine)

    @classmethod
    def of(cls, module: nn.Module) -> ExternalState | None:
        for hook in module._forward_pre_hooks.values():
            if isinstance(own := getattr(hook, "__self__", None), cls):
                return own
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> ExternalState:
        other = copy.copy(self)
        memo[id(self)] = other
        other.inside = 0
        inner: dict[int, Any] = {}
        other.held = [(_clone_tensor(value), copy.deepcopy(items, inner)) for value, items in self.held]
        return other

    def enter(self, *_: object) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                self._swap_values()
            if ExternalState.latest is not self:
                ExternalState.latest = self
                for cache in self.caches:
                    cache.cache_clear()

    def leave(self, *_: object) -> None:
        with self.lock:
            if self.inside == 1:
                self._swap_values()
            self.inside = max(self.inside - 1, 0)

    def _swap_values(self) -> None:
        for number, (holder, name) in enumerate(self.locations):
            with suppress(Exception):  # a class may forbid it; then that place goes on being shared
                value = _get_value(holder, name)
                there = (value, _list_items(value))
                mine, items = self.held[number]
                if mine is not value:
                    _set_value(holder, name, mine)
                if isinstance(mine, CONTAINERS):
                    _replace_items(mine, items)
                self.held[number] = there


class _Owner:
    """A class or the globals of a module, compared by identity."""

    def __init__(self, holder: Any) -> None:
        self.holder = holder

    def __hash__(self) -> int:
        return id(self.holder)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Owner) and self.holder is other.holder


def names_in(code: types.CodeType) -> Iterator[str]:
    """Every name that a code object and the code objects inside it refer to."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_in(inner)


@functools.lru_cache(maxsize=4096)  # a check copies its target hundreds of times
def _assigned_names(code: types.CodeType) -> frozenset[str]:
    """Names that a piece of code sets, of its file or as attributes."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_GLOBAL", "STORE_ATTR")}
    return frozenset(
        own.union(*(_assigned_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))
    )


def _find_locations(module: nn.Module, caches: list[Any]) -> Iterator[tuple[_Owner, str]]:
    classes = [kind for part in module.modules() for kind in type(part).__mro__ if not is_third_party(kind.__module__)]
    waiting: list[Any] = list(dict.fromkeys(classes))
    for part in module.modules():  # functions that a module was given
        waiting += [value for value in vars(part).values() if isinstance(value, types.FunctionType)]
    done: set[int] = set()
    while waiting:
        found = waiting.pop()
        if id(found) in done:
            continue
        done.add(id(found))
        if isinstance(found, EnumMeta):
            continue
        if isinstance(found, type):
            functions = list(_list_functions(found))
            waiting += functions
            yield from ((_Owner(found), name) for name in _mutable_class_attributes(found, functions))
        elif isinstance(found, functools._lru_cache_wrapper):
            caches.append(found)
            waiting.append(found.__wrapped__)
        elif isinstance(found, types.FunctionType) and not is_third_party(found.__module__):
            own = found.__globals__
            stored = _assigned_names(found.__code__)
            for name in dict.fromkeys(names_in(found.__code__)):
                value = own.get(name, MISSING)
                if isinstance(value, (*CONTAINERS, Tensor)) or (isinstance(value, PLAIN) and name in stored):
                    yield _Owner(own), name
                elif isinstance(value, FOLLOWED) and not is_third_party(getattr(value, "__module__", None)):
                    waiting.append(value)


def _list_functions(kind: type) -> Iterator[Any]:
    for value in list(vars(kind).values()):
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        if isinstance(value, types.FunctionType | functools._lru_cache_wrapper):
            yield value


def _mutable_class_attributes(kind: type, functions: list[Any]) -> Iterator[str]:
    """Names of a class that hold what a call may change, or that a call may set on it."""
    stored: set[str] = set()
    speaks_of_classes = {"type", "__class__", *(each.__name__ for each in kind.__mro__)}
    for function in functions:
        code = getattr(function, "__code__", None)
        if code is None or function.__name__ == "__init__":
            continue
        if code.co_varnames[:1] == ("cls",) or not speaks_of_classes.isdisjoint(names_in(code)):
            stored |= _assigned_names(code)
    for name, value in list(vars(kind).items()):
        if name.startswith("__") or (isinstance(value, CONTAINERS) and name.startswith("_abc_")):
            continue
        if isinstance(value, (*CONTAINERS, Tensor)) or (isinstance(value, PLAIN) and name in stored):
            yield name
    yield from (name for name in stored if name not in vars(kind) and not name.startswith("__"))


def _get_value(holder: Any, name: str) -> Any:
    return (holder if isinstance(holder, dict) else vars(holder)).get(name, MISSING)


def _set_value(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, MutableMapping):
        if value is MISSING:
            holder.pop(name, None)
        else:
            holder[name] = value
    elif value is MISSING:
        delattr(holder, name)
    else:
        setattr(holder, name, value)


def _list_items(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, CONTAINERS) else None


def _replace_items(container: Any, items: Any) -> None:
    container.clear()
    if isinstance(container, dict | set):
        container.update(items)
    else:
        container.extend(items)


def _clone_tensor(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _copy_value(value: Any, memo: dict[int, Any]) -> tuple[Any, Any]:
    """A value for a copy alone: the same container, and copies of what is in it."""
    return _clone_tensor(value), copy.deepcopy(_list_items(value), memo)


def _is_small(value: Any, depth: int = 0) -> bool:
    """Whether a store can be copied each time: no modules, no files, no thousands of entries."""
    if isinstance(value, nn.Module | types.ModuleType) or depth > 6:
        return False
    if isinstance(value, Tensor):
        return value.numel() <= 10**6
    if isinstance(value, (*CONTAINERS, tuple)):
        if len(value) > LARGEST:
            return False
        entries = list(value.values()) if isinstance(value, dict) else list(value)
        return all(_is_small(entry, depth + 1) for entry in entries)
    return True
