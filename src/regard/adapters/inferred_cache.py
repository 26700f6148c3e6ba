"""The cache of an unknown module, inferred by trying: how to pass it, get it back, reorder and crop it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from regard.adapters.base import first_tensor
from regard.adapters.call_signature import parameters
from regard.adapters.rng import Rng

if TYPE_CHECKING:
    from regard.adapters.layer import SequenceAdapter

# Names in use for the same argument, the clearest first.
CACHES = ("cache", "kv_cache", "past_key_values", "past_key_value", "past_kv", "past_kvs", "layer_past", "past")
CACHES += ("kv_caches", "caches", "state", "states", "memory", "cache_params", "recurrent_state", "prev_state")
RETURN_FLAGS = (
    "use_cache",
    "return_cache",
    "return_state",
    "return_past",
    "return_kv",
    "return_kv_cache",
    "output_cache",
)
OFFSETS = ("start_pos", "offset", "position", "start", "pos", "pos_offset", "position_offset", "past_length")
OFFSETS += ("input_pos", "cache_position")
MAKERS = ("new_cache", "make_cache", "init_cache", "create_cache", "empty_cache", "get_cache", "new_kv_cache")
MAKERS += ("make_kv_cache", "init_kv_cache", "new_state", "make_state", "init_state", "initial_state", "new_memory")
MAKERS += ("init_memory", "allocate_cache", "start_cache")
SETUPS = ("setup_caches", "setup_cache", "enable_cache", "enable_kv_cache", "enable_caching", "start_cache")
RESETS = ("reset_cache", "reset_caches", "clear_cache", "clear_caches", "reset_kv_cache", "clear_kv_cache")
RESETS += ("reset_state", "reset")
STEPS = ("step", "decode", "decode_step", "forward_step", "forward_cached", "extend")
REORDERS = ("reorder", "reorder_cache", "batch_select_indices", "index_select", "select", "select_rows", "permute")
CROPS = ("crop", "crop_cache", "crop_to", "truncate", "truncate_cache", "truncate_to", "rewind", "rewind_to", "trim")
CROPS += ("trim_cache", "rollback", "rollback_to", "drop")
OF_MODULES = ("crop_cache", "truncate_cache")
FLAGS = ("use_cache", "caching", "use_kv_cache", "cache_enabled", "kv_cache_enabled", "decoding", "streaming")
PLAIN = (int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device)


@dataclass
class State:
    """What was kept after `tokens` tokens of `batch` rows: a cache, or the module that holds it inside."""

    held: Any
    batch: int
    tokens: int = 0


@dataclass(frozen=True)
class InferredCache:
    """One protocol for calling a module chunk by chunk.

    Attributes:
        style: `"returned"` begins with nothing and gets the cache back; `"made"` begins with what the target makes;
            `"dict"` and `"list"` are filled in place; `"inside"` is kept by the module, a copy of it for each state.
        argument: the argument that takes the cache, if any.
        method: the method to call, where it is not the target itself.
        offset: the argument that takes the number of tokens so far; `counted` is its form.
        place: where the output holds the new cache: a number or a name; None if it is the one handed over.
    """

    adapter: SequenceAdapter
    style: str
    argument: str | None = None
    method: str | None = None
    offset: str | None = None
    counted: str = "number"
    place: int | str | None = None
    # What was found out by trying, which does not depend on precision: how shapes grow, and what methods mean.
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def bound_to(self, adapter: SequenceAdapter) -> InferredCache:
        return replace(self, adapter=adapter)

    # What laws call

    def start(self, batch: int, tokens: int) -> State:
        if self.style == "made":
            return State(_make_cache(self.adapter.target, batch, tokens, self.adapter.dtype), batch)
        if self.style == "inside":
            return State(_reset_inside(self.adapter._copy_target(), batch, tokens, self.adapter.dtype), batch)
        return State({"dict": {}, "list": []}.get(self.style), batch)

    def step(self, state: State, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, State]:
        output = self._call_target(state, x, mask)
        held = state.held if self.place is None else _get_output(output, self.place)
        return first_tensor(output), State(held, x.shape[0], state.tokens + x.shape[1])

    def reorder(self, state: State, index: Tensor) -> State | None:
        """The state with its rows taken by `index`, by a method of the module or of the cache, or in a bare tree."""
        held, batch = state.held, len(index)
        if self.style != "inside" and callable(
            method := _find_method(self.adapter.target, ("reorder_cache", "_reorder_cache"))
        ):
            given = method(held, index)
            return State(held if given is None else given, batch, state.tokens)
        if _find_method(held, REORDERS) is not None and not isinstance(held, Tensor):
            return State(_call_method(held, REORDERS, index), batch, state.tokens)
        parts = held if isinstance(held, list | tuple) else ()
        if parts and all(_find_method(part, REORDERS) is not None and not isinstance(part, Tensor) for part in parts):
            return State(type(held)([_call_method(part, REORDERS, index) for part in parts]), batch, state.tokens)
        axes = self._find_axes(held, state.tokens) if self.style != "inside" else None
        if axes is None:
            return None
        leaves, shape = tree_flatten(held)
        rows = [
            leaf if axis[0] is None else leaf.index_select(axis[0], index)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        return State(tree_unflatten(rows, shape), batch, state.tokens)

    def crop(self, state: State, tokens: int) -> State | None:
        """The state as it was after `tokens` tokens, by a method of the module or of the cache, or in a bare tree."""
        held = state.held
        if self.style != "inside" and callable(method := _find_method(self.adapter.target, OF_MODULES)):
            given = method(held, tokens)
            return State(held if given is None else given, state.batch, tokens)
        parts = held if isinstance(held, list | tuple) and held else (held,)
        names = [next((name for name in CROPS if callable(getattr(part, name, None))), None) for part in parts]
        if not isinstance(held, Tensor) and all(name is not None for name in names):
            amount = tokens if self._keeps_history(names[0] or "") else state.tokens - tokens
            given = [_call_method(part, CROPS, amount) for part in parts]
            return State(type(held)(given) if parts is held else given[0], state.batch, tokens)
        axes = self._find_axes(held, state.tokens) if self.style != "inside" else None
        if axes is None or not any(axis[1] is not None for axis in axes):
            return None
        leaves, shape = tree_flatten(held)
        cut: list[Any] = []
        for leaf, (_, axis) in zip(leaves, axes, strict=True):
            if isinstance(leaf, Tensor) and axis is None and leaf.ndim:
                return None  # a state that sums over tokens cannot be cropped
            if isinstance(leaf, Tensor) and axis is not None and leaf.shape[axis] != state.tokens:
                return None  # nor can one that has already dropped some of them
            if isinstance(leaf, Tensor):
                counter = axis is None and leaf.numel() == 1 and int(leaf) == state.tokens
                cut.append(
                    leaf.narrow(axis, 0, tokens)
                    if axis is not None
                    else torch.full_like(leaf, tokens)
                    if counter
                    else leaf
                )
            else:
                counter = isinstance(leaf, int) and not isinstance(leaf, bool) and leaf == state.tokens
                cut.append(tokens if counter else leaf)
        return State(tree_unflatten(cut, shape), state.batch, tokens)

    # How it is done

    def _call_target(self, state: State, x: Tensor, mask: Tensor | None) -> Any:
        adapter = copy.copy(self.adapter)
        if self.style == "inside":
            adapter.target = state.held
        call = adapter.target if self.method is None else getattr(adapter.target, self.method)
        takes = parameters(call)
        more: dict[str, Any] = {name: True for name in RETURN_FLAGS if name in takes}
        if self.argument is not None:
            more[self.argument] = state.held
        if self.offset is not None:
            number = state.tokens
            more[self.offset] = number if self.counted == "number" else torch.arange(number, number + x.shape[1])
        if self.method is not None:
            adapter.target = call
        return adapter.call(x, mask, **more)

    def _keeps_history(self, name: str) -> bool:
        """Whether a method called `name` takes the number of tokens to keep, not to remove; decided by trying."""
        if name in ("crop", "crop_to", "crop_cache", "truncate_to", "rewind_to", "rollback_to"):
            return True
        if name not in self.known:
            self.known[name] = self._find_crop_meaning(name)
        return self.known[name]

    def _find_crop_meaning(self, name: str) -> bool:
        adapter = self.adapter
        usual = name.startswith("truncate")
        with torch.no_grad():
            try:
                x = adapter.draw(1, adapter.lengths(6)[0], Rng(0, "crop"))
                kept, total = 2, x.shape[1] - 1
                expected = adapter.run(torch.cat([x[:, :kept], x[:, -1:]], 1))[:, -1:]
                for keeps in (usual, not usual):
                    _, state = self.step(self.start(1, x.shape[1]), x[:, :total])
                    _call_method(state.held, CROPS, kept if keeps else total - kept)
                    found, _ = self.step(State(state.held, 1, kept), x[:, -1:])
                    if _is_close(expected, found):
                        return keeps
            except Exception:  # any error is a refusal; then the name decides
                pass
        return usual

    def _find_axes(self, held: Any, tokens: int) -> list[tuple[int | None, int | None]] | None:
        """For each leaf of a bare tree, the axis of rows and the axis of tokens; None if it is no bare tree."""
        leaves, shape = tree_flatten(held)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            return None
        if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
            return None
        if tokens not in self.known:
            self.known[tokens] = self._list_states(tokens)
        trees = self.known[tokens]
        if trees[0][1] != shape or trees[1][1] != shape:
            return None
        grown = trees[2][1] == shape
        axes = []
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                axes.append((None, None))
                continue
            two, three, fewer = (tree[0][number] if number < len(tree[0]) else None for tree in trees)
            rows = _find_differing_axis(two, three)
            axes.append((rows, _find_differing_axis(fewer, two) if grown else None))
        return axes

    @torch.no_grad()
    def _list_states(self, tokens: int) -> list[tuple[list[Any], Any]]:
        """Caches of two rows, of three rows, and of two rows with a token less, in pieces."""
        trees = []
        for batch, count in ((2, tokens), (3, tokens), (2, tokens - 1)):
            state = self.start(batch, tokens)
            if count > 0:
                _, state = self.step(state, self.adapter.draw(batch, count, Rng(0, "axes")))
            trees.append(tree_flatten(state.held))
        return trees


def find_cache(adapter: SequenceAdapter) -> InferredCache | None:
    """How this target takes a cache, found out by trying; None if it takes none.

    A constructor of caches is used where there is one. Else the first protocol is used that agrees with a run in one
    call, and if none does, the first that runs: its cache may be broken.
    """
    try:
        x = adapter.draw(1, adapter.lengths(5)[0], Rng(0, "cache"))
        with torch.no_grad():
            whole = adapter.run(x)
    except Exception:  # what does not run has no cache either
        return None
    if whole.shape[:2] != x.shape[:2] or x.shape[1] < 3:
        return None
    first: InferredCache | None = None
    for caching in _list_candidates(adapter):
        if first is not None and first.style == "made" and caching.style != "made":
            break
        try:
            with torch.no_grad():
                rows = _run_in_pieces(caching, x)
                if rows.shape != whole.shape or not _has_cache(caching, x):
                    continue
        except Exception:  # this protocol is not supported
            continue
        if _is_close(whole, rows):
            return caching
        first = first or caching
    return first


def _list_candidates(adapter: SequenceAdapter) -> Iterator[InferredCache]:
    """Every protocol that the signature allows, the most explicit first."""
    target = adapter.target
    methods = [name for name in STEPS if callable(getattr(target, name, None))] if isinstance(target, nn.Module) else []
    for method in [None, *methods]:
        call = target if method is None else getattr(target, method)
        names = parameters(call)
        argument = next((name for name in CACHES if name in names), None)
        offsets = [name for name in OFFSETS if name in names and _is_integer_parameter(names[name])]
        forms: list[tuple[str | None, str]] = [(name, form) for name in offsets[:1] for form in ("number", "range")]
        if argument is not None:
            made = callable(_find_method(target, MAKERS))
            for style in (["made"] if made else []) + ["returned", "dict", "list"]:
                for offset, counted in [*forms, (None, "number")]:
                    plain = InferredCache(adapter, style, argument, method, offset, counted)
                    for place in _find_cache_in_output(plain, adapter):
                        yield replace(plain, place=place)
        elif method is None and isinstance(target, nn.Module) and _may_hold_cache(target):
            for offset, counted in [*forms, (None, "number")]:
                yield InferredCache(adapter, "inside", None, None, offset, counted)


def _find_cache_in_output(caching: InferredCache, adapter: SequenceAdapter) -> list[int | str | None]:
    """Where the cache may be found after a step."""
    x = adapter.draw(1, adapter.lengths(2)[0], Rng(0, "places"))[:, :2]
    state = caching.start(1, 8)
    try:
        with torch.no_grad():
            output = caching._call_target(state, x, None)
    except Exception:  # the caller tries on
        return []
    filled: list[int | str | None] = [] if caching.style == "returned" else [None]
    if isinstance(output, Tensor):
        return filled
    if isinstance(output, dict) or not isinstance(output, tuple | list):
        named: list[int | str | None] = [name for name in CACHES if _get_named(output, name) is not None]
        return [*named, *filled]
    given: list[int | str | None] = [n for n in range(1, len(output)) if output[n] is not None]
    same: list[int | str | None] = [n for n in given if isinstance(n, int) and output[n] is state.held]
    return [*same, *given, *filled]


def _run_in_pieces(caching: InferredCache, x: Tensor) -> Tensor:
    state, rows = caching.start(1, x.shape[1]), []
    for piece in x.split([x.shape[1] - 2, 1, 1], 1):
        row, state = caching.step(state, piece)
        rows.append(row)
    return torch.cat(rows, 1)


def _has_cache(caching: InferredCache, x: Tensor) -> bool:
    """Whether there is a cache: evident if it is passed or set up, tested by running if it is internal."""
    if caching.style == "returned":
        _, state = caching.step(caching.start(1, x.shape[1]), x[:, :2])
        return state.held is not None
    if caching.style in ("dict", "list"):
        state = caching.start(1, x.shape[1])
        _, after = caching.step(state, x[:, :2])
        return len(after.held) > 0 if caching.place is None else after.held is not None
    target = caching.adapter.target
    resettable = any(name in parameters(target) for name in RETURN_FLAGS) and callable(_find_method(target, RESETS))
    if caching.style == "made" or resettable or callable(_find_method(target, SETUPS)):
        return True
    last = []
    for begin in (x, caching.adapter.draw(1, x.shape[1], Rng(1, "cache"))):
        state = caching.start(1, x.shape[1])
        _, state = caching.step(state, begin[:, :-1])
        last.append(caching.step(state, x[:, -1:])[0])
    return not torch.equal(*last)


def _may_hold_cache(target: nn.Module) -> bool:
    names = parameters(target)
    named = any(name in names for name in (*RETURN_FLAGS, *OFFSETS)) or bool(_find_cache_flags(target))
    return named or callable(_find_method(target, SETUPS))


def _find_cache_flags(target: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(part, name) for part in target.modules() for name in FLAGS if isinstance(vars(part).get(name), bool)]


def _reset_inside(module: nn.Module, batch: int, tokens: int, dtype: torch.dtype) -> nn.Module:
    """A module of which the cache inside is on and empty."""
    for part, name in _find_cache_flags(module):
        setattr(part, name, True)
    for names in (SETUPS, RESETS):
        if callable(method := _find_method(module, names)):
            _call_with_sizes(method, batch, tokens, dtype)
    return module


def _make_cache(target: Any, batch: int, tokens: int, dtype: torch.dtype) -> Any:
    return _call_with_sizes(_find_method(target, MAKERS), batch, tokens, dtype)


def _call_with_sizes(method: Callable, batch: int, tokens: int, dtype: torch.dtype) -> Any:
    """Call a constructor of caches with the sizes that its parameters name."""
    given: dict[str, Any] = {}
    for name, parameter in parameters(method).items():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        needed = parameter.default is inspect.Parameter.empty
        if "batch" in name or name in ("bs", "bsz", "b", "rows", "n"):
            given[name] = batch
        elif (
            "len" in name
            or "tokens" in name
            or name in ("capacity", "room", "size", "t", "max_seq", "context", "slots")
        ):
            given[name] = tokens
        elif name == "dtype":
            given[name] = dtype
        elif name == "device":
            given[name] = "cpu"
        elif needed:
            given[name] = batch if not given else tokens
    return method(**given)


def _is_integer_parameter(parameter: inspect.Parameter) -> bool:
    """A parameter that counts from zero: of that default, or of none."""
    default = parameter.default
    return default is inspect.Parameter.empty or default is None or (default == 0 and not isinstance(default, bool))


def _call_method(held: Any, names: tuple[str, ...], value: Any) -> Any:
    given = _find_method(held, names)(value)
    return held if given is None or isinstance(given, PLAIN) else given


def _find_method(holder: Any, names: Any) -> Any:
    """The first method of one of these names."""
    return next((method for name in names if callable(method := getattr(holder, name, None))), None)


def _get_named(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, dict) else getattr(output, name, None)


def _get_output(output: Any, place: int | str) -> Any:
    return output[place] if isinstance(place, int) else _get_named(output, place)


def _find_differing_axis(one: Any, other: Any) -> int | None:
    """The axis along which two shapes differ, if it is one."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.ndim != other.ndim:
        return None
    axes = [axis for axis in range(one.ndim) if one.shape[axis] != other.shape[axis]]
    return axes[0] if len(axes) == 1 else None


def _is_close(expected: Tensor, found: Tensor) -> bool:
    scale = float(expected.abs().nan_to_num().max()) + 1e-30
    return bool(((expected - found).abs() <= 1e-3 * scale).all())
