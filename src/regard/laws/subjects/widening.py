"""Double precision for programs that ask for single precision in their midst."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

NARROW = (torch.float32, torch.float16, torch.bfloat16)
CASTS = ("float", "half", "bfloat16")


class Widening(TorchFunctionMode):
    """Where a computation in float64 asks for fewer digits, as norms and rotations do, it gets float64 all the same.

    So the same program can be judged by the bound of float64. In any other precision nothing is changed.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.active = dtype == torch.float64

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in CASTS and args and isinstance(args[0], torch.Tensor):
            return args[0].double()
        if name == "type_as" and args[1].dtype in NARROW:
            return args[0].double()
        return func(*map(_wide, args), **{key: _wide(value) for key, value in kwargs.items()})


def _wide(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument in NARROW else argument
