"""One traced run of a target at given sizes: forward, forward and backward, or a decode step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.nn.modules.batchnorm import _NormBase

from regard.adapters.decode_step import prepare_decode_step
from regard.adapters.example_inputs import ExampleInputs
from regard.adapters.fake_copies import TracedTarget, first_line
from regard.adapters.huggingface import assume_unpacked
from regard.adapters.regard_models import assume_whole_batches
from regard.cost_model.run_mode import RunMode
from regard.cost_model.trace.critical_path import mark_attention
from regard.cost_model.trace.operation import Operation
from regard.cost_model.trace.operator_costs import is_known
from regard.cost_model.trace.part_names import list_parameters
from regard.cost_model.trace.recorder import DisableDropout, ModuleTracker, Recorder, Trace, find_tensors, record
from regard.errors import CostError, RegardError

T = TypeVar("T")

# Raised where control flow depends on the values of fake tensors.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
# Elements in the inputs of a module that is still executed with real tensors.
SMALL = 2_000_000


class PreparedRun(NamedTuple):
    """A copy of a target that is ready to run.

    Attributes:
        call: runs it on its inputs.
        owned, given: parameters and buffers; these and the inputs.
    """

    call: Callable[[], Any]
    module: nn.Module | None
    owned: list[Tensor]
    given: list[Tensor]
    recorder: Recorder


class Runner:
    """Traces a target at given sizes."""

    def __init__(self, target: TracedTarget, inputs: ExampleInputs, mode: RunMode) -> None:
        self.target, self.inputs, self.mode = target, inputs, mode
        self.fake = True
        self.notes: dict[str, None] = {}

    def run(self, sizes: dict[str, int]) -> Trace:
        if self.mode.step in ("backward", "training"):
            trace = self._run(sizes, with_grad=True, with_backward=True, training=True)
        elif self.mode.step == "forward" and self._can_learn():
            trace = self._run_forward(sizes)
        else:
            trace = self._run(sizes)
        trace.parameters = [*list_parameters(self.target.module)]
        trace.unknown = {each.name for each in trace.operations if not is_known(each.name) and _computes(each)}
        return trace

    def _run_forward(self, sizes: dict[str, int]) -> Trace:
        """Forward with autograd on, so that what it saves is seen; the operations are the same."""
        try:
            trace = self._run(sizes, with_grad=True)
            module = self.target.module
            if module is not None and any(isinstance(each, _NormBase) and each.training for each in module.modules()):
                # A batch norm saves the statistics of the batch only in training mode.
                trace.saved = self._run(sizes, with_grad=True, training=True).saved
            return trace
        except CostError as error:
            trace = self._run(sizes)
            self.notes[f"activation_bytes are unknown: {error.found or error.headline}"] = None
            return trace

    def _can_learn(self) -> bool:
        module = self.target.module
        given = any(spec.requires_grad for spec in self.inputs.specs())
        return given or (module is not None and any(each.requires_grad for each in module.parameters()))

    def _run(
        self, sizes: dict[str, int], *, with_grad: bool = False, with_backward: bool = False, training: bool = False
    ) -> Trace:
        """`with_grad`, `with_backward`: as in `record`; `training`: in the module's own mode, not in eval mode."""

        def run(prepared: PreparedRun) -> Trace:
            how = {"with_grad": with_grad, "with_backward": with_backward, "fake": self.fake}
            with DisableDropout() if training else contextlib.nullcontext(), assume_whole_batches():
                trace = record(prepared.call, prepared.recorder, prepared.given, **how)
            mark_attention(trace.operations, {prepared.recorder.storages.find_id(each) for each in prepared.owned})
            return trace

        return self.execute(sizes, run, training=training)

    def execute(self, sizes: dict[str, int], run: Callable[[PreparedRun], T], *, training: bool = False) -> T:
        """Run a copy of the target: with fake tensors; with real ones if it depends on values and is small enough."""
        if self.fake:
            try:
                with self._prepare(sizes, training) as prepared:
                    return run(prepared)
            except NeedsValuesError as error:
                if not self._is_small(sizes):
                    raise error.reported from error
                self.fake = False
                note = f"executed on zeros, because {error.operation} in {error.path} depends on values"
                self.notes[note] = None
        with self._prepare(sizes, training) as prepared:
            return run(prepared)

    def _is_small(self, sizes: dict[str, int]) -> bool:
        total = 0
        for spec in self.inputs.specs():
            count = 1
            for axis in spec.axes:
                count *= sizes[axis] if isinstance(axis, str) else axis
            total += count
        return self.target.is_small and total * max(sizes.get("N", 1), 1) <= SMALL * 64 and total <= SMALL

    @contextlib.contextmanager
    def _prepare(self, sizes: dict[str, int], training: bool) -> Iterator[PreparedRun]:
        """A copy of the target that is ready to run, in eval mode or, for training, in the mode that the module is in.

        What the run raises is reported in the caller's terms.
        """
        called, module, owned = self.target.make_copy(self.fake)
        if module is not None and not training:
            module.eval()
        recorder = Recorder(ModuleTracker(module))
        # The copy is on the CPU whatever device the caller has made the default.
        is_default = torch.get_default_device().type == "cpu"
        on_cpu = contextlib.nullcontext() if is_default else torch.device("cpu")
        with self.target.mode if self.fake else contextlib.nullcontext(), on_cpu, assume_unpacked():
            try:
                args, kwargs = self.inputs.make(sizes, self.mode.dtype)
                call = self._prepare_call(called, module, args, kwargs)
                given = [*owned, *find_tensors([args, kwargs])]
                yield PreparedRun(call, module, owned, given, recorder)
            except CostError:
                raise
            except Exception as error:
                raise self._report(error, sizes, recorder) from error

    def _prepare_call(
        self, called: Callable[..., Any], module: nn.Module | None, args: Any, kwargs: Any
    ) -> Callable[[], Any]:
        if self.mode.step == "decode":
            with torch.no_grad():
                return prepare_decode_step(self.target, called, module, args, kwargs)
        return lambda: called(*args, **kwargs)

    def _report(self, error: Exception, sizes: dict[str, int], recorder: Recorder) -> Exception:
        """The error in the caller's terms: which operator, in which module, of which inputs."""
        name, modules = self.target.name, recorder.modules
        path = modules.stack[-1] or name
        operation = _find_operator(error) or recorder.last
        shapes = [tuple(sizes[axis] if isinstance(axis, str) else axis for axis in s.axes) for s in self.inputs.specs()]
        needs_values = isinstance(error, NEEDS_VALUES) or "FakeTensor" in str(error) or "subclass" in str(error)
        if isinstance(error, RegardError):  # it says itself what to do
            return CostError(
                f"{name} cannot be traced.",
                asked=f"{self.mode.step} with inputs {', '.join(map(str, shapes)) or 'none'}",
                found=f"{type(error).__name__}: {first_line(error)}",
                because=error.because,
                instead=error.instead,
            )
        reported = CostError(
            f"{name} cannot be traced.",
            asked=f"{self.mode.step} with inputs {', '.join(map(str, shapes)) or 'none'}",
            found=f"{type(error).__name__}: {first_line(error)}",
            because=f"{operation} in {path} depends on tensor values, and the module is too large to execute"
            if needs_values
            else f"it fails in {path}, {f'after {recorder.last}' if recorder.last else 'before its first operation'}",
            instead="a smaller module or fewer tokens, which are executed"
            if needs_values
            else "inputs=... that it accepts, or sizes that it is made for",
        )
        return NeedsValuesError(reported, operation, path) if needs_values and self.fake else reported


class NeedsValuesError(Exception):
    """Control flow depends on the values of a fake tensor."""

    def __init__(self, reported: CostError, operation: str, path: str) -> None:
        super().__init__(str(reported))
        self.reported, self.operation, self.path = reported, operation, path


def _find_operator(error: Exception) -> str | None:
    """The operator that a fake tensor's error is about."""
    func = getattr(error, "func", None) or (error.args[0] if error.args else None)
    return None if func is None or not hasattr(func, "_overloadpacket") else str(func._overloadpacket)


def _computes(operation: Operation) -> bool:
    return any(operand.floating for operand in operation.writes)
