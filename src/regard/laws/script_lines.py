"""Steps of a recording as lines of Python that need torch alone."""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from regard.laws.recorded_number import RecordedNumber
from regard.laws.recording import Inexpressible, Ref, Step

# More numbers than this are packed, not written out.
WRITTEN_OUT = 600
WIDTH = 110
OPERATORS = {
    "__add__": "+", "add": "+", "__sub__": "-", "sub": "-", "__mul__": "*", "mul": "*", "__truediv__": "/",
    "__matmul__": "@", "matmul": "@", "__eq__": "==", "eq": "==", "__ne__": "!=", "__lt__": "<", "__gt__": ">",
    "__le__": "<=", "__ge__": ">=", "__and__": "&", "__or__": "|", "__floordiv__": "//", "__mod__": "%",
    "__xor__": "^", "__pow__": "**",
}  # fmt: skip
IN_PLACE = {
    "__iadd__": "+=",
    "__isub__": "-=",
    "__imul__": "*=",
    "__itruediv__": "/=",
    "__iand__": "&=",
    "__ior__": "|=",
}
SPACES = (
    ("torch", torch),
    ("torch.nn.functional", torch.nn.functional),
    ("torch.linalg", torch.linalg),
    ("torch.special", torch.special),
    ("torch.fft", torch.fft),
    ("torch.autograd", torch.autograd),
    ("torch._C._nn", torch._C._nn),  # type: ignore[attr-defined]
)
# Functions of this package that are one step, and that a script defines for itself.
HELPERS = ("gradient_of",)
MODES = {
    "no_grad": "torch.no_grad()",
    "inference": "torch.inference_mode()",
    "math_kernel": "sdpa_kernel(SDPBackend.MATH)",
    "no_fastpath": "fast_path_off()",
    "fill_memory": "filled_memory()",
}


