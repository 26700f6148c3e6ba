"""Record every operation of a run, what autograd saves, and each attention as one operation.

Backward operations belong to the module whose forward operation they are the gradient of: autograd numbers its nodes as
they are created, and modules are entered and left at known numbers. In the same way all that an attention runs, forward
and backward, is found and replaced by one operation that carries its description.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import logging
import weakref
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

from regard.attention import Attention
from regard.backends.base import Request, observe_attention
from regard.biases import Quadratic
from regard.cost_model.attention.pairs import find_grid_sides
from regard.cost_model.trace.operation import Operand, Operation, bind_arguments, describe_tensor, named_tensors
from regard.cost_model.trace.operator_arguments import read_constants
from regard.cost_model.trace.storages import StorageLog
from regard.layers import SpatialAttention
from regard.models.spatial import LearnedPosition, SpatialHeads
from regard.patterns import Pattern

ACCUMULATE = 2**63 - 1  # autograd's number for nodes that only accumulate the gradient of a parameter
TABLES = ("words", "masks", "query_code", "key_code", "start", "stop")  # made once for a pattern and its lengths
CALL = "@"  # separates a module's path from the number of an attention that it called


@dataclass
class Trace:
    """What a run did.

    Attributes:
        operations: in the order in which they ran; views are left out.
        saved: what autograd saves for the backward pass: the module, the operation that made it, and the tensor.
        parameters: the path of the module, the name, and the shape; shared ones once.
        unknown: operators of other libraries whose products are not known.
        storages: the bytes that were allocated and released, in order.
    """

    operations: list[Operation] = field(default_factory=list)
    saved: list[tuple[str, str, Operand]] = field(default_factory=list)
    parameters: list[tuple[str, str, tuple[Any, ...]]] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)
    storages: StorageLog = field(default_factory=StorageLog)


@dataclass
class _Call:
    """An attention that ran: where, of what, and before which operation."""

    path: str
    attention: Attention
    reads: dict[str, Operand]
    writes: tuple[Operand, ...]
    position: int


class Recorder(TorchDispatchMode):
    """Records every operation that torch dispatches. It holds no tensor, so that each dies when it would have."""

    def __init__(self, modules: ModuleTracker) -> None:
        super().__init__()
        self.trace = Trace()
        self.storages = self.trace.storages
        self.modules = modules
        modules.on_leave = self._record_module
        self.last = ""
        self.makers: dict[int, tuple[str, Operand]] = {}
        self.calls: list[_Call] = []
        self.tables: set[int] = set()
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # the most frequent call, answered without a dispatch
        if self._is_paused or func.namespace in ("prim", "prims", "profiler"):
            return func(*args, **kwargs)
        name = str(func._overloadpacket)
        if _is_composite(func):
            with self:  # its parts are recorded
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self.last = name
        result = func(*args, **kwargs)
        self._record(name, func, bind_arguments(func, args, kwargs), result)
        return result

    def _record(self, name: str, func: Any, arguments: dict[str, Any], result: Any) -> None:
        results = _collect_tensors(result)
        if not results:
            return
        reads: dict[str, Operand] = {}
        seen: set[tuple[Any, ...]] = set()
        for key, tensor in named_tensors(arguments).items():
            operand = self.describe(tensor)
            again = (operand.storage, operand.shape) in seen and bool(operand.storage)
            seen.add((operand.storage, operand.shape))
            reads[key] = operand._replace(again=again)
            if key in TABLES and func.namespace == "regard":
                self.tables.add(operand.storage)
        writes = tuple(describe_tensor(each, self.storages.find_written_id(each)) for each in results)
        mutates = func._schema.is_mutable
        before = {operand.storage for operand in reads.values()}
        if reads and not mutates and all(operand.storage in before for operand in writes):
            return  # a view
        if func.is_view and not any(_is_fake(each) for each in named_tensors(arguments).values()):
            # A view of a table that existed before. The view is fake and the table real, so their storages differ.
            self.tables.update(operand.storage for operand in writes)
            return
        for operand in writes:
            if operand.storage not in before:
                self.makers[operand.storage] = name, operand
        path, backward = self.modules.current()
        constants = () if CALL in path else read_constants(name, arguments, reads)
        self.trace.operations.append(Operation(name, path, backward, reads, writes, constants, mutates))

    def describe(self, tensor: Tensor) -> Operand:
        return describe_tensor(tensor, self.storages.find_id(tensor))

    def _record_module(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """What the operations of a module do not tell is recorded beside them.

        torch takes an RMS norm apart into operations. Heads whose weights are a product over rows and columns run a
        softmax for each axis, and attend to all pairs of pixels; unless they called `attend`, as with dropout.
        """
        path = self.modules.stack[-1]
        if isinstance(module, nn.RMSNorm):
            name, operand = "regard.normalise", self.describe(inputs[0])
        elif (pairs := _find_separable_pairs(module, inputs, output)) and not any(c.path == path for c in self.calls):
            name, operand = "regard.separable_attention", Operand(pairs, 0)
        else:
            return
        self.trace.operations.append(Operation(name, path, False, {"input": operand}, ()))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """What runs inside is recorded."""
        with without_fast_path(), self.modules.tracking(), self:
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is not recorded."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    # Attention

    def observe(self, request: Request, run: Callable[[], Any]) -> Any:
        """Run an attention; what it does becomes one operation."""
        if self.modules.call is not None or torch._C._current_graph_task_id() != -1:
            return run()
        reads: dict[str, Operand] = {}
        for name, tensor in (("query", request.query), ("key", request.key), ("value", request.value)):
            reads[name] = self.describe(tensor)
        path, position = self.modules.stack[-1], len(self.trace.operations)
        with self.modules.inside_call(f"{path}{CALL}{len(self.calls)}"):
            result = run()
        output = result[0] if isinstance(result, tuple) else result
        writes = (self.describe(output),)
        self.calls.append(_Call(path, _describe_request(request), reads, writes, position))
        return result

    def collapse_attention(self) -> None:
        """Replace the operations of each attention by one, forward and backward."""
        if not self.calls:
            return
        groups: dict[tuple[int, bool], list[Operation]] = {}
        positions = {(number, False): call.position for number, call in enumerate(self.calls)}
        kept: dict[int, Operation] = {}
        for position, operation in enumerate(self.trace.operations):
            number = operation.path.partition(CALL)[2]
            if not number:
                kept[position] = operation
                continue
            key = int(number), operation.backward
            groups.setdefault(key, []).append(operation)
            positions.setdefault(key, position)
        ordered: list[tuple[float, int, Operation]] = [(place, 1, each) for place, each in kept.items()]
        for (number, backward), place in positions.items():
            call, inside = self.calls[number], groups.get((number, backward), [])
            written = {storage for each in inside for storage in each.storages_written()}
            read = {storage for each in inside for storage in each.storages_read()} - (set() if backward else written)
            name = "regard.attend_backward" if backward else "regard.attend"
            merged = Operation(name, call.path, backward, call.reads, call.writes, _constants_of(call.attention),
                               attention=call.attention, grid=_find_grid(call.attention),
                               storages=(tuple(read), tuple(written)))  # fmt: skip
            ordered.append((place, 0, merged))
        self.trace.operations = [operation for *_, operation in sorted(ordered, key=lambda each: each[:2])]


def _find_separable_pairs(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> tuple[int, ...]:
    """Batch, heads, and the sides of the grids of queries and keys, if weights are a product over rows and columns.

    A pair is counted where its weight is not zero, as for the same heads in a bare description; that the weights are
    computed along each axis shows in multiply-adds and exponentials. The null key of `SpatialAttention` is no pixel,
    and its exact limit picks pixels without weights.
    """
    if isinstance(module, SpatialHeads) and isinstance(module.position, Quadratic | LearnedPosition):
        batch, rows, columns, _ = inputs[0].shape
        return batch, module.heads, rows, columns, rows, columns
    if isinstance(module, SpatialAttention) and not module.exact:
        image, axes = inputs[0], module.axes
        batch = image.shape[0] if image.ndim == axes + 2 else 1
        return batch, module.heads, *output.shape[-axes:], *image.shape[-axes:]
    return ()


def _describe_request(request: Request) -> Attention:
    scale = request.scale if request.uniform or request.hard or request.scale == 0 else None
    pattern = None if request.pattern.is_full else request.pattern
    return Attention(pattern=pattern, scale=scale, bias=request.bias, feature_map=request.feature_map)


def _find_grid(attention: Attention) -> tuple[int, ...]:
    """Rows and columns of the pattern's grid, or of the bias's."""
    sides = () if attention.pattern is None else find_grid_sides(attention.pattern)
    return sides or tuple(getattr(attention.bias, "grid", None) or ())


def _constants_of(attention: Attention) -> tuple[Any, ...]:
    """What the cost of an attention depends on beside sizes: numbers of the pattern too, except its grid."""
    bias = attention.bias
    learned = bias.requires_grad if isinstance(bias, Tensor) else bias is not None and any(
        each.requires_grad for each in bias.parameters()
    )  # fmt: skip
    pattern = _describe_pattern(attention.pattern)
    return pattern, attention.scale, type(bias).__name__, learned, repr(attention.feature_map)


def _describe_pattern(part: Any) -> Any:
    """A pattern without its grid and its tensors."""
    if isinstance(part, Pattern) and dataclasses.is_dataclass(part):
        fields = ((each.name, getattr(part, each.name)) for each in dataclasses.fields(part))
        return type(part).__name__, *((name, _describe_pattern(value)) for name, value in fields if name != "grid")
    if isinstance(part, tuple):
        return tuple(map(_describe_pattern, part))
    return part if isinstance(part, int | float | str | None) else type(part).__name__


def _is_composite(func: Any, known: dict[Any, bool] = {}) -> bool:  # noqa: B006 - a cache
    if func not in known:
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        known[func] = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    return known[func]


def _collect_tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [tensor for each in result for tensor in _collect_tensors(each)]
    return []


class ModuleTracker:
    """Which module is running: by hooks that torch calls for every module, in backward by autograd's numbers."""

    def __init__(self, root: nn.Module | None) -> None:
        self.names = {} if root is None else {id(module): name for name, module in root.named_modules()}
        self.stack: list[str] = [""]
        self.call: str | None = None
        self.on_leave: Callable[[nn.Module, tuple[Any, ...], Any], None] | None = None
        self._numbers: list[int] = [0]
        self._paths: list[str] = [""]
        self._latest = ""
        self._forward_end = ACCUMULATE

    def end_forward(self) -> None:
        """What autograd creates from now on belongs to the node that is running: it computes something again."""
        self._forward_end = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]

    def current(self) -> tuple[str, bool]:
        """The path of what runs now, and whether it runs in the backward pass."""
        if torch._C._current_graph_task_id() == -1:
            return self.call or self.stack[-1], False
        node = torch._C._current_autograd_node()
        number = ACCUMULATE if node is None else node._sequence_nr()
        if 0 <= number < self._forward_end:
            self._latest = self._paths[bisect.bisect_right(self._numbers, number) - 1]
        return self._latest, True

    def _mark(self) -> None:
        if self._forward_end < ACCUMULATE:
            return
        self._numbers.append(torch.autograd._get_sequence_nr())  # pyright: ignore[reportPrivateImportUsage]
        self._paths.append(self.call or self.stack[-1])

    @contextlib.contextmanager
    def inside_call(self, path: str) -> Iterator[None]:
        self.call = path
        self._mark()
        try:
            yield
        finally:
            self.call = None
            self._mark()

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        outer = self.stack[-1]
        unnamed = f"{outer}.{type(module).__name__}" if outer else type(module).__name__
        self.stack.append(self.names.get(id(module), unnamed))
        self._mark()

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if self.on_leave is not None:
            self.on_leave(module, inputs, output)
        if len(self.stack) > 1:
            self.stack.pop()
        self._mark()

    @contextlib.contextmanager
    def tracking(self) -> Iterator[None]:
        hooks = [register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)]
        self._mark()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class DisableDropout(TorchFunctionMode):
    """Dropout of torch returns its input: it has no products, and where it prevents a fused attention it would change
    the count. That of `attend` runs: it changes no product, and backward needs its seed.

    The modules stay in training mode, so that what else depends on it, such as a batch norm, is unchanged.
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
def without_fast_path() -> Iterator[None]:
    """Without torch's fused operator for whole layers, which hides the products; the random state is restored.

    Sizes that a module cannot read are tried on purpose, so torch's log of each failure is off.
    """
    before, state = torch.backends.mha.get_fastpath_enabled(), torch.get_rng_state()
    torch.backends.mha.set_fastpath_enabled(False)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled
        torch.backends.mha.set_fastpath_enabled(before)
        torch.set_rng_state(state)


class _Saved:
    """What the graph holds in place of a saved tensor; it dies with the node that saved it.

    A tensor that backward reads is detached first: a node that holds its own output would never die.
    """

    def __init__(self, tensor: Tensor, operand: Operand, path: str, order: int, is_read: bool) -> None:
        self.operand, self.path, self.order, self.is_fake = operand, path, order, _is_fake(tensor)
        self.storage = tensor.untyped_storage()
        self.tensor = tensor.detach() if is_read else None


def _is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


def record(
    run: Callable[[], Any], recorder: Recorder, given: list[Tensor], *, with_grad: bool, with_backward: bool, fake: bool
) -> Trace:
    """Run something and record what it does, each attention as one operation.

    given: parameters, buffers and inputs, which exist before the run and are not saved by it.
    with_grad: whether autograd is on, so that what it saves is seen.
    with_backward: whether gradients are computed for every floating-point output. The gradient of the output is given,
        as a loss would give it, and costs nothing.
    fake: whether its tensors are fake; real ones are then tables that existed before.
    """
    modules, trace = recorder.modules, recorder.trace
    known = {recorder.storages.find_id(tensor) for tensor in given}
    saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
    orders = itertools.count()

    def save(tensor: Tensor) -> _Saved:
        held = _Saved(tensor, recorder.describe(tensor), modules.current()[0], next(orders), with_backward)
        saved.add(held)
        return held

    hooks = saved_tensors_hooks(save, lambda held: held.tensor) if with_grad else contextlib.nullcontext()
    with observe_attention(recorder.observe), torch.set_grad_enabled(with_grad), recorder.recording(), hooks:
        output = run()
        tensors: dict[int, str] = {}
        for held in sorted(saved, key=lambda each: each.order):
            if held.operand.storage not in known and held.is_fake == fake:
                tensors.setdefault(held.operand.storage, held.path)
        if with_backward:
            ends = [tensor for tensor in find_tensors(output) if tensor.is_floating_point() and tensor.requires_grad]
            with torch.no_grad(), recorder.paused():
                grads = [torch.empty_like(tensor) for tensor in ends]
            modules.end_forward()
            if ends:
                torch.autograd.backward(ends, grads)
    recorder.collapse_attention()
    for storage, path in tensors.items():
        if storage in recorder.makers and storage not in recorder.tables:  # others existed before
            outer, _, call = path.partition(CALL)
            name, made = recorder.makers[storage]
            trace.saved.append((outer, "regard.attend" if call else name, made))
    return trace


def find_tensors(output: Any) -> list[Tensor]:
    """The tensors of an output: of lists, dictionaries and dataclasses, in order; caches are none of these."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for each in output.values() for tensor in find_tensors(each)]
    if isinstance(output, list | tuple):
        return [tensor for each in output for tensor in find_tensors(each)]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [tensor for f in dataclasses.fields(output) for tensor in find_tensors(getattr(output, f.name))]
    return []
