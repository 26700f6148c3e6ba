"""How many bytes a run needs at once, found without running it.

A copy of the module that has shapes and no numbers is run instead. Every storage is entered when an operation makes it
and struck out when nobody holds it any more, in the order in which the real run would allocate and free:

    peak = resident + max over time of the bytes that are alive,    resident = parameters + buffers + inputs

What is counted is what torch's CPU allocator is asked for. Not counted is what an operation allocates and frees within
itself, such as a copy that a product makes of a matrix with odd strides, and what goes past the allocator: scratch of
matrix libraries, packed weights and tiles of our kernels, Python, and what the C library does not give back.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from regard.attention import Attention, attend
from regard.cost_model.optimizers import Optimizer, optimizer_for, state_bytes
from regard.errors import CostError
from regard.kernels.library import missing
from regard.layers.feedforward import FeedForward
from regard.layers.linear import ACTIVATIONS, GEMV_ROWS, fits_kernel, is_plain_linear

Loss = str | Callable[[Any], Tensor]


@dataclass(frozen=True)
class Lifetimes:
    """The bytes of a run.

    Attributes:
        resident: parameters, buffers and inputs, which are there from the first moment to the last.
        transient: the most that was alive beside them at one time.
        state: what the optimizer keeps from step to step; part of `transient`.
        kept: what the forward pass left for the backward pass, beside parameters and inputs.
        own: the most that one of the repeated blocks left, without what it hands to the next.
    """

    resident: int
    transient: int
    state: int = 0
    kept: int = 0
    own: int = 0

    @property
    def peak(self) -> int:
        return self.resident + self.transient


class Ledger(TorchDispatchMode):
    """Which storages are alive, and the most bytes that ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.ref] = {}

    def know(self, tensors: Iterable[Tensor]) -> int:
        """Storages that were there before and are not entered; their bytes."""
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._sizes:
                self._watch(storage, 0)
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._enter(tensor)
        return made

    def _enter(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self._sizes.get(storage._cdata)
        if known is None:
            self._watch(storage, storage.nbytes())
            self.now += storage.nbytes()
        elif 0 < known != storage.nbytes():  # an output that was given is made to fit
            self.now += storage.nbytes() - known
            self._sizes[storage._cdata] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _watch(self, storage: torch.UntypedStorage, size: int) -> None:
        address = storage._cdata
        self._sizes[address] = size
        self._watches[address] = weakref.ref(storage, lambda _: self._strike(address))

    def _strike(self, address: int) -> None:
        self.now -= self._sizes.pop(address, 0)
        self._watches.pop(address, None)


# Runs


def forward_lifetimes(target: Any, inputs: tuple[tuple, dict], dtype: torch.dtype | None = None) -> Lifetimes:
    """Of one forward pass in evaluation mode, without gradients."""
    with _Stage(target, inputs, dtype) as stage:
        if isinstance(stage.module, nn.Module):
            stage.module.eval()
        with torch.no_grad():
            made = stage.run()
        transient = stage.ledger.peak
        del made
    return Lifetimes(stage.resident, transient)


def training_lifetimes(
    target: Any,
    inputs: tuple[tuple, dict],
    dtype: torch.dtype | None = None,
    *,
    stepped: Stepped | None = None,
    loss: Loss = "mean",
    recomputed: bool = False,
) -> Lifetimes:
    """Of a step of training that is not the first, with the dropout that the module has.

        forward;  loss;  backward, gradients none before and all after;  optimizer.step()

    stepped: what the optimizer needs, which `optimizer_lifetimes` tells; that of AdamW if it is not given.
    recomputed: every repeated block keeps its inputs only and runs once more on the way back
        (`torch.utils.checkpoint`).
    """
    stepped = optimizer_lifetimes(target, dtype) if stepped is None else stepped
    with _Stage(target, inputs, dtype) as stage:
        module, ledger = stage.module, stage.ledger
        own: list[int] = [0]
        if isinstance(module, nn.Module):
            module.train()
            for block in repeated(module):
                _wrap(block, _recomputed if recomputed else _weighed(ledger, own))
        made = stage.run()
        results = [each for each in tree_leaves(made) if isinstance(each, Tensor) and each.grad_fn is not None]
        graph = [each.grad_fn for each in results]
        total = _loss_of(made, results, loss)
        # What only the results hold goes with them; what the graph holds is kept.
        del made, results
        kept = ledger.now - total.untyped_storage().nbytes()
        del graph
        total.backward()
        del total
        transient = stepped.state + max(ledger.peak, ledger.now + stepped.more)
    return Lifetimes(stage.resident, transient, stepped.state, kept, max(own))


class Stepped(NamedTuple):
    """What an optimizer keeps, and the most that it needs beside that and the gradients while it makes a step."""

    state: int = 0
    more: int = 0


def optimizer_lifetimes(target: Any, dtype: torch.dtype | None = None, optimizer: Optimizer = "adamw") -> Stepped:
    """Of a step of the optimizer that is not the first. It depends on the parameters and on no other size.

    Those with a name go from parameter to parameter and hold on to something of the one before: two large neighbours
    say what a whole step needs.
    """
    learned = [each for each in target.parameters() if each.requires_grad] if isinstance(target, nn.Module) else []
    if not learned:
        return Stepped()
    if callable(optimizer):
        return _stepped(learned, dtype, optimizer)
    pairs = [list(pair) for pair in itertools.pairwise(learned)] or [learned]
    weights = ((1, 1), (1, 2), (2, 1))
    chosen = [max(pairs, key=lambda pair, w=w: w[0] * pair[0].nbytes + w[1] * pair[-1].nbytes) for w in weights]
    more = max(_stepped(pair, dtype, optimizer).more for pair in chosen)
    return Stepped(state_bytes(optimizer, learned, None if dtype is None else dtype.itemsize), more)


def _stepped(learned: list[nn.Parameter], dtype: torch.dtype | None, optimizer: Optimizer) -> Stepped:
    ledger = Ledger()
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = [nn.Parameter(_like(each.detach(), dtype)) for each in learned]
        ledger.know(parameters)
        with ledger:
            stepping = optimizer_for(optimizer, parameters)
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            gradients = ledger.now
            stepping.step()
            there = ledger.peak = ledger.now
            stepping.step()
            more = ledger.peak - there
    return Stepped(there - gradients, more)


class _Stage:
    """Where a run is played: a module without numbers, its inputs, and the ledger."""

    def __init__(self, target: Any, inputs: tuple[tuple, dict], dtype: torch.dtype | None) -> None:
        self.target, self.dtype = target, dtype
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.ledger = Ledger()
        with self.mode:
            self.module = _twin(target, dtype) if isinstance(target, nn.Module) else target
            self.inputs = tree_map(_imagined, inputs)
        there = [each for each in tree_leaves(self.inputs) if isinstance(each, Tensor)]
        if isinstance(self.module, nn.Module):
            there += [*self.module.parameters(), *self.module.buffers()]
        self.resident = self.ledger.know(there)

    def run(self) -> Any:
        positional, named = self.inputs
        if isinstance(self.module, Attention):
            return attend(*positional, attention=self.module, **named)
        return self.module(*positional, **named)

    def __enter__(self) -> _Stage:
        self.mode.__enter__()
        self.ledger.__enter__()
        return self

    def __exit__(self, kind, error, trace) -> None:
        self.ledger.__exit__(kind, error, trace)
        self.mode.__exit__(kind, error, trace)
        if isinstance(
            error, DataDependentOutputException | DynamicOutputShapeException | UnsupportedFakeTensorException
        ):
            raise CostError(
                "This module cannot be followed without numbers.",
                asked=f"the memory of {type(self.target).__name__}",
                found=str(error).split("\n")[0],
                because="what it does depends on the numbers in its tensors, and a prediction has none",
                instead="a part of it that does not look at numbers, such as its encoder",
            ) from error


# A module without numbers


def _imagined(each: Any) -> Any:
    if not isinstance(each, Tensor):
        return each
    return _like(each.detach(), None).requires_grad_(each.requires_grad)


def _like(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor as large, laid out alike, in the memory of the CPU, which is not touched."""
    wanted = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device="cpu")


def _twin(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy whose parameters and buffers have no numbers, to do with as we like."""
    known: dict[int, Any] = {}
    for parameter in module.parameters():
        known[id(parameter)] = nn.Parameter(_like(parameter.detach(), dtype), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        known[id(buffer)] = _like(buffer, dtype)
    try:
        made = copy.deepcopy(module, known)
    except (TypeError, RuntimeError) as error:
        raise CostError(
            "This module cannot be copied.",
            asked=f"the memory of {type(module).__name__}",
            found=str(error).split("\n")[0],
            because="a prediction runs a copy without numbers, so that nothing of the module itself changes",
            instead="a module that copy.deepcopy can copy",
        ) from error
    for part in made.modules():
        if (
            type(part) is FeedForward
            and part.activation_fn is ACTIVATIONS.get(part.activation)
            and is_plain_linear(part.inner)
        ):
            part.__dict__["_expand"] = _fuse_activation(part)
    return made


def _fuse_activation(part: FeedForward) -> Callable[[Tensor], Tensor]:
    """What `FeedForward` does for plain eager tensors: gemm applies the activation in the same pass.

    Under a dispatch mode the layer would use torch's product, with a second tensor of hidden channels.
    """
    weight, bias = part.inner.weight, part.inner.bias

    def expand(x: Tensor) -> Tensor:
        fused = not torch.is_grad_enabled() and missing() is None and fits_kernel(x, weight, bias)
        if fused and x.numel() > GEMV_ROWS * weight.shape[1]:
            return torch.ops.regard.gemm(x, weight, bias, part.activation)
        return part.activation_fn(part.inner(x))

    return expand


# Blocks


def repeated(module: nn.Module) -> list[nn.Module]:
    """The blocks that a model repeats: members of the innermost lists whose members are all of one kind.

    A member has parts of its own: a list of linear layers is no list of blocks.

    >>> from regard.models import GPT, GPTConfig
    >>> len(repeated(GPT(GPTConfig(vocab_size=11, context_length=8, dim=4, layers=3, heads=2))))
    3
    """
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential) and _alike(part)]
    inner = [one for one in lists if not any(other is not one and other in set(one.modules()) for other in lists)]
    return list(dict.fromkeys(block for part in inner for block in part))


def _alike(blocks: Iterable[nn.Module]) -> bool:
    members = list(blocks)
    return len({type(block) for block in members}) == 1 and all(
        any(True for _ in block.children()) and any(True for _ in block.parameters()) for block in members
    )


def _wrap(block: nn.Module, how: Callable[[Callable], Callable]) -> None:
    block.__dict__["forward"] = how(block.forward)


def _recomputed(forward: Callable) -> Callable:
    def again(*args: Any, **named: Any) -> Any:
        # Random numbers are not there, so their state need not be saved either.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **named)

    return again


def _weighed(ledger: Ledger, found: list[int]) -> Callable[[Callable], Callable]:
    """A block that tells how much it leaves beside what it returns."""

    def how(forward: Callable) -> Callable:
        def weighed(*args: Any, **named: Any) -> Any:
            before = ledger.now
            made = forward(*args, **named)
            given = {each.untyped_storage()._cdata: each for each in tree_leaves(made) if isinstance(each, Tensor)}
            found.append(ledger.now - before - sum(each.untyped_storage().nbytes() for each in given.values()))
            return made

        return weighed

    return how


# The loss


def _loss_of(made: Any, results: list[Tensor], loss: Loss) -> Tensor:
    if callable(loss):
        return loss(made)
    if not results:
        raise CostError(
            "Nothing here can be learned.",
            asked="the memory of a step of training",
            because="no output depends on a parameter that wants a gradient",
            instead="memory.peak_forward, or module.requires_grad_()",
        )
    if loss == "mean":
        return sum((each.mean() for each in results[1:]), results[0].mean())
    if loss == "cross_entropy":
        logits = results[-1].flatten(0, -2)
        return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
    raise CostError(
        f"There is no loss {loss!r}.",
        asked=f"loss={loss!r}",
        because='known are "mean" of all outputs and "cross_entropy" of the last, whose channels are logits',
        instead='loss="mean", or a function from outputs to a number',
    )