class ScriptWriter:
    """Writes the steps that a comparison needs. Variables 0 and -2 are the target and a copy of it before any call."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps
        self.names = {0: "target", -2: "unused"}
        counts = {"tensor": 0, "call": 0, "op": 0, "copy": 0}
        for step in steps:
            if step.kind in counts:
                counts[step.kind] += 1
                self.names[step.result] = (
                    f"{ {'tensor': 'x', 'call': 'y', 'op': 't', 'copy': 'other'}[step.kind] }{counts[step.kind]}"
                )
        self.modes: set[str] = set()
        self.packed = False

    # Which steps

    def needed(self, values: Iterable[Any], calls: bool) -> list[Step]:
        """The steps that the values depend on; with `calls`, every call of the target besides."""
        wanted: set[int] = set()
        for value in values:
            wanted |= _find_variables(value)
        kept = []
        for step in reversed(self.steps):
            touches = step.result in wanted or bool(step.changes & wanted) or (calls and step.kind in ("call", "seed"))
            if step.changes == {-1} or (step.kind == "seed" and kept):
                touches = True
            if not touches:
                continue
            kept.append(step)
            wanted |= _find_variables((step.args, step.kwargs, step.owner))
        return kept[::-1]

    # Lines

    def lines(self, steps: list[Step]) -> list[str]:
        written: list[str] = []
        for step in steps:
            write = {
                "tensor": self._write_tensor,
                "call": self._write_call,
                "op": self._write_operation,
                "copy": self._write_copy,
                "seed": _write_seed,
            }
            written += write[step.kind](step)
        return written

    def _write_tensor(self, step: Step) -> list[str]:
        entry = step.args[0]
        name = self.names[step.result]
        numbers = entry.get("memory", entry["numbers"])
        shape = entry.get("shape")
        code = self.literal(numbers)
        if shape is not None:
            code = f"{code}.as_strided({shape}, {entry['stride']})"
        return [f"{name} = {code}{'.requires_grad_()' if entry['requires_grad'] else ''}"]

    def _write_call(self, step: Step) -> list[str]:
        assert step.owner is not None
        owner = self.value(step.owner)
        lines = [
            f"{owner}.to({value})" if name == "dtype" else f"set_attribute({owner}, {name!r}, {_write_value(value)})"
            for name, value in step.modes.get("settings", {}).items()
        ]
        call = f"{owner}.{step.function}" if step.function else owner
        line = f"{self.names[step.result]} = {call}({self.arguments(step)})"
        modes = [name for name in step.modes if name in MODES]
        self.modes |= set(modes)
        if step.raised:
            line = f"with suppress(Exception):\n    {line}"
        if modes:
            line = f"with {', '.join(MODES[name] for name in modes)}:\n    " + line.replace("\n", "\n    ")
        return [*lines, *line.split("\n")]

    def _write_copy(self, step: Step) -> list[str]:
        assert step.owner is not None
        return [f"{self.names[step.result]} = copy_of({self.value(step.owner)})"]

    def _write_operation(self, step: Step) -> list[str]:
        name = self.names[step.result]
        func, args = step.function, step.args
        if func == "alias":
            return [f"{name} = {self.value(args[0])}"]
        label = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)
        if label in ("__get__", "__set__"):
            attribute = getattr(owner, "__name__", "")
            if not attribute.isidentifier():
                raise Inexpressible("it reads an attribute that has no name")
            if label == "__get__":
                return [f"{name} = {self.value(args[0])}.{attribute}"]
            return [f"{self.value(args[0])}.{attribute} = {self.value(args[1])}"]
        if label == "__getitem__":
            return [f"{name} = {self.value(args[0])}[{self.index(args[1])}]"]
        if label == "__setitem__":
            return [f"{self.value(args[0])}[{self.index(args[1])}] = {self.value(args[2])}"]
        if label in IN_PLACE:
            return [f"{self.value(args[0])} {IN_PLACE[label]} {self.value(args[1])}"]
        if label in OPERATORS and len(args) == 2 and not step.kwargs:
            return [f"{name} = {self.value(args[0])} {OPERATORS[label]} {self.value(args[1])}"]
        if label == "__invert__":
            return [f"{name} = ~{self.value(args[0])}"]
        if label == "__neg__":
            return [f"{name} = -{self.value(args[0])}"]
        called = f"{self.function(func, args)}"
        method = getattr(torch.Tensor, label, None) is not None and _is_method(func) and args
        words = self.arguments(step, skip=1) if method else self.arguments(step)
        code = f"{self.value(args[0])}.{label}({words})" if method else f"{called}({words})"
        return [code if step.changes and label.endswith("backward") else f"{name} = {code}"]

    def function(self, func: Any, args: tuple) -> str:
        label = getattr(func, "__name__", "")
        if _is_method(func) and args:
            return label
        if label in HELPERS:
            return label
        for space, module in SPACES:
            if getattr(module, label, None) is func or (label == "backward" and space == "torch.autograd"):
                return f"{space}.{label}"
        raise Inexpressible(f"it uses {getattr(func, '__module__', '')}.{label}, which has no public name")

    def arguments(self, step: Step, skip: int = 0) -> str:
        words = [self.value(value) for value in step.args[skip:]]
        return ", ".join([*words, *(f"{name}={self.value(value)}" for name, value in step.kwargs.items())])

    def index(self, value: Any) -> str:
        if isinstance(value, tuple):
            return ", ".join(self.index(item) for item in value) + ("," if len(value) == 1 else "")
        if isinstance(value, slice):
            ends = ["" if end is None else self.value(end) for end in (value.start, value.stop)]
            return ":".join(ends if value.step is None else [*ends, self.value(value.step)])
        return "..." if value is Ellipsis else self.value(value)

    def value(self, value: Any) -> str:
        """A value as Python source."""
        if isinstance(value, Ref):
            return self.names[value.variable] + value.access
        if isinstance(value, RecordedNumber):
            return re.sub(r"\{(-?\d+)\}", lambda found: self.names[int(found[1])], value.expression)
        if isinstance(value, Tensor):
            return self.literal(value)
        if isinstance(value, slice):
            return f"slice({self.value(value.start)}, {self.value(value.stop)}, {self.value(value.step)})"
        if type(value) is list:
            return f"[{', '.join(map(self.value, value))}]"
        if isinstance(value, torch.Size) or type(value) is tuple:
            return f"({', '.join(map(self.value, value))}{',' if len(value) == 1 else ''})"
        if type(value) is dict:
            return f"{{{', '.join(f'{key!r}: {self.value(item)}' for key, item in value.items())}}}"
        return _write_value(value)

    def literal(self, tensor: Tensor) -> str:
        """A tensor written out, or packed where it is large; every bit is kept."""
        if tensor.numel() <= WRITTEN_OUT and not tensor.is_complex():
            numbers = "torch.empty" if tensor.numel() == 0 else _write_nested(tensor.tolist())
            if tensor.numel() == 0:
                return f"torch.empty({tuple(tensor.shape)}, dtype={tensor.dtype})"
            return f"torch.tensor({numbers}, dtype={tensor.dtype})"
        self.packed = True
        raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        packed = base64.b85encode(zlib.compress(raw)).decode()
        return f"unpack({packed!r}, {tensor.dtype}, {tuple(tensor.shape)})"


def _is_method(func: Any) -> bool:
    label = getattr(func, "__name__", "")
    own = getattr(torch.Tensor, label, None)
    return own is func or getattr(func, "__objclass__", None) is not None


def _write_seed(step: Step) -> list[str]:
    return [f"torch.manual_seed({step.args[0]})"]


def _write_value(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    if value is Ellipsis:
        return "..."
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return str(value)
    if isinstance(value, torch.device):
        return repr(str(value))
    if isinstance(value, range):
        return repr(value)
    raise Inexpressible(f"it passes a {type(value).__name__}, which cannot be written down")


def _write_nested(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_write_nested, value))}]"
    return ("nan" if value != value else "inf" if value > 0 else "-inf") if _is_not_finite(value) else repr(value)


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _find_variables(value: Any) -> set[int]:
    if isinstance(value, Ref):
        return {value.variable}
    if isinstance(value, RecordedNumber):
        return {int(found) for found in re.findall(r"\{(-?\d+)\}", value.expression)}
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, slice):
        value = [value.start, value.stop, value.step]
    return set().union(*map(_find_variables, value)) if isinstance(value, tuple | list) else set()
