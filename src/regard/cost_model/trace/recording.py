"""Running a target without numbers, and writing down every operation.

The target runs as a copy, whose parameters are tensors with shapes and no memory: nothing of the original is touched,
not its gradients, buffers, flags or caches. Backward operations belong to the module whose forward operation they are
the gradient of: autograd numbers its nodes as they are made, and modules are entered and left at known numbers.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from regard.cost_model.trace.operation import Operand, Operation, arguments_of, noted, tensors_of
from regard.cost_model.trace.words import words_of

LAST = 2**63 - 1  # autograd's number for what only adds up the gradient of a parameter


@dataclass
class Trace:
    """What a run did.

    Attributes:
        operations: in the order in which they ran; views are left out.
        kept: what autograd keeps for the way back: the module, the operation that made it, and the tensor.
        unknown: operations of others of which nobody knows what they multiply.
    """

    operations: list[Operation] = field(default_factory=list)
    kept: list[tuple[str, str, Operand]] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)


class Recorder(TorchDispatchMode):
    """Writes down every operation that torch dispatches, and keeps the storages alive, so that none is two tensors."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.trace = Trace()
        self.places = places
        self.last = ""
        self.made: dict[int, tuple[str, Operand]] = {}
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked at every turn, and quickly answered
        if func.namespace in ("prim", "prims", "profiler"):
            return func(*args, **kwargs)
        name = str(func._overloadpacket)
        if _is_composed(func):
            # What is made of other operations is taken apart, so that these are seen.
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        self.last = name
        result = func(*args, **kwargs)
        self._note(name, func, arguments_of(func, args, kwargs), result)
        return result

    def _note(self, name: str, func: Any, arguments: dict[str, Any], result: Any) -> None:
        results = _tensors(result)
        if not results:
            return
        reads: dict[str, Operand] = {}
        seen: set[tuple[Any, ...]] = set()
        for key, tensor in tensors_of(arguments).items():
            operand = noted(tensor)
            again = (operand.storage, operand.shape) in seen and bool(operand.storage)
            seen.add((operand.storage, operand.shape))
            reads[key] = operand._replace(again=again)
            self._alive.append(tensor.untyped_storage() if operand.storage else tensor)
        writes = tuple(map(noted, results))
        changes = func._schema.is_mutable
        before = {operand.storage for operand in reads.values()}
        if reads and not changes and all(operand.storage in before for operand in writes):
            return  # a view
        for tensor, operand in zip(results, writes, strict=True):
            self._alive.append(tensor.untyped_storage() if operand.storage else tensor)
            if operand.storage not in before:
                self.made[operand.storage] = name, operand
        words, numbers = words_of(name, arguments, reads)
        path, backward = self.places.here()
        self.trace.operations.append(Operation(name, path, backward, reads, writes, words, numbers, changes))


def _is_composed(func: Any, known: dict[Any, bool] = {}) -> bool:  # noqa: B006 - a memory, on purpose
    if func not in known:
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        known[func] = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    return known[func]


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [tensor for each in result for tensor in _tensors(each)]
    return []


