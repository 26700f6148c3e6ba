"""Copies of modules that hold what Python's own deep copy refuses: results with a history, locks, open files."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def deepcopy(module: nn.Module) -> nn.Module:
    """A copy that shares no tensor with the module. Results it has kept are cut off from their history.

    What cannot be copied at all, such as a lock, is shared. Raises what `copy.deepcopy` raises if even that fails.
    """
    try:
        return copy.deepcopy(module)
    except Exception:  # then one value after the other
        memo: dict[int, Any] = {}
        for value in _values(module):
            if isinstance(value, Tensor):
                if not value.is_leaf:
                    memo[id(value)] = value.detach().clone()
            elif not isinstance(value, nn.Module | dict | list | tuple | set):
                try:
                    copy.deepcopy(value)
                except Exception:  # that one it is
                    memo[id(value)] = value
        return copy.deepcopy(module, memo)


def _values(module: nn.Module) -> Iterator[Any]:
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
