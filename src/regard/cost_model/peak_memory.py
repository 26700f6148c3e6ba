"""How many bytes a run needs at once, found without running it.

A copy of the module is traced with fake tensors. The trace has every allocation and release of a storage, in the order
in which the real run makes them:

    peak = resident + max over time of the bytes that are alive,    resident = parameters + buffers + inputs

What is counted is what torch's CPU allocator is asked for. Not counted is what an operation allocates and frees within
itself, such as a copy that a product makes of a matrix with odd strides, and what goes past the allocator: scratch of
matrix libraries, packed weights and tiles of our kernels, Python, and what the C library does not give back.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from regard.adapters.example_inputs import ExampleInputs, InputSpec
from regard.adapters.fake_copies import TracedTarget
from regard.attention import Attention, attend
from regard.cost_model.optimizers import Optimizer, optimizer_for, state_bytes
from regard.cost_model.run_mode import RunMode
from regard.cost_model.sizes import Sizes
from regard.cost_model.symbols import MEANINGS
from regard.cost_model.trace.inputs import make_example_inputs
from regard.cost_model.trace.recorder import ModuleTracker, Recorder
from regard.cost_model.trace.runner import PreparedRun, Runner
from regard.cost_model.trace.storages import StorageLog
from regard.errors import CostError
from regard.kernels.library import missing
from regard.layers.feedforward import FeedForward
from regard.layers.linear import ACTIVATIONS, fits_kernel, is_plain_linear, max_gemv_rows

Loss = str | Callable[[Any], Tensor]


@dataclass(frozen=True)
class TracedMemory:
    """The bytes of a run.

    Attributes:
        resident: parameters, buffers and inputs, which are there from the first moment to the last.
        transient: the most that was alive beside them at one time.
        optimizer_state: what the optimizer holds from step to step; part of `transient`.
        saved: what the forward pass left for the backward pass, beside parameters and inputs.
        saved_by_block: the most that one of the repeated blocks left, without what it hands to the next.
        without_gradients: the most that was alive beside what is resident, gradients and optimizer.
        scratch: the most that the optimizer's step needed beside its state and the gradients.
    """

    resident: int
    transient: int
    optimizer_state: int = 0
    saved: int = 0
    saved_by_block: int = 0
    without_gradients: int = 0
    scratch: int = 0

    @property
    def peak(self) -> int:
        return self.resident + self.transient


def prepare_runner(target: Any, sizes: Sizes, dtype: torch.dtype) -> Runner:
    """Runs a target at given sizes, none of which may be missing."""
    mode = RunMode(dtype=dtype)
    if isinstance(target, Attention):

        def run_attention(*tensors: Tensor, **named: Any) -> Tensor:
            return attend(*tensors, attention=target, **named)

        traced = TracedTarget(run_attention, dtype)
        if sizes.inputs is None:
            return Runner(traced, _describe_attention_inputs(sizes), mode)
    else:
        traced = TracedTarget(target, dtype)
    inputs = make_example_inputs(traced, sizes)
    for symbol in inputs.symbols:
        if symbol not in inputs.known:
            raise _missing_size(MEANINGS[symbol][0])
    return Runner(traced, inputs, mode)


def _describe_attention_inputs(sizes: Sizes) -> ExampleInputs:
    """Query, key and value."""
    if sizes.dim is None or sizes.tokens is None:
        raise _missing_size("dim" if sizes.dim is None else "tokens")
    heads, keys = sizes.heads or 1, sizes.keys or sizes.tokens
    kv_heads, value_dim = sizes.kv_heads or heads, sizes.value_dim or sizes.dim
    shapes = (heads, sizes.tokens, sizes.dim), (kv_heads, keys, sizes.dim), (kv_heads, keys, value_dim)
    return ExampleInputs(tuple(InputSpec((sizes.batch, *shape), requires_grad=True) for shape in shapes))


def _missing_size(size: str) -> CostError:
    return CostError(
        "A run has no size yet.",
        asked="what it needs in memory",
        because=f"nothing says how large {size} is",
        instead=f"cost(..., {size}=16).memory",
    )


# Runs


def trace_forward_memory(runner: Runner) -> TracedMemory:
    """Of one forward pass in eval mode, without gradients."""

    def run(prepared: PreparedRun) -> TracedMemory:
        storages = prepared.recorder.storages
        resident = storages.add_existing(prepared.given)
        _fuse_activations(prepared.module)
        with torch.no_grad(), prepared.recorder.recording():
            output = prepared.call()
        transient = storages.peak_bytes
        del output
        return TracedMemory(resident, transient)

    return runner.execute(runner.inputs.sizes, run)


def trace_training_memory(
    runner: Runner, optimizer: OptimizerMemory, *, loss: Loss = "mean", recomputed: bool = False
) -> TracedMemory:
    """Of a step of training that is not the first, with the dropout that the module has.

        forward;  loss;  backward, gradients none before and all after;  optimizer.step()

    optimizer: what the optimizer needs, found by `trace_optimizer_memory`.
    recomputed: every repeated block saves its inputs only and runs again in backward
        (`torch.utils.checkpoint`).
    """

    def run(prepared: PreparedRun) -> TracedMemory:
        module, storages = prepared.module, prepared.recorder.storages
        resident = storages.add_existing(prepared.given)
        saved_by_block: list[int] = [0]
        if module is not None:
            module.train()
            for block in find_repeated_blocks(module):
                wrap = _checkpoint_forward if recomputed else _measure_forward(storages, saved_by_block)
                block.__dict__["forward"] = wrap(block.forward)
        with torch.enable_grad(), prepared.recorder.recording():
            output = prepared.call()
            results = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.grad_fn is not None]
            graph = [each.grad_fn for each in results]
            total = _compute_loss(output, results, loss)
            # What only the results hold goes with them; what the graph holds is saved.
            del output, results
            saved = storages.live_bytes - total.untyped_storage().nbytes()
            del graph
            total.backward()
            del total
            transient = optimizer.state + max(storages.peak_bytes, storages.live_bytes + optimizer.scratch)
            passing = storages.find_passing_peak()
        found = TracedMemory(resident, transient, optimizer.state, saved, max(saved_by_block))
        return dataclasses.replace(found, without_gradients=passing, scratch=optimizer.scratch)

    return runner.execute(runner.inputs.sizes, run, training=True)


class OptimizerMemory(NamedTuple):
    """The state of an optimizer, and the most that it needs beside that and the gradients while it makes a step."""

    state: int = 0
    scratch: int = 0


def trace_optimizer_memory(
    target: Any, dtype: torch.dtype | None = None, optimizer: Optimizer = "adamw"
) -> OptimizerMemory:
    """Of a step of the optimizer that is not the first. It depends on the parameters and on no other size.

    Those with a name go from parameter to parameter and hold on to something of the one before: two large neighbours
    say what a whole step needs.
    """
    learned = [each for each in target.parameters() if each.requires_grad] if isinstance(target, nn.Module) else []
    if not learned:
        return OptimizerMemory()
    if callable(optimizer):
        return _trace_optimizer(learned, dtype, optimizer)
    pairs = [list(pair) for pair in itertools.pairwise(learned)] or [learned]
    weights = ((1, 1), (1, 2), (2, 1))
    largest = [max(pairs, key=lambda pair, w=w: w[0] * pair[0].nbytes + w[1] * pair[-1].nbytes) for w in weights]
    scratch = max(_trace_optimizer(pair, dtype, optimizer).scratch for pair in largest)
    return OptimizerMemory(state_bytes(optimizer, learned, None if dtype is None else dtype.itemsize), scratch)


def _trace_optimizer(learned: list[nn.Parameter], dtype: torch.dtype | None, optimizer: Optimizer) -> OptimizerMemory:
    recorder = Recorder(ModuleTracker(None))
    storages = recorder.storages
    with FakeTensorMode(allow_non_fake_inputs=True):
        like = [
            torch.empty_strided(each.shape, each.stride(), dtype=dtype or each.dtype, device="cpu") for each in learned
        ]
        parameters = [nn.Parameter(each) for each in like]
        storages.add_existing(parameters)
        with recorder.recording():
            made = optimizer_for(optimizer, parameters)
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            gradients = storages.live_bytes
            made.step()
            before, first = storages.live_bytes, len(storages.changes)
            made.step()
            scratch = max(itertools.accumulate(storages.changes[first:]), default=0)
    return OptimizerMemory(before - gradients, scratch)


# What the eager path does, and a traced one does not


def _fuse_activations(module: nn.Module | None) -> None:
    for part in () if module is None else module.modules():
        if (
            type(part) is FeedForward
            and part.activation_fn is ACTIVATIONS.get(part.activation)
            and is_plain_linear(part.inner)
        ):
            part.__dict__["_expand"] = _fuse_activation(part)


def _fuse_activation(part: FeedForward) -> Callable[[Tensor], Tensor]:
    """What `FeedForward` does for plain eager tensors: gemm applies the activation in the same pass.

    Under a dispatch mode the layer would use torch's product, with a second tensor of hidden channels.
    """
    weight, bias = part.inner.weight, part.inner.bias

    def expand(x: Tensor) -> Tensor:
        fused = not torch.is_grad_enabled() and missing() is None and fits_kernel(x, weight, bias)
        if fused and x.numel() > max_gemv_rows(x.dtype) * weight.shape[1]:
            return torch.ops.regard.gemm(x, weight, bias, part.activation)
        return part.activation_fn(part.inner(x))

    return expand


# Blocks


def find_repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks that a model repeats: members of the innermost lists whose members are all of one kind.

    A member has parts of its own: a list of linear layers is no list of blocks.

    >>> from regard.models import GPT, GPTConfig
    >>> len(find_repeated_blocks(GPT(GPTConfig(vocab_size=11, context_length=8, dim=4, layers=3, heads=2))))
    3
    """
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential) and _are_alike(part)]
    inner = [one for one in lists if not any(other is not one and other in set(one.modules()) for other in lists)]
    return list(dict.fromkeys(block for part in inner for block in part))


def _are_alike(blocks: Iterable[nn.Module]) -> bool:
    members = list(blocks)
    return len({type(block) for block in members}) == 1 and all(
        any(True for _ in block.children()) and any(True for _ in block.parameters()) for block in members
    )


def _checkpoint_forward(forward: Callable) -> Callable:
    def run(*args: Any, **named: Any) -> Any:
        # Fake tensors have no random numbers, so the state of the generator need not be saved.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **named)

    return run


def _measure_forward(storages: StorageLog, found: list[int]) -> Callable[[Callable], Callable]:
    """Collects how much a block leaves beside what it returns."""

    def wrap(forward: Callable) -> Callable:
        def run(*args: Any, **named: Any) -> Any:
            before = storages.live_bytes
            output = forward(*args, **named)
            returned = {each.untyped_storage()._cdata: each for each in tree_leaves(output) if isinstance(each, Tensor)}
            returned_bytes = sum(each.untyped_storage().nbytes() for each in returned.values())
            found.append(storages.live_bytes - before - returned_bytes)
            return output

        return run

    return wrap


# The loss


def _compute_loss(output: Any, results: list[Tensor], loss: Loss) -> Tensor:
    if callable(loss):
        return loss(output)
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
