"""What an observation does with its target: the calls, their inputs, and the arithmetic from outputs to the comparison.

While a `Recording` is active, calls of the target are kept with copies of their inputs and the modes they ran in, and
every torch function that the law applies to an output is kept as a step. The steps are the counterexample as a program
in plain torch; `regard.laws.script` writes it down.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.adapters import rng
from regard.adapters.deepcopy import InitialMemo
from regard.laws.recorded_number import RecordedNumber


class Inexpressible(Exception):
    """Why an observation cannot be written as calls and torch functions."""


@dataclass(frozen=True)
class Ref:
    """A value that an earlier step defined: the name of a variable, and how to get the value from it."""

    variable: int
    access: str = ""


@dataclass
class Step:
    """One line of the program.

    Attributes:
        kind: "tensor", "call", "op", "copy" or "seed".
        result: the variable that it defines.
        function: of an op the function; of a call the method's name, or "" for the target itself.
        args, kwargs: arguments, with `Ref` for what earlier steps defined.
        owner: the instance that is called or copied.
        modes: of a call, what was switched on around it.
        raised: whether a call raised.
        changes: variables whose memory the step writes to.
    """

    kind: str
    result: int
    function: Any = ""
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    owner: Ref | None = None
    modes: dict[str, Any] = field(default_factory=dict)
    raised: bool = False
    changes: set[int] = field(default_factory=set)


class Recording(TorchFunctionMode):
    """Records while it is active; see the module's docstring. `steps` are the program so far."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.reason = ""  # why the program is incomplete
        self.paused = 0
        self._known: dict[int, tuple[Any, Ref]] = {}  # by id; the object is kept, so that its id stays its own
        self._storages: dict[int, set[int]] = {}  # the variables in each piece of memory
        self._settings: dict[int, dict[str, Any]] = {}
        self._patched: list[tuple[type, str, Any]] = []
        self._thread = threading.get_ident()
        self._count = 0

    # Names

    def register(self, value: Any, ref: Ref) -> None:
        """Give a value a name; a container's entries get theirs too."""
        if isinstance(value, Tensor):
            self._known[id(value)] = (value, ref)
            self._storages.setdefault(_storage_address(value), set()).add(ref.variable)
        elif isinstance(value, tuple | list):
            for place, item in enumerate(value):
                self.register(item, Ref(ref.variable, f"{ref.access}[{place}]"))
        elif isinstance(value, dict):
            for key, item in value.items():
                self.register(item, Ref(ref.variable, f"{ref.access}[{key!r}]"))
        if isinstance(value, tuple | Tensor | int | float | str | bytes | type(None)) or id(value) in self._known:
            return
        self._known[id(value)] = (value, ref)
        if not isinstance(value, list | dict | nn.Module) and hasattr(value, "__dict__"):
            for name, item in vars(value).items():
                if isinstance(item, Tensor):
                    self.register(item, Ref(ref.variable, f"{ref.access}.{name}"))
            self.watch_methods(type(value))

    def find(self, value: Any) -> Ref | None:
        known = self._known.get(id(value))
        return known[1] if known is not None else None

    def refer(self, value: Any) -> Any:
        """A value as an argument: a name where it has one; a tensor without one becomes a literal of its own."""
        if (ref := self.find(value)) is not None and not isinstance(value, bool | int):
            return ref
        if isinstance(value, Tensor):
            step = Step("tensor", self._next_variable(), args=(_copy_tensor(value),))
            self.steps.append(step)
            self.register(value, Ref(step.result))
            return Ref(step.result)
        if type(value) is tuple:
            return tuple(self.refer(item) for item in value)
        if type(value) is list:
            return [self.refer(item) for item in value]
        if type(value) is dict:
            return {key: self.refer(item) for key, item in value.items()}
        return value

    def _next_variable(self) -> int:
        self._count += 1
        return self._count

    def _is_tracked(self, value: Any) -> bool:
        if isinstance(value, RecordedNumber):
            return True
        if isinstance(value, tuple | list):
            return any(self._is_tracked(item) for item in value)
        if isinstance(value, dict):
            return any(self._is_tracked(item) for item in value.values())
        if isinstance(value, slice):
            return any(self._is_tracked(item) for item in (value.start, value.stop, value.step))
        return isinstance(value, Tensor) and id(value) in self._known

    def _find_aliases(self, value: Any) -> set[int]:
        return set(self._storages.get(_storage_address(value), ())) if isinstance(value, Tensor) else set()

    # Torch functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or threading.get_ident() != self._thread or not self._is_tracked((args, kwargs)):
            return func(*args, **kwargs)
        return self.apply(func, args, kwargs)

    def apply(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a torch function, and keep it if it makes a tensor or writes into one."""
        name = getattr(func, "__name__", "")
        writes = name in ("__setitem__", "__set__", "backward") or (name.endswith("_") and not name.endswith("__"))
        writes = writes or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
        # What is written into is referred to before it changes.
        given = (self.refer(args), self.refer(kwargs)) if writes else None
        with self.pause():
            result = func(*args, **kwargs)
        if name == "item" and isinstance(result, float):
            return RecordedNumber(result, f"float({{{self._variable_of(args[0])}}})")
        if not writes and not _has_tensor(result):
            return result
        refs, words = given or (self.refer(args), self.refer(kwargs))
        step = Step("op", self._next_variable(), func, refs, words)
        if writes:
            step.changes = self._find_aliases(args[0]) if name != "backward" else {-1}
        self.steps.append(step)
        if _has_tensor(result) and (not writes or result is not args[0]):
            self.register(result, Ref(step.result))
        return result

    def _variable_of(self, value: Any) -> int:
        """The variable of a tensor, as a step of its own where it is a part of another."""
        ref = self.refer(value)
        if ref.access:
            step = Step("op", self._next_variable(), "alias", (ref,))
            self.steps.append(step)
            return step.result
        return ref.variable

    # Calls of the target

    def call(self, owner: Any, method: str, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the target, or a method of it or of what it returned, and keep the call."""
        if self.paused:
            return function(*args, **kwargs)
        if threading.get_ident() != self._thread:
            self.reason = self.reason or "it calls from several threads at once"
            return function(*args, **kwargs)
        inside = self.find(owner)
        assert inside is not None
        step = Step(
            "call", self._next_variable(), method, self.refer(args), self.refer(kwargs), inside, _find_active_modes()
        )
        step.modes |= self._changed_settings(owner, inside)
        tensors = [each for each in _list_tensors((args, kwargs)) if id(each) in self._known]
        versions = [_read_version(each) for each in tensors]
        self.steps.append(step)
        try:
            with self.pause():
                result = function(*args, **kwargs)
        except Exception:
            step.raised = True
            raise
        for tensor, version in zip(tensors, versions, strict=True):
            if _read_version(tensor) != version:
                step.changes |= self._find_aliases(tensor)
        with self.pause():
            result = self._make_distinct(result)
        self.register(result, Ref(step.result))
        return result

    def _make_distinct(self, result: Any) -> Any:
        """A tensor that was given out before, or is an input, as a view: each output has a name of its own."""
        if isinstance(result, Tensor) and id(result) in self._known:
            return result.view_as(result)
        if type(result) is tuple:
            return tuple(self._make_distinct(item) for item in result)
        return result

    def _changed_settings(self, owner: Any, inside: Ref) -> dict[str, Any]:
        """Modes, dropouts, switches and the precision of a module, where they changed since its last call."""
        if not isinstance(owner, nn.Module):
            return {}
        now = read_settings(owner)
        before = self._settings.get(id(owner), {})
        self._settings[id(owner)] = now
        if {name for name, value in now.items() if name.endswith(".parameters")} and before:
            swapped = [name for name in now if name.endswith(".parameters") and before.get(name) != now[name]]
            if swapped:
                self.reason = self.reason or "it replaces the parameters of the module"
        changed = {
            name: value
            for name, value in now.items()
            if not name.endswith(".parameters") and name in before and before[name] != value
        }
        return {"settings": changed} if changed else {}

    def record_copy(self, old: Any, new: Any) -> None:
        """A copy of something that has a name has one too; in containers, entry by entry."""
        if (ref := self.find(old)) is not None and old is not new:
            step = Step("copy", self._next_variable(), owner=ref)
            self.steps.append(step)
            self.register(new, Ref(step.result))
            if isinstance(old, nn.Module):
                own = {name: value for name, value in read_settings(new).items() if name.endswith(".parameters")}
                self._settings[id(new)] = {**self._settings.get(id(old), read_settings(old)), **own}
        elif isinstance(old, tuple | list):
            for one, two in zip(old, new, strict=True):
                self.record_copy(one, two)
        elif isinstance(old, dict):
            for key in old:
                self.record_copy(old[key], new[key])
        elif hasattr(old, "__dataclass_fields__") and not isinstance(old, type):
            for name in old.__dataclass_fields__:
                self.record_copy(getattr(old, name), getattr(new, name))

    def keep_instance(self, instance: Any, variable: int) -> None:
        """An instance of the target that the program begins with."""
        self._known[id(instance)] = (instance, Ref(variable))
        self._count = max(self._count, variable)
        if isinstance(instance, nn.Module):
            self._settings[id(instance)] = read_settings(instance)

    # Patches, while it is active

    def watch_methods(self, owner: type) -> None:
        """Keep calls of the public methods that a class of the target's own defines."""
        for kind in owner.__mro__:
            if kind.__module__.partition(".")[0] in ("torch", "builtins", "collections", "typing", "regard"):
                continue
            if any(entry[0] is kind for entry in self._patched):
                continue
            for name, method in list(vars(kind).items()):
                if inspect.isfunction(method) and not name.startswith("__") and name != "forward":
                    self._patch(kind, name, self._make_recorder(name, method))

    def _make_recorder(self, name: str, method: Callable) -> Callable:
        def recorded(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if self.paused or self.find(owner) is None:
                return method(owner, *args, **kwargs)
            return self.call(owner, name, lambda *a, **k: method(owner, *a, **k), args, kwargs)

        recorded.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        return recorded

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        self._patched.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    @contextmanager
    def active(self) -> Iterator[Recording]:
        """Record calls of modules, copies, backward passes and seeds beside torch functions."""
        plain_call, plain_copy = nn.Module.__call__, copy.deepcopy
        plain_backward, plain_seed = torch.autograd.backward, torch.manual_seed

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.paused or self.find(module) is None:
                return plain_call(module, *args, **kwargs)
            return self.call(module, "", lambda *a, **k: plain_call(module, *a, **k), args, kwargs)

        def deepcopy(value: Any, memo: Any = None, *more: Any) -> Any:
            if self.paused or not (memo is None or isinstance(memo, InitialMemo)):
                return plain_copy(value, memo, *more)
            with self.pause():
                other = plain_copy(value, memo)
            self.record_copy(value, other)
            return other

        def backward(*args: Any, **kwargs: Any) -> Any:
            return plain_backward(*args, **kwargs) if self.paused else self.apply(plain_backward, args, kwargs)

        def seed(number: int) -> Any:
            if not self.paused and threading.get_ident() == self._thread:
                self.steps.append(Step("seed", self._next_variable(), args=(int(number),)))
            return plain_seed(number)

        self._patch(nn.Module, "__call__", call)
        self._patch(copy, "deepcopy", deepcopy)
        self._patch(torch.autograd, "backward", backward)
        self._patch(torch, "manual_seed", seed)
        self._patch(rng, "seed_generators", seed)
        try:
            with self:
                yield self
        finally:
            while self._patched:
                owner, name, value = self._patched.pop()
                setattr(owner, name, value)


class RecordedFunction:
    """A plain function as the target of a recording; a copy of it is another instance of the function."""

    def __init__(self, recording: Recording, function: Callable, fresh: Callable[[], Callable]) -> None:
        self.recording, self.function, self.fresh = recording, function, fresh
        self.__name__ = getattr(function, "__name__", "target")
        with suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.recording.paused:
            return self.function(*args, **kwargs)
        return self.recording.call(self, "", self.function, args, kwargs)

    def __deepcopy__(self, memo: Any) -> RecordedFunction:
        return RecordedFunction(self.recording, self.fresh(), self.fresh)


def read_settings(module: nn.Module) -> dict[str, Any]:
    """What may be switched on a module between calls: modes, plain attributes, and which parameters it has."""
    settings: dict[str, Any] = {}
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if type(value) in (bool, float) and not (key.startswith("_") and key != "_training"):
                settings[f"{name}.{key}" if name else key] = value
        settings[f"{name}.parameters"] = tuple(id(parameter) for parameter in part._parameters.values())
    settings["dtype"] = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
    return settings


def _find_active_modes() -> dict[str, Any]:
    """What is switched on around a call, where it is not as a program finds it."""
    modes: dict[str, Any] = {}
    if torch.is_inference_mode_enabled():
        modes["inference"] = True
    elif not torch.is_grad_enabled():
        modes["no_grad"] = True
    if not torch.backends.mha.get_fastpath_enabled():
        modes["no_fastpath"] = True
    if not torch.backends.cuda.flash_sdp_enabled():
        modes["math_kernel"] = True
    if torch.are_deterministic_algorithms_enabled():
        modes["fill_memory"] = True
    return modes


@torch.no_grad()
def _copy_tensor(tensor: Tensor) -> dict[str, Any]:
    """A tensor as it is now: its numbers, and how they lie in memory."""
    plain = tensor.detach()
    entry = {"requires_grad": tensor.requires_grad, "numbers": plain.clone(memory_format=torch.contiguous_format)}
    if not plain.is_contiguous():
        last = sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True))
        memory = plain.as_strided((last + 1,), (1,), plain.storage_offset()) if plain.numel() else plain.flatten()
        entry |= {"memory": memory.clone(), "shape": tuple(plain.shape), "stride": tuple(plain.stride())}
    return entry


def _list_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [each for item in value.values() for each in _list_tensors(item)]
    return [each for item in value for each in _list_tensors(item)] if isinstance(value, tuple | list) else []


def _has_tensor(value: Any) -> bool:
    return bool(_list_tensors(value))


def _storage_address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except Exception:  # nested or functional tensors have none of their own
        return id(tensor)


def _read_version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # tensors made in inference mode do not count
        return 0