class Places:
    """Which module is running: by hooks that torch calls for every module, on the way back by autograd's numbers."""

    def __init__(self, root: nn.Module | None) -> None:
        self.names = {} if root is None else {id(module): name for name, module in root.named_modules()}
        self.stack: list[str] = [""]
        self.numbers: list[int] = [0]
        self.paths: list[str] = [""]
        self.before = ""

    def here(self) -> tuple[str, bool]:
        """The path of what runs now, and whether it runs on the way back."""
        if torch._C._current_graph_task_id() == -1:
            return self.stack[-1], False
        node = torch._C._current_autograd_node()
        number = LAST if node is None else node._sequence_nr()
        if 0 <= number < LAST:
            self.before = self.paths[bisect.bisect_right(self.numbers, number) - 1]
        return self.before, True

    def _mark(self) -> None:
        self.numbers.append(torch.autograd._get_sequence_nr())  # pyright: ignore[reportPrivateImportUsage]
        self.paths.append(self.stack[-1])

    def _enter(self, module: nn.Module, *_: Any) -> None:
        outer = self.stack[-1]
        unnamed = f"{outer}.{type(module).__name__}" if outer else type(module).__name__
        self.stack.append(self.names.get(id(module), unnamed))
        self._mark()

    def _leave(self, *_: Any) -> None:
        if len(self.stack) > 1:
            self.stack.pop()
        self._mark()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        self._mark()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class Undropped(TorchFunctionMode):
    """Dropout that drops nothing: it costs no products, and where it hides a fused attention it would change the count.

    The modules stay in training mode, so that what else depends on it, such as a batch norm, is as it is.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if len(args) <= 4 else {}
        elif func is functional.multi_head_attention_forward:
            args = (*args[:10], 0.0, *args[11:]) if len(args) > 10 else args
            kwargs |= {"dropout_p": 0.0} if len(args) <= 10 else {}
        return func(*args, **kwargs)


DROPOUTS = {functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
            functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout}  # fmt: skip


@contextlib.contextmanager
def open_layers() -> Iterator[None]:
    """Without torch's fast path for whole layers, which hides the products; random numbers are as before afterwards.

    Sizes that a module cannot read are tried on purpose, and torch need not log each of them.
    """
    before, state = torch.backends.mha.get_fastpath_enabled(), torch.get_rng_state()
    torch.backends.mha.set_fastpath_enabled(False)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    heard, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = heard
        torch.backends.mha.set_fastpath_enabled(before)
        torch.set_rng_state(state)


def record(
    run: Callable[[], Any],
    given: list[Tensor],
    *,
    learns: bool,
    returns: bool,
    fake: bool,
    recorder: Recorder,
) -> Trace:
    """Run something and write down what it does.

    given: storages that are there before: parameters, buffers and inputs; autograd keeps them for nothing.
    learns: whether autograd looks on and what it keeps is noted.
    returns: whether gradients go back through every number with a point that comes out. The gradient of what comes out
        is given, as a loss would give it, and costs nothing.
    fake: whether its tensors have no numbers; what has numbers then is a table that was there before.
    """
    places = recorder.places
    known = {tensor.untyped_storage()._cdata for tensor in given}
    kept: dict[int, tuple[str, Operand]] = {}

    def keep(tensor: Tensor) -> Tensor:
        operand = noted(tensor)
        if operand.storage not in known and isinstance(tensor, FakeTensor) == fake:
            recorder._alive.append(tensor.untyped_storage())
            kept.setdefault(operand.storage, (places.here()[0], operand))
        return tensor

    hooks = saved_tensors_hooks(keep, lambda tensor: tensor) if learns else contextlib.nullcontext()
    with open_layers(), places.watched(), torch.set_grad_enabled(learns), hooks, recorder:
        output = run()
        if returns:
            ends = [tensor for tensor in outputs(output) if tensor.is_floating_point() and tensor.requires_grad]
            with torch.no_grad(), _silent(recorder):
                above = [torch.empty_like(tensor) for tensor in ends]
            if ends:
                torch.autograd.backward(ends, above)
    trace = recorder.trace
    for storage, (path, operand) in kept.items():
        trace.kept.append((path, *recorder.made.get(storage, ("aten.kept", operand))))
    return trace


@contextlib.contextmanager
def _silent(recorder: Recorder) -> Iterator[None]:
    """What happens here is not written down."""
    trace, recorder.trace = recorder.trace, Trace()
    try:
        yield
    finally:
        recorder.trace = trace


def outputs(output: Any) -> list[Tensor]:
    """The tensors of what came out: of lists, dictionaries and dataclasses, in order; caches are none of these."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for each in output.values() for tensor in outputs(each)]
    if isinstance(output, list | tuple):
        return [tensor for each in output for tensor in outputs(each)]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [tensor for f in dataclasses.fields(output) for tensor in outputs(getattr(output, f.name))]
    return []
