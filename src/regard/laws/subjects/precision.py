"""The same subject in another precision, and how precise a computation really is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from regard.laws.law import Dice
from regard.laws.subjects.deepcopying import deepcopy

COARSER = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


class Doubling(TorchFunctionMode):
    """Every torch function sees its single-precision arguments in double precision.

    This reruns a plain function in float64 although it closes over float32 numbers. What is written in place keeps its
    precision, since someone else may hold it.
    """

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = dict(kwargs or {})
        in_place = name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
        in_place = in_place or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
        widened = tree_map_only(Tensor, _widened, args[1:] if in_place else args)
        if in_place:
            widened = (args[0], *widened)
        out = kwargs.pop("out", None)
        kwargs = tree_map_only(Tensor, _widened, kwargs)
        if out is not None:
            kwargs["out"] = out
        return func(*widened, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) else tensor


class _Narrowings(TorchDispatchMode):
    """Watches a computation for places where double-precision numbers are rounded to fewer digits."""

    def __init__(self) -> None:
        super().__init__()
        self.coarsest = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if torch.float64 in given:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and COARSER.get(leaf.dtype, 0) > COARSER[self.coarsest]:
                    self.coarsest = leaf.dtype
        return result


def narrowest(run: Callable[[], object]) -> torch.dtype:
    """The coarsest precision to which `run` rounds numbers that it was given in float64."""
    with _Narrowings() as watch:
        run()
    return watch.coarsest


def moved(target: Any, eps: float, dice: Dice) -> Callable[[], None]:
    """Move every parameter of a module by a rounding; the function returned puts them back."""
    if not isinstance(target, nn.Module):
        return lambda: None
    kept = [(p, p.detach().clone()) for p in target.parameters() if p.is_floating_point()]
    for parameter, old in kept:
        parameter.copy_(old * (1 + eps * dice.normal(*old.shape).to(old.dtype)))

    def back() -> None:
        for parameter, old in kept:
            parameter.copy_(old)

    return back


def in_precision(target: Any, dtype: torch.dtype) -> Any:
    """A copy of a module with its numbers in `dtype`; a function that computes in float64, or as its inputs are."""
    if isinstance(target, nn.Module):
        return deepcopy(target).to(dtype)
    if dtype != torch.float64:
        return target

    def doubled(*args: Any, **kwargs: Any) -> Any:
        with Doubling():
            return target(*args, **kwargs)

    return functools.update_wrapper(doubled, target, assigned=())  # the signature is that of the function itself
