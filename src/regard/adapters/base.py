"""The interface of every adapter: tokens in, one row out for each, whatever the target is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from regard.adapters import copies, precision, rng
from regard.adapters.deepcopy import deepcopy
from regard.adapters.rng import Rng
from regard.errors import InputError
from regard.patterns import Pattern, read_pattern

Variant = Callable[[Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Conventions:
    """What a target means by its arguments, where the field has more than one meaning.

    Attributes:
        mask: what True in a mask means: `"attend"` (a key that may be seen, a real token) or `"hide"`; `"additive"` is
            a mask of numbers, 0 to attend and -inf to hide.
        empty: what a query that sees nothing yields: `"zeros"`, `"mean"` (of all values), `"nan"`, or `"finite"` (any
            number, the same on every path).
        align: where unequal lengths meet: at the `"end"` (the last query sits on the last key) or at the `"start"`.
        pattern: the pairs that the target documents to interact, without any mask; None if it documents none.
        scale: the factor of the scores; None is `1 / sqrt(dim)`.
        layout: of an operator `"heads"` for (batch, head, token, dim) or `"tokens"` for (batch, token, head, dim); of a
            layer `"batch"` for (batch, token, channel) or `"tokens"` for (token, batch, channel).
        left: whether tokens may be padded on the left as well. None: yes, unless the target counts absolute positions
            from the left edge and attends in both directions, as encoders do.
        growth: the power of the length with which its operations grow; None if it documents none.
    """

    mask: Literal["attend", "hide", "additive"] = "attend"
    empty: Literal["zeros", "mean", "nan", "finite"] = "zeros"
    align: Literal["end", "start"] = "end"
    pattern: Pattern | None = None
    scale: float | None = None
    layout: str = ""
    left: bool | None = None
    growth: float | None = None

    def __post_init__(self) -> None:
        for name, words in MEANINGS.items():
            if (value := getattr(self, name)) not in words:
                raise _refuse_convention(name, value, " or ".join(f'{name}="{word}"' for word in words if word))
        for name in ("scale", "growth"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise _refuse_convention(name, value, f"a number, as in {name}=1")
        if self.left not in (None, True, False):
            raise _refuse_convention("left", self.left, "left=True or left=False")
        if isinstance(self.pattern, str):
            object.__setattr__(self, "pattern", read_pattern(self.pattern))
        if self.pattern is not None and not isinstance(self.pattern, Pattern):
            raise _refuse_convention("pattern", self.pattern, "pattern=Causal() & Window(7, 0)")


MEANINGS = {
    "mask": ("attend", "hide", "additive"),
    "empty": ("zeros", "mean", "nan", "finite"),
    "align": ("end", "start"),
    "layout": ("", "heads", "batch", "tokens"),
}


def _refuse_convention(name: str, value: object, instead: str) -> InputError:
    return InputError(
        f"{name}={value!r} is no convention.",
        asked=f"{name}={value!r}",
        because="the laws depend on what the argument means",
        instead=instead,
    )


class Cached(Protocol):
    """How a target runs piece by piece with a cache."""

    def start(self, batch: int, tokens: int) -> Any:
        """A fresh state, for at most `tokens` tokens."""
        ...

    def step(self, state: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """The output rows of the next piece, and the state after it. `mask` covers everything so far."""
        ...

    def reorder(self, state: Any, index: Tensor) -> Any | None:
        """The state with its batch rows taken by `index`; None if the target cannot."""
        ...

    def crop(self, state: Any, tokens: int) -> Any | None:
        """The state as it was after `tokens` tokens; None if the target cannot."""
        ...


class Adapter:
    """A target with everything that laws, costs and pictures need of it. A subclass calls one kind of target.

    Attributes:
        target: the function or module itself, or a copy of it in another precision.
        name: how reports call it.
        kind: operator, layer or model.
        conventions: what its arguments mean.
        abilities: what it can do: mask, aligned, float, gradients, cache, lengths, operator, module.
        dtype: the precision of its inputs.
        native: the precision it came in.
        longest: the most tokens it takes, or None.
        claims: the laws that its kind claims by itself.
        parts: further views of the same target, such as the source side of an encoder-decoder.
        declared: one line of what was recognised, for the report.
    """

    kind: str = ""

    def __init__(self, target: Any, name: str, conventions: Conventions | None = None) -> None:
        self.target = target
        self._unused = copies.copy_target(target)
        self.name = name
        self.conventions = conventions or Conventions()
        self.abilities: set[str] = set()
        self.missing: dict[str, str] = {}  # why it lacks an ability, where there is more to say than that it does
        self.dtype = self.native = _dtype_of(target)
        self.max_length: int | None = None
        self.min_length = 1
        self.step_of_lengths = 1
        self.claims: tuple[str, ...] = ()
        self.documented = False  # whether its claims are what its library documents; else they are inferred
        self.parts: list[Adapter] = []
        self.declared = ""
        self.part = ""
        self.context: tuple[str, ...] = ()  # the laws claimed beside the current one
        self.caching: Cached | None = None
        self.weights_function: Callable[..., Any] | None = None  # a call of the target that returns its weights
        self._views: dict[torch.dtype, Adapter | None] = {}
        self._eps: float | None = None
        if isinstance(target, nn.Module):
            self.abilities.add("module")

    # What laws call

    def draw(self, batch: int, tokens: int, rng: Rng) -> Tensor:
        """Random input for `batch` rows of `tokens` tokens; tokens lie on axis 1."""
        raise NotImplementedError

    def run(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The output, `(batch, token, ...)` if aligned; `mask` is `(batch, token)`, True is a real token."""
        raise NotImplementedError

    def scaled(self, x: Tensor, factor: float, rng: Rng) -> Tensor:
        """Other content of the same kind, `factor` times as large where that means anything."""
        fresh = self.draw(x.shape[0], x.shape[1], rng)
        return fresh * factor if fresh.is_floating_point() else fresh

    def weights(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """The attention weights of each layer, `(batch, head, query, key)`; empty if they cannot be observed."""
        return []

    def variants(self) -> dict[str, Variant]:
        """Other code paths that compute the same: each a name and a function like `run`."""
        return {}

    def copy_unused(self) -> Adapter:
        """The adapter of another instance of the target, one that has not been called yet."""
        other = copy.copy(self)
        other.target = self._copy_target()
        other._views, other._eps = {}, None
        other._rebind(self)
        return other

    @property
    def channels(self) -> int:
        """Terms that a product over features sums, for the bound of rounding."""
        return 64

    # Lengths

    def lengths(self, *wanted: int) -> list[int]:
        """Those of the wanted lengths that the target takes; at least one."""
        step = self.step_of_lengths
        fitting = []
        for tokens in wanted:
            tokens = max(-(-tokens // step) * step, self.min_length)
            if self.max_length is None or tokens <= self.max_length:
                fitting.append(tokens)
        if not fitting:
            fitting = [self.max_length or self.min_length]
        return list(dict.fromkeys(fitting))

    # Precision

    def at(self, dtype: torch.dtype) -> Adapter | None:
        """This adapter in another precision, or None if it cannot be converted."""
        if dtype == self.dtype:
            return self
        if dtype not in self._views:
            self._views[dtype] = self._convert_to(dtype)
        return self._views[dtype]

    @torch.no_grad()
    def _convert_to(self, dtype: torch.dtype) -> Adapter | None:
        view = copy.copy(self)
        view._views, view._eps = {self.dtype: self}, None
        try:
            view.target = precision.in_precision(self.target, dtype)
            view.dtype = dtype
            form = getattr(view, "form", None)
            if form is not None and form.dtype.is_floating_point and dtype in (torch.float16, torch.bfloat16):
                view.form = replace(form, dtype=dtype)  # type: ignore[attr-defined]
            view._rebind(self)
            x = view.draw(1, view.lengths(3)[0], Rng(0, "precision"))
            output = view.run(x)
            if output.dtype != dtype and dtype == torch.float64:
                return None
            if dtype == torch.float64:
                own = self.run(self.draw(1, self.lengths(3)[0], Rng(0, "precision"))).double()
                scale = float(own.abs().max()) + 1e-30
                if own.isfinite().all() and float((own - output).abs().max()) > 0.1 * scale:
                    return None  # it computes something else in float64; its own precision has to do
        except Exception:  # a target may refuse another precision with any error
            return None
        return view

    def _rebind(self, original: Adapter) -> None:
        """Called on a copy whose target is another one: renew what refers to the target."""

    @property
    def eps(self) -> float:
        """The spacing of numbers near one, in the coarsest precision that the computation passes through."""
        if self._eps is None:
            dtype = self.dtype
            if dtype == torch.float64:
                with torch.no_grad():
                    dtype = precision.find_coarsest_dtype(
                        lambda: self.run(self.draw(1, self.lengths(3)[0], Rng(0, "eps")))
                    )
            self._eps = torch.finfo(dtype).eps
        return self._eps

    # Bookkeeping

    def _copy_target(self) -> Any:
        if isinstance(self.target, nn.Module) and type(self.target) is not type(self._unused):
            return deepcopy(self.target)  # it was exchanged after it came
        other = copies.copy_target(self._unused)
        return other if self.dtype == self.native else precision.in_precision(other, self.dtype)

    @contextmanager
    def training_without_dropout(self) -> Iterator[None]:
        """The module in training mode with every dropout switched off."""
        module = self.target
        chances = [(part, name, chance) for part in module.modules() for name, chance in _dropout_probabilities(part)]
        modes = [(part, part.training) for part in module.modules()]
        try:
            for part, name, _ in chances:
                setattr(part, name, 0.0)
            module.train()
            yield
        finally:
            for part, name, chance in chances:
                setattr(part, name, chance)
            for part, mode in modes:
                part.training = mode

    @property
    def trains_as_it_runs(self) -> bool:
        """Whether training without dropout computes what evaluation does: no part keeps statistics of batches."""
        if not isinstance(self.target, nn.Module):
            return False
        return not any(isinstance(part, nn.modules.batchnorm._NormBase) for part in self.target.modules())

    def with_conventions(self, **fields: Any) -> Adapter:
        self.conventions = replace(self.conventions, **fields)
        return self

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"


def variant_names(adapter: Adapter) -> list[str]:
    """Names of all variants that compute the same: the target's own, with gradients, and in training."""
    return [*adapter.variants(), "with gradients", *(["in training"] if adapter.trains_as_it_runs else [])]


def run_variant(adapter: Adapter, name: str) -> Variant:
    """One of `variant_names`, as a function like `run`."""

    def with_gradients(x: Tensor, mask: Tensor | None = None) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_() if x.is_floating_point() else x
            return adapter.run(leaf, mask)

    def in_training(x: Tensor, mask: Tensor | None = None) -> Tensor:
        with adapter.training_without_dropout(), torch.enable_grad():
            rng.seed_generators(0)  # what is still random is the same in each run
            return adapter.run(x, mask)

    return {"with gradients": with_gradients, "in training": in_training}.get(name) or adapter.variants()[name]


OUTPUTS = ("logits", "last_hidden_state", "out", "output", "hidden_states", "hidden", "y", "x")


def first_tensor(output: Any, names: Sequence[str] = OUTPUTS) -> Tensor:
    """The output proper of what a layer or model returned: a tensor, the first of a tuple, or a named one."""
    if isinstance(output, Tensor):
        return output
    if not isinstance(output, list | tuple) or hasattr(output, "_fields"):
        for name in names:
            found = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
            if isinstance(found, Tensor):
                return found
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple) and output:
        return first_tensor(output[0])
    raise InputError(
        "the target returns no tensor.",
        found=f"{type(output).__name__}",
        because="laws compare output tensors",
        instead="a function that returns a tensor, or a tuple that begins with one",
    )


def _dropout_probabilities(part: nn.Module) -> list[tuple[str, float]]:
    """The attributes of a module that are chances of dropping something."""
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return [("p", part.p)]
    return [(name, value) for name, value in vars(part).items() if "drop" in name and isinstance(value, float)]


def _dtype_of(target: Any) -> torch.dtype:
    if isinstance(target, nn.Module):
        for tensor in target.parameters():
            if tensor.is_floating_point():
                return tensor.dtype
    return torch.float32
