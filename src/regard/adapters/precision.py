"""A target in another precision, and the coarsest precision that a computation passes through."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from regard.adapters.deepcopy import deepcopy
from regard.adapters.dispatch_mode import HigherOrderDispatchMode
from regard.adapters.rng import Rng

COARSER = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}


class Float64Arguments(TorchFunctionMode):
    """Every torch function sees its single-precision arguments in double precision.

    This reruns a plain function in float64 although it closes over float32 numbers. What is written in place keeps its
    precision, since other code may hold a reference to it.
    """

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = dict(kwargs or {})
        in_place = name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
        in_place = in_place or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
        written, read = (args[:1], args[1:]) if in_place else ((), args)
        out = kwargs.pop("out", None)
        kwargs = {key: _widen(each) for key, each in kwargs.items()}
        if out is not None:
            kwargs["out"] = out
        return func(*written, *map(_widen, read), **kwargs)


def _widen(value: Any) -> Any:
    """The same argument with tensors in float64; torch's tree_map takes longer than the operations of small cases."""
    if isinstance(value, Tensor):
        return value.double() if value.dtype in (torch.float32, torch.float16, torch.bfloat16) else value
    if value is None or type(value) in (bool, int, float, str, slice, torch.dtype):
        return value
    if type(value) in (tuple, list):
        return type(value)(_widen(each) for each in value)
    return tree_map_only(Tensor, _widen, value)


class _NarrowingMode(HigherOrderDispatchMode):
    """Watches a computation for places where double-precision numbers are rounded to fewer digits."""

    def __init__(self) -> None:
        super().__init__()
        self.coarsest = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.call(func, args, kwargs)
        leaves = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        made = max((COARSER.get(leaf.dtype, 0) for leaf in leaves if isinstance(leaf, Tensor)), default=0)
        if made > COARSER[self.coarsest]:
            given = (leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            if torch.float64 in given:
                self.coarsest = next(dtype for dtype, rank in COARSER.items() if rank == made)
        return result


def find_coarsest_dtype(run: Callable[[], object]) -> torch.dtype:
    """The coarsest precision to which `run` rounds numbers that it was given in float64.

    Some operators do not run under a dispatch mode, FlexAttention among them. Then float32 is assumed, which is the
    bound that accuses less.
    """
    try:
        with _NarrowingMode() as mode:
            run()
    except Exception:  # a call that fails without the mode as well is met by the law itself
        return torch.float32
    return mode.coarsest


def perturb_parameters(target: Any, eps: float, rng: Rng) -> Callable[[], None]:
    """Move every parameter of a module by a rounding; the function returned puts them back."""
    if not isinstance(target, nn.Module):
        return lambda: None
    kept = [(p, p.detach().clone()) for p in target.parameters() if p.is_floating_point()]
    for parameter, old in kept:
        parameter.copy_(old * (1 + eps * rng.normal(*old.shape).to(old.dtype)))

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
        with Float64Arguments():
            return target(*args, **kwargs)

    return functools.update_wrapper(doubled, target, assigned=())  # the signature is that of the function itself
