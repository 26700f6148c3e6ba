"""Caches of strangers: how to hand one over, how to get it back, and how to reorder and crop it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from regard.laws.law import Dice
from regard.laws.subjects.base import first_tensor
from regard.laws.subjects.calling import parameters

if TYPE_CHECKING:
    from regard.laws.subjects.layer import Sequences

# Names in use for the same thing, the clearest first.
CACHES = ("cache", "kv_cache", "past_key_values", "past_key_value", "past_kv", "past_kvs", "layer_past", "past")
CACHES += ("kv_caches", "caches", "state", "states", "memory", "cache_params", "recurrent_state", "prev_state")
ASKS = ("use_cache", "return_cache", "return_state", "return_past", "return_kv", "return_kv_cache", "output_cache")
OFFSETS = ("start_pos", "offset", "position", "start", "pos", "pos_offset", "position_offset", "past_length")
OFFSETS += ("input_pos", "cache_position")
MAKES = ("new_cache", "make_cache", "init_cache", "create_cache", "empty_cache", "get_cache", "new_kv_cache")
MAKES += ("make_kv_cache", "init_kv_cache", "new_state", "make_state", "init_state", "initial_state", "new_memory")
MAKES += ("init_memory", "allocate_cache", "start_cache")
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
class StrangerCache:
    """One way of calling a stranger piece by piece.

    Attributes:
        style: `"returned"` begins with nothing and gets the cache back; `"made"` begins with what the target makes;
            `"dict"` and `"list"` are filled in place; `"inside"` is kept by the module, a copy of it for each state.
        argument: the argument that takes the cache, if any.
        method: the method to call, where it is not the target itself.
        offset: the argument that takes the number of tokens so far; `counted` says in which form.
        place: where the output holds the new cache: a number or a name; None if it is the one handed over.
    """

    subject: Sequences
    style: str
    argument: str | None = None
    method: str | None = None
    offset: str | None = None
    counted: str = "number"
    place: int | str | None = None
    # What was found out by trying, which does not depend on precision: how shapes grow, and what methods mean.
    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def bound_to(self, subject: Sequences) -> StrangerCache:
        return replace(self, subject=subject)

    # What laws call

    def start(self, batch: int, tokens: int) -> State:
        if self.style == "made":
            return State(_made(self.subject.target, batch, tokens, self.subject.dtype), batch)
        if self.style == "inside":
            return State(_emptied(self.subject._copied(), batch, tokens, self.subject.dtype), batch)
        return State({"dict": {}, "list": []}.get(self.style), batch)

    def step(self, state: State, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, State]:
        output = self._called(state, x, mask)
        held = state.held if self.place is None else _at(output, self.place)
        return first_tensor(output), State(held, x.shape[0], state.tokens + x.shape[1])

    def reorder(self, state: State, index: Tensor) -> State | None:
        """The state with its rows taken by `index`, by whoever offers it: the module, the cache, or a bare tree."""
        held, batch = state.held, len(index)
        if self.style != "inside" and callable(
            method := _first(self.subject.target, ("reorder_cache", "_reorder_cache"))
        ):
            given = method(held, index)
            return State(held if given is None else given, batch, state.tokens)
        if _first(held, REORDERS) is not None and not isinstance(held, Tensor):
            return State(_asked(held, REORDERS, index), batch, state.tokens)
        parts = held if isinstance(held, list | tuple) else ()
        if parts and all(_first(part, REORDERS) is not None and not isinstance(part, Tensor) for part in parts):
            return State(type(held)([_asked(part, REORDERS, index) for part in parts]), batch, state.tokens)
        axes = self._axes(held, state.tokens) if self.style != "inside" else None
        if axes is None:
            return None
        leaves, shape = tree_flatten(held)
        rows = [
            leaf if axis[0] is None else leaf.index_select(axis[0], index)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        return State(tree_unflatten(rows, shape), batch, state.tokens)

    def crop(self, state: State, tokens: int) -> State | None:
        """The state as it was after `tokens` tokens, by whoever offers it."""
        held = state.held
        if self.style != "inside" and callable(method := _first(self.subject.target, OF_MODULES)):
            given = method(held, tokens)
            return State(held if given is None else given, state.batch, tokens)
        parts = held if isinstance(held, list | tuple) and held else (held,)
        names = [next((name for name in CROPS if callable(getattr(part, name, None))), None) for part in parts]
        if not isinstance(held, Tensor) and all(name is not None for name in names):
            amount = tokens if self._keeps(names[0] or "") else state.tokens - tokens
            given = [_asked(part, CROPS, amount) for part in parts]
            return State(type(held)(given) if parts is held else given[0], state.batch, tokens)
        axes = self._axes(held, state.tokens) if self.style != "inside" else None
        if axes is None or not any(axis[1] is not None for axis in axes):
            return None
        leaves, shape = tree_flatten(held)
        cut: list[Any] = []
        for leaf, (_, axis) in zip(leaves, axes, strict=True):
            if isinstance(leaf, Tensor) and axis is None and leaf.ndim:
                return None  # a state in which the tokens are summed up cannot forget
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

    def _called(self, state: State, x: Tensor, mask: Tensor | None) -> Any:
        subject = copy.copy(self.subject)
        if self.style == "inside":
            subject.target = state.held
        call = subject.target if self.method is None else getattr(subject.target, self.method)
        takes = parameters(call)
        more: dict[str, Any] = {name: True for name in ASKS if name in takes}
        if self.argument is not None:
            more[self.argument] = state.held
        if self.offset is not None:
            number = state.tokens
            more[self.offset] = number if self.counted == "number" else torch.arange(number, number + x.shape[1])
        if self.method is not None:
            subject.target = call
        return subject.call(x, mask, **more)

    def _keeps(self, name: str) -> bool:
        """Whether a method called `name` is told how many tokens stay, and not how many go; trying decides."""
        if name in ("crop", "crop_to", "crop_cache", "truncate_to", "rewind_to", "rollback_to"):
            return True
        if name not in self.known:
            self.known[name] = self._tried(name)
        return self.known[name]

    def _tried(self, name: str) -> bool:
        subject = self.subject
        usual = name.startswith("truncate")
        with torch.no_grad():
            try:
                x = subject.draw(1, subject.lengths(6)[0], Dice(0, "crop"))
                kept, total = 2, x.shape[1] - 1
                expected = subject.run(torch.cat([x[:, :kept], x[:, -1:]], 1))[:, -1:]
                for keeps in (usual, not usual):
                    _, state = self.step(self.start(1, x.shape[1]), x[:, :total])
                    _asked(state.held, CROPS, kept if keeps else total - kept)
                    found, _ = self.step(State(state.held, 1, kept), x[:, -1:])
                    if _close(expected, found):
                        return keeps
            except Exception:  # a stranger may refuse in any way; then the name decides
                pass
        return usual

    def _axes(self, held: Any, tokens: int) -> list[tuple[int | None, int | None]] | None:
        """For each leaf of a bare tree, the axis of rows and the axis of tokens; None if it is no bare tree."""
        leaves, shape = tree_flatten(held)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            return None
        if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves):
            return None
        if tokens not in self.known:
            self.known[tokens] = self._trees(tokens)
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
            rows = _differing(two, three)
            axes.append((rows, _differing(fewer, two) if grown else None))
        return axes

    @torch.no_grad()
    def _trees(self, tokens: int) -> list[tuple[list[Any], Any]]:
        """Caches of two rows, of three rows, and of two rows with a token less, in pieces."""
        trees = []
        for batch, count in ((2, tokens), (3, tokens), (2, tokens - 1)):
            state = self.start(batch, tokens)
            if count > 0:
                _, state = self.step(state, self.subject.draw(batch, count, Dice(0, "axes")))
            trees.append(tree_flatten(state.held))
        return trees


def find_cache(subject: Sequences) -> StrangerCache | None:
    """How this subject takes a cache, found out by trying; None if it takes none.

    A maker of caches is used where there is one. Else the first way counts that agrees with a run in one piece, and if
    none does, the first that runs: it may be a cache that is broken.
    """
    try:
        x = subject.draw(1, subject.lengths(5)[0], Dice(0, "cache"))
        with torch.no_grad():
            whole = subject.run(x)
    except Exception:  # whoever does not run has no cache either
        return None
    if whole.shape[:2] != x.shape[:2] or x.shape[1] < 3:
        return None
    first: StrangerCache | None = None
    for caching in _candidates(subject):
        if first is not None and first.style == "made" and caching.style != "made":
            break
        try:
            with torch.no_grad():
                rows = _in_pieces(caching, x)
                if rows.shape != whole.shape or not _remembers(caching, x):
                    continue
        except Exception:  # not this way, then
            continue
        if _close(whole, rows):
            return caching
        first = first or caching
    return first


def _candidates(subject: Sequences) -> Iterator[StrangerCache]:
    """Every way of calling that the signature allows, the most explicit first."""
    target = subject.target
    methods = [name for name in STEPS if callable(getattr(target, name, None))] if isinstance(target, nn.Module) else []
    for method in [None, *methods]:
        call = target if method is None else getattr(target, method)
        names = parameters(call)
        argument = next((name for name in CACHES if name in names), None)
        offsets = [name for name in OFFSETS if name in names and _whole(names[name])]
        forms: list[tuple[str | None, str]] = [(name, form) for name in offsets[:1] for form in ("number", "range")]
        if argument is not None:
            made = callable(_first(target, MAKES))
            for style in (["made"] if made else []) + ["returned", "dict", "list"]:
                for offset, counted in [*forms, (None, "number")]:
                    plain = StrangerCache(subject, style, argument, method, offset, counted)
                    for place in _places(plain, subject):
                        yield replace(plain, place=place)
        elif method is None and isinstance(target, nn.Module) and _holds(target):
            for offset, counted in [*forms, (None, "number")]:
                yield StrangerCache(subject, "inside", None, None, offset, counted)


def _places(caching: StrangerCache, subject: Sequences) -> list[int | str | None]:
    """Where the cache may be found after a step."""
    x = subject.draw(1, subject.lengths(2)[0], Dice(0, "places"))[:, :2]
    state = caching.start(1, 8)
    try:
        with torch.no_grad():
            output = caching._called(state, x, None)
    except Exception:  # the caller tries on
        return []
    filled: list[int | str | None] = [] if caching.style == "returned" else [None]
    if isinstance(output, Tensor):
        return filled
    if isinstance(output, dict) or not isinstance(output, tuple | list):
        named: list[int | str | None] = [name for name in CACHES if _named(output, name) is not None]
        return [*named, *filled]
    given: list[int | str | None] = [n for n in range(1, len(output)) if output[n] is not None]
    same: list[int | str | None] = [n for n in given if isinstance(n, int) and output[n] is state.held]
    return [*same, *given, *filled]


def _in_pieces(caching: StrangerCache, x: Tensor) -> Tensor:
    state, rows = caching.start(1, x.shape[1]), []
    for piece in x.split([x.shape[1] - 2, 1, 1], 1):
        row, state = caching.step(state, piece)
        rows.append(row)
    return torch.cat(rows, 1)


def _remembers(caching: StrangerCache, x: Tensor) -> bool:
    """Whether there is a cache at all. One that is handed over or set up says so; one inside has to show it."""
    if caching.style == "returned":
        _, state = caching.step(caching.start(1, x.shape[1]), x[:, :2])
        return state.held is not None
    if caching.style in ("dict", "list"):
        state = caching.start(1, x.shape[1])
        _, after = caching.step(state, x[:, :2])
        return len(after.held) > 0 if caching.place is None else after.held is not None
    target = caching.subject.target
    asked = any(name in parameters(target) for name in ASKS) and callable(_first(target, RESETS))
    if caching.style == "made" or asked or callable(_first(target, SETUPS)):
        return True
    last = []
    for begin in (x, caching.subject.draw(1, x.shape[1], Dice(1, "cache"))):
        state = caching.start(1, x.shape[1])
        _, state = caching.step(state, begin[:, :-1])
        last.append(caching.step(state, x[:, -1:])[0])
    return not torch.equal(*last)


def _holds(target: nn.Module) -> bool:
    names = parameters(target)
    said = any(name in names for name in (*ASKS, *OFFSETS)) or bool(_flags(target))
    return said or callable(_first(target, SETUPS))


def _flags(target: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(part, name) for part in target.modules() for name in FLAGS if isinstance(vars(part).get(name), bool)]


def _emptied(module: nn.Module, batch: int, tokens: int, dtype: torch.dtype) -> nn.Module:
    """A module of which the cache inside is on and empty."""
    for part, name in _flags(module):
        setattr(part, name, True)
    for names in (SETUPS, RESETS):
        if callable(method := _first(module, names)):
            _with_sizes(method, batch, tokens, dtype)
    return module


def _made(target: Any, batch: int, tokens: int, dtype: torch.dtype) -> Any:
    return _with_sizes(_first(target, MAKES), batch, tokens, dtype)


def _with_sizes(method: Callable, batch: int, tokens: int, dtype: torch.dtype) -> Any:
    """Call a maker of caches with the sizes that its parameters ask for."""
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


def _whole(parameter: inspect.Parameter) -> bool:
    """A parameter that counts from zero: of that default, or of none."""
    default = parameter.default
    return default is inspect.Parameter.empty or default is None or (default == 0 and not isinstance(default, bool))


def _asked(held: Any, names: tuple[str, ...], value: Any) -> Any:
    given = _first(held, names)(value)
    return held if given is None or isinstance(given, PLAIN) else given


def _first(holder: Any, names: Any) -> Any:
    """The first method of one of these names."""
    return next((method for name in names if callable(method := getattr(holder, name, None))), None)


def _named(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, dict) else getattr(output, name, None)


def _at(output: Any, place: int | str) -> Any:
    return output[place] if isinstance(place, int) else _named(output, place)


def _differing(one: Any, other: Any) -> int | None:
    """The axis along which two shapes differ, if it is one."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.ndim != other.ndim:
        return None
    axes = [axis for axis in range(one.ndim) if one.shape[axis] != other.shape[axis]]
    return axes[0] if len(axes) == 1 else None


def _close(expected: Tensor, found: Tensor) -> bool:
    scale = float(expected.abs().nan_to_num().max()) + 1e-30
    return bool(((expected - found).abs() <= 1e-3 * scale).all())
