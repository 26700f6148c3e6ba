"""What a real run does, counted without any of the formulas.

`Counter` watches every operator that torch dispatches and counts products from the shapes of the tensors that really
arrive. It refuses what it cannot look into, so that no test passes because a product was hidden.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from regard.attention import operator
from regard.backends import find
from regard.cost_model.quantity import Quantity
from regard.layers import PatchEmbedding

# Operators with products inside, which are not dispatched; and words in the name of any other that may have some.
HIDDEN = ("attention", "transformer", "multi_head", "rnn", "lstm", "gru", "cdist", "trilinear", "linalg_solve")
SUSPICIOUS = ("mm", "matmul", "conv", "linear", "dot", "mv", "bilinear", "einsum")
HARMLESS = ("upsample", "grid_sampler", "_convert", "comm")
EXPONENTIALS = {"_softmax", "_log_softmax", "exp", "exp_", "exp2", "logsumexp", "_safe_softmax"}


class Counter(TorchDispatchMode):
    """Multiply-adds of every product and convolution of a run, and the exponentials of its softmaxes.

    Attributes:
        macs: multiply-adds; of tensors of dtype `only`, if that is given.
        exponentials: numbers that exp was taken of, inside a softmax or outside.
        by_operation: the multiply-adds again, by the name of the operator.
    """

    def __init__(self, only: torch.dtype | None = None) -> None:
        super().__init__()
        self.only = only
        self.exponentials = 0
        self.by_operation: dict[str, int] = defaultdict(int)

    @property
    def macs(self) -> int:
        return sum(self.by_operation.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        space, name = func.name().split("::")
        name = name.split(".")[0]
        if space == "regard" or any(word in name for word in HIDDEN):
            raise AssertionError(f"{space}::{name} hides its products; count over the reference backend")
        result = func(*args, **(kwargs or {}))
        if name in PRODUCTS:
            dtype = next(a.dtype for a in args if isinstance(a, Tensor))
            if self.only in (None, dtype):
                self.by_operation[name] += PRODUCTS[name](args, result)
        elif any(word in name for word in SUSPICIOUS) and not any(word in name for word in HARMLESS):
            raise AssertionError(f"{space}::{name} may be a product of unknown size")
        if name in EXPONENTIALS and self.only in (None, args[0].dtype):
            self.exponentials += args[0].numel()
        return result


# Products: the numbers of the result, times the length of the sum each of them is. `result` is what came out.


def _product(left: int) -> Any:
    """A product whose left operand, the argument of this number, has the summed axis last."""
    return lambda args, result: result.numel() * args[left].shape[-1]


def _summed_matrices(args: Any, result: Tensor) -> int:
    """addbmm: the products of a batch, added up."""
    return result.numel() * args[1].shape[-1] * args[1].shape[0]


def _convolution(args: Any, result: Tensor) -> int:
    """Forward, a number of the output sums over the channels of its group and the kernel. A transposed convolution
    spreads every number of its input over as much. Kernels at the rim meet padding, and multiply it."""
    weight, transposed = args[1], args[6]
    return (args[0] if transposed else result).numel() * math.prod(weight.shape[1:])


def _convolution_backward(args: Any, result: Any) -> int:
    """The gradient of the input and that of the weight pair the same numbers as forward does."""
    slope, read, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    return (read if transposed else slope).numel() * math.prod(weight.shape[1:]) * (wanted[0] + wanted[1])


PRODUCTS: dict[str, Any] = {
    "mm": _product(0),
    "bmm": _product(0),
    "mv": _product(0),
    "dot": lambda args, result: args[0].numel(),
    "vdot": lambda args, result: args[0].numel(),
    "addmm": _product(1),
    "addmm_": _product(1),
    "_addmm_activation": _product(1),
    "baddbmm": _product(1),
    "baddbmm_": _product(1),
    "addmv": _product(1),
    "addmv_": _product(1),
    "addbmm": _summed_matrices,
    "convolution": _convolution,
    "_convolution": _convolution,
    "convolution_backward": _convolution_backward,
}


@contextmanager
def reference_only() -> Iterator[None]:
    """Every attention of Regard runs on the reference backend, whoever would have been chosen or named."""
    reference = find("reference")
    with (
        patch.object(operator, "choose", lambda request: reference),
        patch.object(operator, "find", lambda name: reference),
    ):
        yield


def count(
    module: nn.Module, *inputs: Any, backward: bool = False, learns_input: bool | None = None, **kwargs: Any
) -> Counter:
    """What a module really multiplies, forward or backward, in float64 on the reference backend.

    Only float64 is counted: the reference multiplies marks of what is not finite in float32, which is no attention.

    learns_input: whether tensors that come in want gradients; as `wants_gradient` says unless given.
    """
    module, inputs, kwargs = _prepared(module, inputs, kwargs, torch.float64, learns_input)
    counter = Counter(only=torch.float64)
    with reference_only():
        if not backward:
            with torch.no_grad(), counter:
                module(*inputs, **kwargs)
            return counter
        total = _total(module(*inputs, **kwargs))
        with counter:
            total.backward()
    return counter


def measure_saved_bytes(module: nn.Module, *inputs: Any, learns_input: bool | None = None, **kwargs: Any) -> int:
    """Bytes that a training step in float32 saves between its forward and its backward pass, without dropout.

    Storages are counted once and whole. Two runs are watched, with everything held: what both have saved was there
    before and is no activation. That leaves out parameters, buffers, the input, and what Regard remembers of a pattern.
    """
    module, inputs, kwargs = _prepared(module, inputs, kwargs, torch.float32, learns_input)
    module.train()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    given = {t.untyped_storage().data_ptr() for t in _tensors((inputs, kwargs))}
    given |= {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    found = newly_saved(lambda: module(*inputs, **kwargs))
    return sum(size for place, size in found.items() if place not in given)


class SavedTensor:
    """What a graph holds in place of a saved tensor; it is deleted with the node that saved it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def newly_saved(run: Callable[[], Any]) -> dict[int, int]:
    """Address and size of every storage that the graph of a run holds when it is done, and that of another did not.

    A node whose result is only compared, as in `isfinite`, saves its operand too, and is gone before the run is.
    """
    alive: list[Any] = []
    runs: list[dict[int, int]] = []
    for _ in range(3):  # the first fills the caches
        saved: weakref.WeakSet[SavedTensor] = weakref.WeakSet()

        def keep(tensor: Tensor, saved: weakref.WeakSet[SavedTensor] = saved) -> SavedTensor:
            saved_tensor = SavedTensor(tensor.detach())
            saved.add(saved_tensor)
            return saved_tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved_tensor: saved_tensor.tensor):
            alive.append(run())
        storages = [saved_tensor.tensor.untyped_storage() for saved_tensor in saved]
        runs.append({storage.data_ptr(): storage.nbytes() for storage in storages})
    _, once, again = runs
    return {place: size for place, size in again.items() if place not in once}


def wants_gradient(module: nn.Module) -> bool:
    """Whether what goes in may have been learned: tokens of a layer may, images and words may not."""
    return type(module).__module__.split(".")[:2] != ["regard", "models"] and not isinstance(module, PatchEmbedding)


def _prepared(module: nn.Module, inputs: Any, kwargs: Any, dtype: torch.dtype, learns_input: bool | None) -> Any:
    learns = wants_gradient(module) if learns_input is None else learns_input

    def ready(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.detach().to(dtype).clone().requires_grad_(learns)
        return value

    module = copy.deepcopy(module).to(dtype)
    return module, tuple(map(ready, inputs)), {name: ready(value) for name, value in kwargs.items()}


def _total(output: Any) -> Tensor:
    """One number that everything a module returns flows into."""
    learned = [tensor.double().sum() for tensor in _tensors(output) if tensor.requires_grad]
    assert learned, "nothing that came out has a gradient"
    return torch.stack(learned).sum()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def in_input_sizes(quantity: Quantity) -> sympy.Expr:
    """A formula in which only the sizes of the input are symbols."""
    numbers: Any = {symbol: value for symbol, value in quantity.values.items() if str(symbol) not in "BNMTRW"}
    return quantity.formula.subs(numbers)
