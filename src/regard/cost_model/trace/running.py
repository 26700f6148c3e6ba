"""One run of a subject at given sizes: forward, forth and back, or one token more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

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
from regard.cost_model.setting import Setting
from regard.cost_model.trace.operations import is_known
from regard.cost_model.trace.recording import Places, Recorder, Trace, Undropped, outputs, record
from regard.cost_model.trace.walking import mark_pairs
from regard.errors import CostError

# What asks for numbers where there are none.
NUMBERLESS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
# Numbers in the inputs of a module that is still run for real.
SMALL = 2_000_000


class Runner:
    """Runs a subject at sizes, and says what it did."""

    def __init__(self, subject: TracedTarget, inputs: ExampleInputs, setting: Setting) -> None:
        self.subject, self.inputs, self.setting = subject, inputs, setting
        self.fake = True
        self.notes: dict[str, None] = {}

    def __call__(self, sizes: dict[str, int]) -> Trace:
        if self.setting.step in ("backward", "training"):
            trace = self._run(sizes, learns=True, returns=True, trains=True)
        elif self.setting.step == "forward" and self._can_learn():
            trace = self._forward(sizes)
        else:
            trace = self._run(sizes)
        trace.unknown = {each.name for each in trace.operations if not is_known(each.name) and _computes(each)}
        return trace

    def _forward(self, sizes: dict[str, int]) -> Trace:
        """Forward, with autograd looking on, so that what it keeps is seen; the operations are the same."""
        try:
            trace = self._run(sizes, learns=True)
            module = self.subject.module
            if module is not None and any(isinstance(each, _NormBase) and each.training for each in module.modules()):
                # A norm over the batch keeps what it learned from the batch only while it trains.
                trace.kept = self._run(sizes, learns=True, trains=True).kept
            return trace
        except CostError as error:
            trace = self._run(sizes)
            self.notes[f"nobody knows what it keeps for a way back: {error.found or error.headline}"] = None
            return trace

    def _can_learn(self) -> bool:
        module = self.subject.module
        given = any(shape.requires_grad for shape in self.inputs.specs())
        return given or (module is not None and any(each.requires_grad for each in module.parameters()))

    def _run(self, sizes: dict[str, int], **how: bool) -> Trace:
        """`learns`, `returns`, `trains`: with autograd looking on, with the way back, in the module's own mode."""
        if self.fake:
            try:
                return self._followed(sizes, fake=True, **how)
            except Numberless as error:
                if not self._is_small(sizes):
                    raise error.said from error
                self.fake = False
                note = f"it was run for real, on zeros, because {error.operation} in {error.place} asks for numbers"
                self.notes[note] = None
        return self._followed(sizes, fake=False, **how)

    def _is_small(self, sizes: dict[str, int]) -> bool:
        made, given = 0, self.inputs.specs()
        for shape in given:
            count = 1
            for axis in shape.axes:
                count *= sizes[axis] if isinstance(axis, str) else axis
            made += count
        return self.subject.is_small and made * max(sizes.get("N", 1), 1) <= SMALL * 64 and made <= SMALL

    def _followed(
        self, sizes: dict[str, int], *, fake: bool, learns: bool = False, returns: bool = False, trains: bool = False
    ) -> Trace:
        called, module, owned = self.subject.make_copy(fake)
        if module is not None and not trains:
            module.eval()
        places = Places(module)
        recorder = Recorder(places)
        undropped = Undropped() if trains else contextlib.nullcontext()
        with self.subject.mode if fake else contextlib.nullcontext(), undropped, assume_unpacked():
            try:
                args, kwargs = self.inputs.make(sizes, self.setting.dtype)
                run = self._step(called, module, args, kwargs)
                given = [*owned, *_given(args, kwargs)]
                trace = record(run, given, learns=learns, returns=returns, fake=fake, recorder=recorder)
            except CostError:
                raise
            except Exception as error:
                raise self._said(error, sizes, recorder) from error
        mark_pairs(trace.operations, {tensor.untyped_storage()._cdata for tensor in owned})
        return trace

    def _step(self, called: Callable[..., Any], module: nn.Module | None, args: Any, kwargs: Any) -> Callable[[], Any]:
        if self.setting.step == "decode":
            with torch.no_grad():
                return prepare_decode_step(self.subject, called, module, args, kwargs)
        return lambda: called(*args, **kwargs)

    def _said(self, error: Exception, sizes: dict[str, int], recorder: Recorder) -> Exception:
        """The error in the caller's words: which operation, in which module, of which inputs."""
        name, places = self.subject.name, recorder.places
        place = places.stack[-1] or name
        operation = _operation_of(error) or recorder.last
        shapes = [tuple(sizes[axis] if isinstance(axis, str) else axis for axis in s.axes) for s in self.inputs.specs()]
        numberless = isinstance(error, NUMBERLESS) or "FakeTensor" in str(error) or "subclass" in str(error)
        said = CostError(
            f"{name} cannot be followed.",
            asked=f"{self.setting.step} with inputs {', '.join(map(str, shapes)) or 'none'}",
            found=f"{type(error).__name__}: {first_line(error)}",
            because=f"{operation} in {place} asks for numbers, and it is too large to be run for real"
            if numberless
            else f"it fails in {place}, {f'after {recorder.last}' if recorder.last else 'before its first operation'}",
            instead="a smaller module or fewer tokens, which are run for real"
            if numberless
            else "inputs=... that it can read, or sizes that it is made for",
        )
        return Numberless(said, operation, place) if numberless and self.fake else said


class Numberless(Exception):
    """Something looked into a tensor that has no numbers."""

    def __init__(self, said: CostError, operation: str, place: str) -> None:
        super().__init__(str(said))
        self.said, self.operation, self.place = said, operation, place


def _operation_of(error: Exception) -> str | None:
    """The operation that a fake tensor's error is about."""
    func = getattr(error, "func", None) or (error.args[0] if error.args else None)
    return None if func is None or not hasattr(func, "_overloadpacket") else str(func._overloadpacket)


def _given(args: Any, kwargs: Any) -> list[Tensor]:
    return outputs([args, kwargs])


def _computes(operation: Any) -> bool:
    return any(operand.floating for operand in operation.writes)
