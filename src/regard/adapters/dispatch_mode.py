"""A dispatch mode under which higher-order operators run as well."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode


class HigherOrderDispatchMode(TorchDispatchMode):
    """A dispatch mode that lets higher-order operators through, FlexAttention among them.

    FlexAttention compiles itself. Under a dispatch mode dynamo gives up on it and keeps that in mind, so that every
    later call would raise; on leaving the mode this state is cleared.
    """

    supports_higher_order_operators = True
    _compiles = False

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation itself."""
        if isinstance(func, HigherOrderOperator):
            self._compiles = True
        return func(*args, **(kwargs or {}))

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        if self._compiles or (exc_type is not None and issubclass(exc_type, NotImplementedError)):
            torch._dynamo.reset()
