"""Copies of a module for tracing: with fake tensors, which have shapes and no memory, or with real ones.

A function is called as it is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from regard.adapters.deepcopy import copy_empty_containers
from regard.errors import CostError

# Parameters up to which a module is executed for real where tracing with fake tensors fails.
SMALL = 60_000_000


class TracedTarget:
    """A module or function, and copies of it that can be run without touching the original.

    Attributes:
        module: the module, if there is one: the target, or what a bound method belongs to.
        name: of the class or function, for messages.
    """

    def __init__(self, target: Any, dtype: torch.dtype) -> None:
        bound = getattr(target, "__self__", None)
        self.target = target
        self.module = target if isinstance(target, nn.Module) else bound if isinstance(bound, nn.Module) else None
        self.method = None if isinstance(target, nn.Module) else getattr(target, "__name__", None)
        self.name = type(target).__name__ if isinstance(target, nn.Module) else self.method or type(target).__name__
        self.dtype = None if self.module is None or dtype == _first_dtype(self.module) else dtype
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fakes: dict[int, Any] = {}

    def make_copy(self, fake: bool) -> tuple[Callable[..., Any], nn.Module | None, list[Tensor]]:
        """Something to call, the module inside it, and its parameters and buffers."""
        if self.module is None:
            return self.target, None, []
        module = self._deepcopy(self._fake_tensors() if fake else self._real_tensors())
        owned = [*module.parameters(), *module.buffers()]
        called = module if isinstance(self.target, nn.Module) else getattr(module, str(self.method))
        return called, module, owned

    def _deepcopy(self, instead: dict[int, Any]) -> nn.Module:
        assert self.module is not None
        try:
            return copy.deepcopy(self.module, {**copy_empty_containers(self.module), **instead})
        except Exception as error:
            raise CostError(
                f"{self.name} cannot be copied.",
                asked=f"cost({self.name}(...))",
                found=f"{type(error).__name__}: {first_line(error)}",
                because="a copy of the module is traced, so that the module itself stays as it is",
                instead="cost(lambda x: ..., inputs=...), a function that makes the module itself",
            ) from error

    def _fake_tensors(self) -> dict[int, Any]:
        """For every tensor of the module a fake one of the same shape, on the CPU, wherever it was.

        Integers on the CPU stay real: tables of indices are small, and control flow may depend on their values.
        """
        for tensor in self._list_tensors():
            if id(tensor) not in self._fakes and (tensor.is_floating_point() or tensor.device.type != "cpu"):
                self._fakes[id(tensor)] = self._fake_tensor(tensor)
        for fake in self._fakes.values():
            fake.grad = None
        return self._fakes

    def _fake_tensor(self, tensor: Tensor) -> Tensor:
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
        made = FakeTensor(self.mode, shape, torch.device("cpu"))
        if isinstance(tensor, nn.Parameter):  # made here, as nn.Parameter(made) would dispatch an operation for each
            made._is_param = True  # pyright: ignore[reportAttributeAccessIssue]
            made.requires_grad_(tensor.requires_grad)
        return made

    def _real_tensors(self) -> dict[int, Any]:
        """For every parameter a real copy; zeros for those on the meta device."""
        made: dict[int, Any] = {}
        for tensor in self._list_tensors():
            if isinstance(tensor, nn.Parameter) or tensor.device.type != "cpu":
                wanted = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
                real = torch.zeros(tensor.shape, dtype=wanted, device="cpu") if tensor.is_meta else tensor.detach()
                double = real.to("cpu", wanted, copy=True)
                is_learned = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(double, tensor.requires_grad) if is_learned else double
        return made

    def _list_tensors(self) -> list[Tensor]:
        """Parameters, buffers, and what modules hold beside them."""
        assert self.module is not None
        found: list[Tensor] = []
        for module in self.module.modules():
            found += [tensor for tensor in module._parameters.values() if tensor is not None]
            found += [tensor for tensor in module._buffers.values() if tensor is not None]
            found += [value for value in vars(module).values() if isinstance(value, Tensor) and value.is_meta]
        return found

    @property
    def is_small(self) -> bool:
        """Whether it can be executed for real in a few seconds."""
        return self.module is None or sum(tensor.numel() for tensor in self.module.parameters()) <= SMALL

    @property
    def accepts(self) -> set[str]:
        """Names of the arguments it takes."""
        called = self.target.forward if isinstance(self.target, nn.Module) else self.target
        try:
            return set(inspect.signature(called).parameters)
        except (TypeError, ValueError):
            return set()


def _first_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of a module's parameters."""
    return next((each.dtype for each in module.parameters() if each.is_floating_point()), torch.float32)


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:200]
