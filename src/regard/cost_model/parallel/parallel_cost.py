"""The cost of a training step on several devices: formulas, and the numbers they give."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import sympy
from torch import nn

from regard.caching import lazy_property
from regard.cost_model.cost import Cost
from regard.cost_model.machine import this_machine
from regard.cost_model.optimizers import COUNTER, MOMENTS
from regard.cost_model.parallel.collectives import (
    Collective,
    RingLayers,
    list_gradient_reduction,
    list_ring,
    list_ring_layers,
    list_sharded,
    list_tensor_reduction,
)
from regard.cost_model.parallel.device_memory import (
    DeviceMemory,
    find_activations,
    find_gathered,
    find_peak,
    find_received,
)
from regard.cost_model.parallel.sharding import Units, find_split_parameters, find_units
from regard.cost_model.parallel.strategy import Strategy
from regard.cost_model.parallel.timing import Timing, Work, find_timing, find_work
from regard.cost_model.peak_memory import prepare_runner, trace_optimizer_memory, trace_training_memory
from regard.cost_model.quantity import Quantity
from regard.cost_model.sizes import Sizes
from regard.cost_model.symbols import Values, legend, read_symbol, size_symbols
from regard.errors import CostError
from regard.layers import MultiHeadAttention

L, N, w, K, c, b, f = size_symbols("L N w K c b f")
MEMORY = ("parameters", "gradients", "optimizer_state", "activations", "gathered", "received")
TIMES = ("compute", "communication", "overlapped", "exposed", "step")


class ParallelCost:
    """What a training step costs on several devices. Every quantity is a number and a formula.

        >>> from regard.cost_model import cost
        >>> from regard.models import GPT, GPTConfig
        >>> model = GPT(GPTConfig(vocab_size=96, context_length=64, dim=32, layers=2, heads=4))
        >>> spread = cost(model, tokens=64, devices=4, strategy="ddp", link_gbps=10, device_tflops=0.1)
        >>> spread.sent.value == 2 * 3 * 4 * sum(each.numel() for each in model.parameters()) // 4
        True

    `batch` are the sequences of a device, or of the devices that share them; `tokens` are those of a whole sequence.
    See `Strategy` for what can be asked, and `timing` for what is assumed.

    Attributes:
        strategy: how the step is spread.
        cost: the step on one device, or on the devices that share its sequences.
        collectives: what a device sends.
        values: the number of every letter.
        notes: what a reader should know.
    """

    def __init__(
        self,
        cost: Cost,
        strategy: Strategy,
        collectives: tuple[Collective, ...],
        memory: DeviceMemory,
        work: dict[str, Work],
        timing: Timing,
        values: Values,
        *,
        notes: tuple[str, ...] = (),
        peak: Callable[[ParallelCost], int] | None = None,
        spread: Callable[[Strategy], ParallelCost] | None = None,
    ) -> None:
        self.name, self.cost, self.strategy, self.collectives = cost.name, cost, strategy, collectives
        self.values, self.notes = dict(values), notes
        self._memory, self._work, self._timing, self._peak, self._spread = memory, work, timing, peak, spread

    def _make(self, formula: Any, unit: str = "") -> Quantity:
        return Quantity(formula, self.values, unit)

    # What is sent

    @lazy_property
    def sent(self) -> Quantity:
        """Bytes that a device sends in a step; for ring attention the most that one sends of each kind."""
        return self._make(sum((each.sent for each in self.collectives), sympy.Integer(0)), "B")

    @lazy_property
    def sent_by_collective(self) -> dict[str, Quantity]:
        """The same by what is sent."""
        return {each.name: self._make(each.sent, "B") for each in self.collectives}

    @lazy_property
    def payload_by_collective(self) -> dict[str, Quantity]:
        """Bytes of the tensors that are reduced or gathered, however that is done."""
        return {each.name: self._make(each.payload, "B") for each in self.collectives}

    # What a device holds

    @lazy_property
    def memory(self) -> dict[str, Quantity]:
        """Bytes on a device, by what they are."""
        return {name: self._make(getattr(self._memory, name), "B") for name in MEMORY}

    @lazy_property
    def memory_total(self) -> Quantity:
        """All of `memory` together: a formula, without temporary results."""
        return self._make(self._memory.total, "B")

    @lazy_property
    def peak(self) -> Quantity:
        """The most that a device holds at one time; a number, found by tracing its share of the step."""
        if self._peak is None:
            raise CostError(
                "The peak of a device is not known here.",
                asked=f"the peak of {self.name} by {self.strategy.strategy}",
                because="it is found by tracing a module, and no module here has these sizes or is cut like this",
                instead=".memory_total, which is a formula",
            )
        return Quantity(self._peak(self), {}, "B")

    # How long it takes

    @lazy_property
    def flops(self) -> Quantity:
        """FLOPs of the busiest device."""
        return self._make(sum((each.flops for each in self._work.values()), sympy.Integer(0)))

    @lazy_property
    def seconds(self) -> dict[str, Quantity]:
        """Compute, communication, the part of it that is overlapped and the part that is exposed, and the step."""
        return {name: self._make(getattr(self._timing, name), "s") for name in TIMES}

    @lazy_property
    def efficiency(self) -> Quantity:
        """T_1 / (K T_K): the time of one device for the work of all, over the time that all of them spend."""
        return self._make(self._timing.efficiency)

    # Other sizes

    def using(self, **options: Any) -> ParallelCost:
        """The same step spread otherwise: `spread.using(strategy="fsdp", context=8)`. The model is not traced again."""
        if self._spread is None or "param_dtype" in options:
            raise CostError(
                "This step cannot be spread otherwise.",
                asked=f"using({', '.join(f'{name}={value!r}' for name, value in options.items())})",
                because="param_dtype is the dtype in which it was traced"
                if self._spread is not None
                else "it has other sizes than the model that was traced",
                instead="cost(model, ...) with these options, or using(...) before at(...)",
            )
        return self._spread(dataclasses.replace(self.strategy, **options))

    def at(self, **sizes: Any) -> ParallelCost:
        """The same formulas with other numbers: `spread.at(devices=1024, layers=80, tokens=2**20)`.

        Sizes are letters or their names, also those of the model; `link_gbps` and `device_tflops` as in `cost`. Nothing
        is traced, so that there is no peak. A formula without padding is used with sizes that need some, too.
        """
        values = dict(self.values)
        windowed = any(w in each.sent.free_symbols for each in self.collectives if each.is_attention)
        rates = {"link_gbps": (b, 1e9 / 8), "device_tflops": (f, 1e12)}
        for name, value in sizes.items():
            symbol, unit = rates[name] if name in rates else (read_symbol(name), 1)
            if symbol == w and windowed:
                raise CostError(
                    "The window is a number in these formulas.",
                    asked=f"at({name}={value!r})",
                    because="the pairs of a window are counted for the window that the model has",
                    instead=f"cost(...) of a model with a window of {value}",
                )
            values[symbol] = value * unit
        if self.strategy.strategy == "context":
            values[K] = values[c] = sizes.get("devices", sizes.get("context", values[K]))
        if c in values and values[c] < 2:
            raise CostError(
                "These formulas are for devices that share a sequence.",
                asked=f"at(context={values[c]})",
                because="nothing travels where each device has whole sequences",
                instead="using(context=None).at(...)",
            )
        if c in values and values[K] % values[c]:
            raise CostError(
                f"{values[K]} devices cannot share sequences {values[c]} by {values[c]}.",
                asked=f"at({', '.join(f'{name}={value!r}' for name, value in sizes.items())})",
                because="groups of equal size share the sequences",
                instead=f"devices={values[c] * 2}",
            )
        if windowed and self.strategy.layout == "zigzag" and 2 * values[c] * values[w] > values[N]:
            raise CostError(
                "These formulas are for windows that reach into one chunk.",
                asked=f"a window of {values[w]} keys in {values[N]} tokens on {values[c]} devices",
                because=f"a chunk has {values[N] / (2 * values[c]):g} tokens",
                instead=f"at least {2 * values[c] * values[w]} tokens, or fewer devices that share them",
            )
        changed = {name: sizes[name] for name in ("link_gbps", "device_tflops") if name in sizes}
        changed |= {"devices": values[K]} | ({"context": values[c]} if "context" in sizes else {})
        strategy = dataclasses.replace(self.strategy, **changed)
        parts = strategy, self.collectives, self._memory, self._work, self._timing, values
        return ParallelCost(self.cost, *parts, notes=self.notes)

    # Showing

    def _quantities(self) -> dict[str, dict[str, Quantity]]:
        return {
            "sent": {**self.sent_by_collective, "all": self.sent},
            "memory": {**self.memory, "all": self.memory_total},
            "seconds": self.seconds,
        }

    def legend(self) -> list[tuple[str, str, Any]]:
        """Letter, meaning and number of every letter that is used."""
        formulas = [each.formula for several in self._quantities().values() for each in several.values()]
        return legend([*formulas, self.flops.formula], self.values, "training")

    def to_dict(self) -> dict[str, Any]:
        """Everything but the peak, which takes a trace of its own, in plain Python: formulas as text."""
        found: dict[str, Any] = {
            "name": self.name,
            "strategy": self.strategy.to_dict(),
            "letters": {
                letter: {"meaning": words, "value": _to_number(number)} for letter, words, number in self.legend()
            },
        }
        for name, several in self._quantities().items():
            found[name] = {each: _to_plain(quantity) for each, quantity in several.items()}
        found |= {"flops": _to_plain(self.flops), "efficiency": _to_plain(self.efficiency)}
        kinds = {each.name: each for each in self.collectives}
        for name, plain in found["sent"].items():
            if name in kinds:
                each = kinds[name]
                plain |= {"kind": each.kind, "during": each.during, "by_device": list(each.by_device) or None}
                plain["payload"] = _to_plain(self.payload_by_collective[name])["value"]
        return {**found, "notes": list(self.notes)}

    def to_json(self, path: str | None = None, indent: int | None = 2) -> str:
        """The same as JSON, and into a file if one is named."""
        text = json.dumps(self.to_dict(), indent=indent)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        return text

    def table(self, width: int | None = None) -> str:
        """The table that `print` shows."""
        from regard.cost_model.parallel.table import text

        return text(self, width)

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        return f"ParallelCost({self.name}, {self.strategy.strategy} on {self.strategy.devices}: sent {self.sent!r})"


def cost_parallel(cost: Cost, target: Any, sizes: Sizes, strategy: Strategy, item: int) -> ParallelCost:
    """Spread a cost over devices.

    cost: of a training step of one device's sequences, in the dtype in which it computes.
    item: bytes of a parameter.
    """
    _check_target(target, strategy)
    values: dict[sympy.Symbol, Any] = {**cost.values, K: strategy.devices}
    notes = [*cost.notes, *_describe_assumptions(strategy)]
    layers: list[RingLayers] = []
    imbalance = 1.0
    if strategy.shared_by > 1:
        values[c] = strategy.shared_by
        layers = list_ring_layers(target, cost, sizes, strategy)
        for each in layers:
            values |= {symbol: number for symbol, number in each.values.items() if symbol not in values}
        imbalance = max(each.tokens.imbalance for each in layers)
        notes += _describe_layers(layers)
    units = find_units(target, cost, strategy.devices) if strategy.is_sharded else None
    if units is not None and units.is_padded:
        notes.append(f"formulas of shards are numbers: some first axis is not divisible by {strategy.devices}")
    if strategy.link_gbps is not None:
        values[b] = strategy.link_gbps * 1e9 / 8
    if strategy.device_tflops is not None or strategy.link_gbps is not None:
        rate = strategy.device_tflops
        values[f] = this_machine().peak_of(cost.mode.dtype) if rate is None else rate * 1e12
    collectives = _list_collectives(cost, target, sizes, strategy, item, units, layers)
    memory = _find_memory(cost, target, strategy, item, units, layers)
    work = find_work(cost, strategy, imbalance)
    peak = None if strategy.strategy == "tensor" or not isinstance(target, nn.Module) else _make_peak(target, sizes)

    def spread(other: Strategy) -> ParallelCost:
        return cost_parallel(cost, target, sizes, other, item)

    total = sum((each.flops for each in find_work(cost, _on_one(strategy), 1.0).values()), sympy.Integer(0))
    timing = find_timing(work, total, collectives, strategy)
    parts = strategy, collectives, memory, work, timing, values
    return ParallelCost(cost, *parts, notes=tuple(notes), peak=peak, spread=spread)


def _on_one(strategy: Strategy) -> Strategy:
    return Strategy(1, recompute=strategy.recompute)


def _check_target(target: Any, strategy: Strategy) -> None:
    if strategy.strategy != "tensor":
        return
    modules = target.modules() if isinstance(target, nn.Module) else ()
    heads = [each.sizes.kv_heads for each in modules if isinstance(each, MultiHeadAttention)]
    if not heads or any(each % strategy.devices for each in heads):
        raise CostError(
            f"The heads of {type(target).__name__} cannot be shared by {strategy.devices} devices.",
            asked=f"strategy='tensor' with devices={strategy.devices}",
            found=f"{min(heads)} key/value heads" if heads else "no MultiHeadAttention",
            because="every device has as many whole heads as the others",
            instead=f"devices={min(heads)}" if heads else 'strategy="ddp"',
        )


def _find_gradients(cost: Cost, target: Any, item: int) -> sympy.Expr:
    """A formula if all parameters are learned."""
    if not isinstance(target, nn.Module):
        return sympy.Integer(0)
    learned = sum(each.numel() for each in target.parameters() if each.requires_grad)
    formula = cost.parameters
    return sympy.expand(item * formula.formula) if formula == learned else sympy.Integer(item * learned)


def _list_collectives(
    cost: Cost, target: Any, sizes: Sizes, strategy: Strategy, item: int, units: Units | None, layers: list[RingLayers]
) -> tuple[Collective, ...]:
    if strategy.strategy == "tensor":
        return tuple(list_tensor_reduction(cost.mode.item))
    mode = cost.mode
    found = list_ring(layers, mode.item, mode.wide, sizes.batch, strategy)
    if units is not None:
        return (*found, *list_sharded(units, item, mode.item))
    return (*found, *list_gradient_reduction(_find_gradients(cost, target, item)))


def _find_memory(
    cost: Cost, target: Any, strategy: Strategy, item: int, units: Units | None, layers: list[RingLayers]
) -> DeviceMemory:
    activations = find_activations(cost, strategy)
    received = find_received(layers, cost.mode.item, cost.mode.wide)
    if not isinstance(target, nn.Module):
        zero = sympy.Integer(0)
        return DeviceMemory(zero, zero, zero, activations, zero, received)
    parameters, gradients = item * cost.parameters.formula, _find_gradients(cost, target, item)
    counters = COUNTER["adamw"] * sum(1 for each in target.parameters() if each.requires_grad)
    gathered: sympy.Expr = sympy.Integer(0)
    if units is not None:
        parameters = gradients = sympy.expand(item * units.total) / K
        gathered = find_gathered(units, cost.mode.item)
    elif strategy.strategy == "tensor":
        split = item * find_split_parameters(target, cost)
        parameters = gradients = sympy.expand(parameters - split) + split / K
    state = MOMENTS["adamw"] * gradients + counters
    return DeviceMemory(parameters, gradients, state, activations, gathered, received)


def _make_peak(target: nn.Module, sizes: Sizes) -> Callable[[ParallelCost], int]:
    def find(made: ParallelCost) -> int:
        strategy, cost = made.strategy, made.cost
        shared = strategy.shared_by
        own = sizes if sizes.tokens is None else dataclasses.replace(sizes, tokens=-(-sizes.tokens // shared))
        runner = prepare_runner(target, own, cost.mode.dtype)
        traced = trace_training_memory(runner, trace_optimizer_memory(target), recomputed=strategy.recompute)
        numbers = DeviceMemory(**{name: int(made.memory[name]) for name in MEMORY})
        units = None
        if strategy.is_sharded:
            known = find_units(target, cost, strategy.devices)
            block, root = (int(made._make(each)) * cost.mode.item for each in (known.block, known.root))
            units = block, root
        whole = sum(each.numel() for each in target.parameters()) * cost.mode.item
        return find_peak(traced, numbers, units, strategy, whole)

    return find


def _describe_assumptions(strategy: Strategy) -> list[str]:
    if strategy.strategy == "tensor":
        return ["activations of tensor parallelism are a formula that no run was compared with"]
    if strategy.is_sharded:
        return ["gloo sends a reduce-scatter as an all-reduce, twice the bytes that are told here"]
    return []


def _describe_layers(layers: list[RingLayers]) -> list[str]:
    notes = []
    for each in layers:
        pattern = "Full()" if each.attention.pattern is None else repr(each.attention.pattern)
        if not each.tokens.most.free_symbols and each.attention.feature_map is None:
            notes.append(f"the keys that travel for {pattern} are a number, counted for these sizes")
        if not each.tokens.is_counted:
            notes.append(f"the pairs of {pattern} are assumed to be equally many on every device")
    return list(dict.fromkeys(notes))


def _to_number(value: Any) -> Any:
    if isinstance(value, sympy.Expr):
        return int(value) if value.is_integer else float(value)
    return value


def _to_plain(quantity: Quantity) -> dict[str, Any]:
    formula = str(quantity.formula) if quantity.formula.free_symbols else None
    return {"formula": formula, "value": quantity.value if quantity.known else None}
