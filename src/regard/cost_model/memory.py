"""Memory: weights, gradients, optimizer, activations, cache, and the peaks of a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import sympy
from torch import Tensor, nn

from regard.caching import lazy_property
from regard.cost_model.memory_cache import CacheFormulas, find_cache_formulas
from regard.cost_model.memory_fit import largest
from regard.cost_model.optimizers import COUNTER, MOMENTS, Optimizer, check_optimizer, state_bytes
from regard.cost_model.peak_memory import (
    Loss,
    OptimizerMemory,
    TracedMemory,
    prepare_runner,
    trace_forward_memory,
    trace_optimizer_memory,
    trace_training_memory,
)
from regard.cost_model.quantity import Quantity
from regard.cost_model.sizes import Sizes
from regard.cost_model.trace.runner import Runner
from regard.cost_model.units import exact, short
from regard.errors import CostError

if TYPE_CHECKING:
    from regard.cost_model.cost import Cost

# Runs that have a peak.
STEPS = ("forward", "training", "recomputed", "decode")
# A traced run may save this much more or less than the formula, which has no dropout, before its number replaces it.
AGREES = 0.01
# In the order in which they are shown.
QUANTITIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "activations_recomputed",
    "cache_per_token",
    "cache",
    "peak_forward",
    "peak_training",
    "peak_recomputed",
    "peak_decode",
)


@dataclass(frozen=True)
class Memory:
    """What a run needs, in bytes. Every quantity is a number and, where there is one, a formula.

        >>> from regard.cost_model import cost
        >>> from regard.models import GPT, GPTConfig
        >>> model = GPT(GPTConfig(vocab_size=101, context_length=64, dim=32, layers=2, heads=4))
        >>> memory = cost(model, tokens=64).memory
        >>> memory.cache_per_token
        512 = 8*B*G*L*d
        >>> memory.peak_training > memory.peak_forward > memory.parameters
        True

    Peaks are found by tracing a run on the CPU with fake tensors (see `peak_memory`), as `backend="auto"` runs
    in plain eager mode; they include parameters, buffers and inputs. Each is computed when it is first read.

    Attributes:
        optimizer: `"adamw"`, `"adam"` (two numbers for each parameter), `"momentum"` (one), `"sgd"` (none),
            `"adafactor"` (a row and a column for each matrix), or a function from parameters to an optimizer.
        loss: `"mean"` of all outputs, `"cross_entropy"` of the last one, or a function from outputs to a number.
    """

    cost: Cost = field(repr=False)
    target: Any = field(repr=False, default=None)
    sizes: Sizes = field(repr=False, default_factory=Sizes)
    optimizer: Optimizer = "adamw"
    loss: Loss = "mean"

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)

    def using(self, optimizer: Optimizer | None = None, loss: Loss | None = None) -> Memory:
        """The same with another optimizer, or another loss."""
        return dataclasses.replace(
            self,
            optimizer=self.optimizer if optimizer is None else optimizer,
            loss=self.loss if loss is None else loss,
        )

    def at(self, **sizes: Any) -> Memory:
        """The same with other sizes: `memory.at(tokens=8192)`."""
        return dataclasses.replace(self, cost=self.cost.at(**sizes), sizes=dataclasses.replace(self.sizes, **sizes))

    # What is there all the time

    @lazy_property
    def parameters(self) -> Quantity:
        """Weights; tied ones once."""
        return self._count_bytes(self._list_weights(learned=False))

    @lazy_property
    def gradients(self) -> Quantity:
        """One number for each learned one, in its dtype."""
        return self._count_bytes(self._list_weights(learned=True))

    @lazy_property
    def optimizer_state(self) -> Quantity:
        """The state of the optimizer, its counters included."""
        learned = self._list_weights(learned=True)
        if callable(self.optimizer):
            return _make_bytes(self._trace_optimizer().state)
        if self.optimizer == "adafactor":
            return _make_bytes(state_bytes("adafactor", learned, self._find_item_size(learned)))
        counters = COUNTER[self.optimizer] * len(learned)
        return self.gradients * MOMENTS[self.optimizer] + counters

    # What a run makes

    @lazy_property
    def activations(self) -> Quantity:
        """What the forward pass saves for the backward pass; with dropout if the module has some, and then a number.

        Beside parameters and inputs, which are there anyway.
        """
        formula = self.cost.activation_bytes
        if self.target is None or self._is_missing_sizes():
            return formula
        saved_bytes = self._trace_without_loss().saved
        try:
            agrees = abs(formula.value - saved_bytes) <= AGREES * saved_bytes
        except CostError:
            agrees = False
        return formula if agrees else _make_bytes(saved_bytes)

    @lazy_property
    def activations_recomputed(self) -> Quantity:
        """The same if every block saves its inputs only: these, what is outside of blocks, and one block's own."""
        again = self._find_recomputed()
        return _make_bytes(again.saved + self._trace_without_loss().saved_by_block)

    @lazy_property
    def cache_per_token(self) -> Quantity:
        """Bytes that one more token takes in the cache of a decoder: none for a full window or for linear attention."""
        made = self._cache_formulas
        return Quantity(made.per_token, self.cost.values | made.values, "B")

    @lazy_property
    def cache(self) -> Quantity:
        """Bytes of the cache after `tokens` tokens, which is made for so many."""
        made = self._cache_formulas
        return Quantity(made.total, self.cost.values | made.values, "B")

    # Peaks

    @lazy_property
    def peak_forward(self) -> Quantity:
        """Of a forward pass without gradients."""
        return _make_bytes(self._trace_forward().peak)

    @lazy_property
    def peak_training(self) -> Quantity:
        """Of a step of training: forward, backward, optimizer; gradients are set to `None` between steps."""
        return _make_bytes(self._find_training().peak)

    @lazy_property
    def peak_recomputed(self) -> Quantity:
        """Of a training step in which every block runs again in backward."""
        return _make_bytes(self._find_recomputed().peak)

    @lazy_property
    def peak_decode(self) -> Quantity:
        """Of reading one more token after `tokens` cached ones: weights, cache, and the little that one row takes."""
        if self._cache_formulas.total == 0:
            raise CostError(
                "Nothing here decodes.",
                asked=f"peak_decode of {self.cost.name}",
                because="it has no KV cache for a next token",
                instead="peak_forward",
            )
        one = trace_forward_memory(self._prepare_runner(dataclasses.replace(self.sizes, tokens=1)))
        tokens = sympy.Symbol("N", positive=True, integer=True)
        if tokens in self._cache_formulas.values:
            after = self._cache_formulas.values[tokens] + 1
            return _make_bytes(one.peak + int(self.cache.at({tokens: after})))
        return Quantity(
            one.peak + self._cache_formulas.total.subs(tokens, tokens + 1), self._cache_formulas.values, "B"
        )

    def peak(self, step: str = "forward") -> Quantity:
        """The peak of `"forward"`, `"training"`, `"recomputed"` (training with recomputation) or `"decode"`."""
        if step not in STEPS:
            raise CostError(
                f"There is no peak of a step {step!r}.",
                asked=f"step={step!r}",
                because=f"what is followed is {', '.join(STEPS)}",
                instead='step="forward"',
            )
        return getattr(self, f"peak_{step}")

    def transient(self, step: str = "forward") -> Quantity:
        """The part of a peak that is not there before the run: all but parameters, buffers and inputs."""
        runs = {"forward": self._trace_forward, "training": self._find_training, "recomputed": self._find_recomputed}
        if step in runs:
            return _make_bytes(runs[step]().transient)
        return self.peak(step) - self._trace_forward().resident

    # What fits

    def longest(self, limit: int, step: str = "forward") -> int | float:
        """How many tokens fit into so many bytes: this many do, and one more does not.

        No more than the model can read; `inf` where every length fits, as in decoding by linear attention.

        >>> from regard.cost_model import cost
        >>> from regard.models import GPT, GPTConfig
        >>> model = GPT(GPTConfig(vocab_size=101, context_length=100_000, dim=32, layers=2, heads=4, position="rotary"))
        >>> memory = cost(model, tokens=64).memory
        >>> most = memory.longest(16 << 20, step="decode")
        >>> memory.at(tokens=most).peak_decode <= 16 << 20 < memory.at(tokens=most + 1).peak_decode
        True
        """
        return self.largest(limit, "tokens", step)

    def largest(self, limit: int, size: str = "batch", step: str = "forward") -> int | float:
        """The largest number of a size, `"batch"` or `"tokens"`, with which a step fits into so many bytes."""
        if self.sizes.inputs is not None or self.target is None:
            raise CostError(
                "The sizes of this run cannot be changed.",
                asked=f"the largest {size} that fits",
                because="its inputs were given as they are"
                if self.target is not None
                else "it is a part, or the sum or difference of others, and no module",
                instead=f"cost(model, {size}=...).memory",
            )

        def needed(number: int) -> int:
            there = dataclasses.replace(self, sizes=dataclasses.replace(self.sizes, **{size: number}))
            if step in ("training", "recomputed"):  # the optimizer does not depend on sizes
                there.__dict__["_made"] = {"optimizer": self._trace_optimizer()}
            return int(there.peak(step))

        return largest(needed, limit, self._find_max_tokens() if size == "tokens" else None)

    # Showing

    def to_dict(self) -> dict[str, Any]:
        """Formulas as text and numbers; without a number where a size is missing or nothing can be followed."""
        found = {}
        for name in QUANTITIES:
            quantity = self._find_quantity(name)
            if quantity is not None:
                formula = str(quantity.formula) if quantity.formula.free_symbols else None
                found[name] = {"formula": formula, "value": _find_number(quantity)}
        chosen = self.optimizer if isinstance(self.optimizer, str) else getattr(self.optimizer, "__name__", "own")
        return {"name": self.cost.name, "optimizer": chosen, "quantities": found}

    def to_json(self, indent: int | None = 2) -> str:
        """The same as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        made = self.to_dict()
        rows = [
            (
                name.replace("_", " "),
                "-" if each["value"] is None else exact(each["value"]),
                "" if each["value"] is None else short(each["value"], "B"),
                each["formula"] or "",
            )
            for name, each in made["quantities"].items()
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{made['name']}  memory in bytes, optimizer {made['optimizer']}", ""]
        for name, value, close, formula in rows:
            lines.append(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {close:>{widths[2]}}  {formula}".rstrip())
        return "\n".join(lines)

    def _find_quantity(self, name: str) -> Quantity | None:
        try:
            return getattr(self, name)
        except CostError:
            return None

    # Runs

    def _prepare_runner(self, sizes: Sizes) -> Runner:
        if self.target is None:
            raise CostError(
                "A part cannot be run alone.",
                asked=f"the peak of {self.cost.name}",
                because="only formulas are known of it, and a peak is found by following a run",
                instead="cost(module).memory of the module itself",
            )
        return prepare_runner(self.target, sizes, self.cost.mode.dtype)

    def _find_runner(self) -> Runner:
        return self._compute_once("runner", lambda: self._prepare_runner(self.sizes))

    def _trace_forward(self) -> TracedMemory:
        return self._compute_once("forward", lambda: trace_forward_memory(self._find_runner()))

    def _find_training(self) -> TracedMemory:
        return self._compute_once("training", lambda: self._trace_training(recomputed=False))

    def _find_recomputed(self) -> TracedMemory:
        return self._compute_once("recomputed", lambda: self._trace_training(recomputed=True))

    def _trace_without_loss(self) -> TracedMemory:
        """A step whose loss saves nothing of its own."""
        if self.loss == "mean":
            return self._find_training()
        return self._compute_once("without_loss", lambda: self.using(loss="mean")._find_training())

    def _trace_training(self, *, recomputed: bool) -> TracedMemory:
        return trace_training_memory(
            self._find_runner(), self._trace_optimizer(), loss=self.loss, recomputed=recomputed
        )

    def _trace_optimizer(self) -> OptimizerMemory:
        dtype = self.cost.mode.dtype if self._has_other_dtype() else None
        return self._compute_once("optimizer", lambda: trace_optimizer_memory(self.target, dtype, self.optimizer))

    def _compute_once(self, name: str, make: Callable[[], Any]) -> Any:
        made: dict[str, Any] = self.__dict__.setdefault("_made", {})
        if name not in made:
            made[name] = make()
        return made[name]

    @lazy_property
    def _cache_formulas(self) -> CacheFormulas:
        return find_cache_formulas(self.target, self.sizes, self.cost.mode.item)

    def _is_missing_sizes(self) -> bool:
        """Whether sizes are missing, so that only formulas are known."""
        try:
            self._find_runner()
        except CostError:
            return True
        return False

    # Weights

    def _list_weights(self, *, learned: bool) -> list[Tensor]:
        if not isinstance(self.target, nn.Module):
            return []
        return [each for each in self.target.parameters() if each.requires_grad or not learned]

    def _has_other_dtype(self) -> bool:
        """Whether the question is about other numbers than the module is made of."""
        return not any(each.dtype == self.cost.mode.dtype for each in self._list_weights(learned=False))

    def _find_item_size(self, weights: list[Tensor]) -> int | None:
        return self.cost.mode.item if weights and self._has_other_dtype() else None

    def _count_bytes(self, weights: list[Tensor]) -> Quantity:
        """A formula where it tells the bytes of these weights, else their number."""
        formula = self.cost.parameters * self.cost.mode.item
        if not isinstance(self.target, nn.Module):
            return formula
        item = self._find_item_size(weights)
        total = sum(each.numel() * (each.element_size() if item is None else item) for each in weights)
        return formula if _find_number(formula) == total else _make_bytes(total)

    def _find_max_tokens(self) -> int | None:
        """The most tokens that the target can read, if there is a limit."""
        config = getattr(self.target, "config", None)
        for name in ("context_length", "max_position_embeddings"):
            if isinstance(most := getattr(config, name, None), int):
                return most
        return None


def memory_of(cost: Cost, target: Any = None, sizes: Sizes | None = None) -> Memory:
    """The memory of what a cost was asked for; of a part, of which only formulas are known, without its peaks."""
    return Memory(cost, target, Sizes() if sizes is None else sizes)


def _make_bytes(number: int) -> Quantity:
    return Quantity(number, {}, "B")


def _find_number(quantity: Quantity) -> int | float | None:
    try:
        return quantity.value
    except CostError:
        return None
