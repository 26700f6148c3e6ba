"""Deep copies of modules: fast, and of modules that hold what Python's own deep copy refuses."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


class InitialMemo(dict[int, Any]):
    """The memo of a top-level deep copy, as distinguished from that of a nested one."""


def deepcopy(module: Any) -> Any:
    """A copy that shares no tensor with the module. Activations it has kept are detached from their graph.

    What cannot be copied at all, such as a lock, is shared. Raises what `copy.deepcopy` raises if even that fails.
    """
    try:
        return copy.deepcopy(module, copy_empty_containers(module))
    except Exception:  # then one value after the other
        memo = copy_empty_containers(module)
        for value in _list_values(module):
            if isinstance(value, Tensor):
                if not value.is_leaf:
                    memo[id(value)] = value.detach().clone()
            elif not isinstance(value, nn.Module | dict | list | tuple | set):
                try:
                    copy.deepcopy(value)
                except Exception:  # that one it is
                    memo[id(value)] = value
        return copy.deepcopy(module, memo)


def copy_empty_containers(module: nn.Module) -> InitialMemo:
    """A memo for `copy.deepcopy` that holds a copy of every empty dictionary and set of the module.

    A submodule has about a dozen dictionaries of hooks, nearly all of them empty. `copy.deepcopy` rebuilds each through
    the pickle protocol, which takes most of the time of copying a small module.
    """
    memo = InitialMemo()
    for part in module.modules():
        for value in vars(part).values():
            if type(value) in (OrderedDict, dict, set) and not value:
                memo[id(value)] = type(value)()
    return memo


def _list_values(module: nn.Module) -> Iterator[Any]:
    """Everything that the module and its parts hold, and what is in their containers."""
    for part in module.modules():
        waiting = list(vars(part).values())
        seen: set[int] = set()
        while waiting:
            value = waiting.pop()
            if id(value) in seen or isinstance(value, nn.Module):
                continue
            seen.add(id(value))
            yield value
            if isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, list | tuple | set):
                waiting += value
