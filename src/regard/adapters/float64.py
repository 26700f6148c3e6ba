"""Double precision for code that casts to single precision inside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

NARROW = (torch.float32, torch.float16, torch.bfloat16)
CASTS = ("float", "half", "bfloat16")
# They create tensors of the default dtype if none is given.
FROM_NOWHERE = (torch.zeros, torch.ones, torch.empty, torch.full, torch.eye, torch.linspace)


class Float64Casts(TorchFunctionMode):
    """Casts of a float64 computation to a shorter dtype, as in norms and rotations, stay in float64.

    So the same program can be judged by the bound of float64.
    """

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in CASTS and args and isinstance(args[0], torch.Tensor):
            return args[0].double()
        if name == "type_as" and args[1].dtype in NARROW:
            return args[0].double()
        if func in FROM_NOWHERE and kwargs.get("dtype") is None and (func is not torch.full or _is_float(args)):
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*map(_widen, args), **{key: _widen(value) for key, value in kwargs.items()})


def float64_casts(dtype: torch.dtype) -> AbstractContextManager[object]:
    """`Widening` for float64, and nothing for any other precision."""
    return Float64Casts() if dtype == torch.float64 else nullcontext()


def _widen(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in NARROW else argument


def _is_float(args: Any) -> bool:
    return len(args) > 1 and isinstance(args[1], float)
