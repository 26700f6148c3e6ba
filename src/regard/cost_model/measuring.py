"""The measured time of a target, beside its lower bound.

A target is run as it is, with random inputs of the given sizes: forward and decoding without gradients,
backward by `torch.autograd.grad`, which leaves no gradient in the parameters. Everything runs in evaluation
mode, as costs are counted without dropout; afterwards every module is in the mode it was in, and the random numbers of
the program go on where they were.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.fake_copies import TracedTarget
from regard.attention import Attention, attend
from regard.backends.linear_attention import step as linear_step
from regard.cost_model.api import cost
from regard.cost_model.machine import Machine
from regard.cost_model.roofline import Prediction, duration, predict
from regard.cost_model.run_mode import STEPS
from regard.cost_model.sizes import Sizes
from regard.cost_model.trace.inputs import make_example_inputs
from regard.errors import CostError
from regard.layers import KVCache, MultiHeadAttention, PatchEmbedding, StateCache, TransformerBlock
from regard.layers.modes import eval_mode
from regard.models import GPT, Transformer

WARM_UP = 2
FEWEST, MOST = 3, 10_000  # runs, however long or short they are

# What happens before each run without being timed, and the run itself, which is given what came of it.
Trial = tuple[Callable[[], Any], Callable[[Any], Any]]


@dataclass(frozen=True)
class Measured:
    """Seconds of many runs: the median, the two quartiles, and how many runs there were."""

    median: float
    low: float
    high: float
    repeats: int

    @property
    def spread(self) -> float:
        """The distance of the quartiles, as a part of the median."""
        return (self.high - self.low) / self.median

    def __str__(self) -> str:
        runs = f"{self.repeats} runs"
        return f"{duration(self.median)}, half of {runs} between {duration(self.low)} and {duration(self.high)}"


@dataclass(frozen=True)
class Comparison:
    """Predicted beside measured."""

    predicted: Prediction
    measured: Measured

    @property
    def ratio(self) -> float:
        """How many times the lower bound it took."""
        return self.measured.median / self.predicted.seconds

    @property
    def flops_per_second(self) -> float:
        """Operations a second that were reached."""
        return self.predicted.total.flops / self.measured.median

    @property
    def bytes_per_second(self) -> float:
        """Bytes a second, if every part moved what was counted."""
        return self.predicted.total.bytes / self.measured.median

    def __str__(self) -> str:
        return (
            f"{self.predicted.name}\n"
            f"  predicted  at least {duration(self.predicted.seconds)}, waiting for {self.predicted.bound}\n"
            f"  measured   {self.measured}\n"
            f"  ratio      {self.ratio:.2f} times the lower bound: {self.flops_per_second / 1e9:.3g} GFLOP/s,"
            f" {self.bytes_per_second / 1e9:.3g} GB/s"
        )


def measure(
    target: Attention | nn.Module | Callable[..., Any],
    *,
    step: str = "forward",
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    seconds: float = 2.0,
    **sizes: Any,
) -> Measured:
    """Run a description, a layer, a model or any module whose input can be inferred, for about so many seconds.

        >>> from regard import Attention, Causal
        >>> from regard.cost_model.measuring import measure
        >>> measure(Attention(pattern=Causal()), tokens=16, dim=8, seconds=0.01).repeats >= 3
        True

    Args:
        step: `"forward"`, `"backward"`, `"training"` for both, or `"decode"`: one token after `tokens` cached ones.
        backend: of a description, as in `attend`; layers choose their own.
        dtype: of a description's inputs; a module is run in its own numbers.
        seconds: for the runs; preparing and warming up come on top. There are three runs at least.
        sizes: as in `cost`.
    """
    with _isolated(target):
        prepare, run = _prepare_trial(target, step, backend, dtype, Sizes(**sizes))
        for _ in range(WARM_UP):
            run(prepare())
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < FEWEST or (time.perf_counter() - begin < seconds and len(times) < MOST):
            prepared = prepare()
            _synchronize(target)
            start = time.perf_counter()
            run(prepared)
            _synchronize(target)
            times.append(time.perf_counter() - start)
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Measured(median, low, high, len(times))


def compare(
    target: Attention | nn.Module | Callable[..., Any],
    *,
    machine: Machine | None = None,
    step: str = "forward",
    backend: str | None = None,
    dtype: torch.dtype | None = None,
    seconds: float = 2.0,
    **sizes: Any,
) -> Comparison:
    """The lower bound of a target's cost, and what it takes here.

    `backend` is whose work is counted, as in `cost`, and what a description runs on. `None` counts what the mathematics
    needs, scores that go to memory and come back among it; `"native"` counts what our kernel computes, whose scores
    never leave the processor.
    """
    predicted = predict(cost(target, step=step, backend=backend, dtype=dtype, **sizes), machine)
    measured = measure(target, step=step, backend=backend or "auto", dtype=dtype, seconds=seconds, **sizes)
    return Comparison(predicted, measured)


# The target stays what it was


@contextlib.contextmanager
def _isolated(target: Any) -> Iterator[None]:
    """Evaluation mode and random numbers of our own, until the end of the block."""
    module = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    mode = eval_mode(module) if isinstance(module, nn.Module) else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), mode:
        torch.manual_seed(0)
        yield


def _synchronize(target: Any) -> None:
    """Wait for a device that works on while Python goes ahead."""
    if isinstance(target, nn.Module) and _find_device(target).type != "cpu":
        torch.accelerator.synchronize()


def _find_device(target: Any) -> torch.device:
    first = next(target.parameters(), None) if isinstance(target, nn.Module) else None
    return torch.device("cpu") if first is None else first.device


# What is run


def _prepare_trial(target: Any, step: str, backend: str, dtype: torch.dtype | None, sizes: Sizes) -> Trial:
    if step not in STEPS:
        raise CostError(
            f"There is no step {step!r}.",
            asked=f"step={step!r}",
            because=f"what runs is {', '.join(STEPS)}",
            instead='step="forward"',
        )
    if isinstance(target, Attention):
        call, inputs = _prepare_description(target, step, backend, dtype or torch.float32, sizes)
        return _make_trial(call, inputs, [], step)
    if step == "decode":
        return _prepare_decode(target, sizes)
    args, kwargs = _make_arguments(target, dtype, sizes)
    learned = [each for each in target.parameters() if each.requires_grad] if isinstance(target, nn.Module) else []
    return _make_trial(lambda *inputs: target(*inputs, **kwargs), args, learned, step, kwargs)


def _make_trial(
    call: Callable, args: tuple, learned: list, step: str, kwargs: Mapping[str, Any] | None = None
) -> Trial:
    if step in ("forward", "decode"):

        def forward(_: None) -> Any:
            with torch.no_grad():
                return call(*args)

        return lambda: None, forward
    learned = [*learned, *(each for each in _list_tensors((args, dict(kwargs or {}))) if each.requires_grad)]

    def outputs() -> list[Tensor]:
        with torch.enable_grad():
            return [each for each in _list_tensors(call(*args)) if each.requires_grad]

    def back(made: list[Tensor]) -> Any:
        return torch.autograd.grad(made, learned, [torch.ones_like(each) for each in made], allow_unused=True)

    if not learned or not outputs():
        raise CostError(
            "There is no backward pass.",
            asked=f"step={step!r}",
            because="neither the parameters nor the inputs require gradients",
            instead='step="forward", or parameters with requires_grad=True',
        )
    return (outputs, back) if step == "backward" else (lambda: None, lambda _: back(outputs()))


def _prepare_description(
    target: Attention, step: str, backend: str, dtype: torch.dtype, sizes: Sizes
) -> tuple[Callable, tuple]:
    """Queries, keys and values for a description, which has no sizes of its own."""
    if sizes.tokens is None or sizes.dim is None:
        raise _missing_size("tokens" if sizes.tokens is None else "dim", "measure(Attention(...), tokens=512, dim=64)")
    heads, keys = sizes.heads or 1, sizes.keys or sizes.tokens
    queries, keys = (1, keys + 1) if step == "decode" else (sizes.tokens, keys)
    kv_heads, learns = sizes.kv_heads or heads, step in ("backward", "training")

    def tensor(count: int, tokens: int, dim: int) -> Tensor:
        return torch.randn(sizes.batch, count, tokens, dim, dtype=dtype, device="cpu").requires_grad_(learns)

    value_dim = sizes.value_dim or sizes.dim
    query, key, value = (
        tensor(heads, queries, sizes.dim),
        tensor(kv_heads, keys, sizes.dim),
        tensor(kv_heads, keys, value_dim),
    )
    if step == "decode" and target.feature_map is not None:  # a sum of the past instead of the past
        words = {"feature_map": target.feature_map, "scale": target.scale}
        with torch.no_grad():
            _, state = linear_step(query, key[:, :, :1], value[:, :, :1], **words)
        return lambda q, k, v: linear_step(q, k, v, state, **words), (query, key[:, :, -1:], value[:, :, -1:])
    return lambda q, k, v: attend(q, k, v, target, backend=backend), (query, key, value)


def _make_arguments(target: Any, dtype: torch.dtype | None, sizes: Sizes) -> tuple[tuple, dict[str, Any]]:
    """Inputs of a module: random numbers, and random tokens where the module says how many there are."""
    own = next((each.dtype for each in _list_float_parameters(target)), dtype or torch.float32)
    if dtype not in (None, own):
        raise CostError(
            "A module is measured as it is.",
            asked=f"dtype={dtype}",
            found=f"parameters of {own}",
            because="other numbers would need a copy of it",
            instead=f"measure(module.to({dtype}), ...), or no dtype",
        )
    given = sizes.inputs
    if given is not None and all(isinstance(each, Tensor) for each in _list_leaves(given)):
        if isinstance(given, Mapping):
            return (), dict(given)
        return (given,) if isinstance(given, Tensor) else tuple(given), {}
    if given is None and isinstance(target, PatchEmbedding):
        if sizes.image is None:
            raise _missing_size("image", "measure(layer, image=(224, 224))")
        sizes = dataclasses.replace(sizes, inputs=(sizes.batch, target.channels, *sizes.image))
    inputs = make_example_inputs(TracedTarget(target, own), sizes)
    unknown = [symbol for symbol in inputs.symbols if symbol not in inputs.known]
    if unknown:
        words = {"N": "tokens", "M": "keys", "T": "context_tokens", "R": "image", "W": "image"}
        raise _missing_size(words.get(unknown[0], unknown[0]), "the size as a keyword, as in cost(...)")
    args, kwargs = inputs.make(inputs.sizes, own)
    device, vocab_size = _find_device(target), getattr(target, "vocab_size", None)
    made: dict[int, Tensor] = {}

    def filled(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: filled(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(filled(each) for each in value)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in made:
            plain = value.detach()
            if plain.is_floating_point():
                plain.normal_()
            elif isinstance(vocab_size, int):
                plain.random_(vocab_size)
            made[id(value)] = plain.to(device).requires_grad_(value.requires_grad)
        return made[id(value)]

    return filled(args), filled(kwargs)


def _list_float_parameters(target: Any) -> Iterator[Tensor]:
    return (
        (each for each in target.parameters() if each.is_floating_point())
        if isinstance(target, nn.Module)
        else iter(())
    )


def _missing_size(name: str, instead: str) -> CostError:
    return CostError(
        f"The size {name} is not given.",
        asked="to run it",
        because="a formula can keep a symbol, but a run needs numbers",
        instead=instead,
    )


# One token more


@torch.no_grad()
def _prepare_decode(target: Any, sizes: Sizes) -> Trial:
    """A step after `tokens` others. Each run gets caches of its own; they share storage, of which it writes the end."""
    if sizes.tokens is None:
        raise _missing_size("tokens", 'measure(model, step="decode", tokens=512), with as many tokens in the cache')
    rows, past = sizes.batch, sizes.tokens
    if isinstance(target, GPT):
        caches = target.new_cache(past + 1)
        for block, cache in zip(target.blocks, caches.layers, strict=True):
            _fill_cache(cache, block.attention, rows, past)
        return _fork_caches(caches, lambda mine: target.decode_step(_make_tokens(target, rows, 1), mine))
    if isinstance(target, Transformer):
        if sizes.context_tokens is None:
            raise _missing_size("context_tokens", 'measure(model, step="decode", tokens=64, context_tokens=64)')
        _, caches = target.prefill(_make_tokens(target, rows, sizes.context_tokens), capacity=past)
        if past > 1:  # the first token has been read already
            target.decode(_make_tokens(target, rows, past - 1), None, cache=caches)
        return _fork_caches(caches, lambda mine: target.decode_step(_make_tokens(target, rows, 1), mine))
    layer = target.attention if isinstance(target, TransformerBlock) else target
    if isinstance(layer, MultiHeadAttention) and getattr(target, "cross", None) is None:
        cache = layer.new_cache(past + 1)
        _fill_cache(cache, layer, rows, past)
        x = torch.randn(rows, 1, layer.sizes.input, dtype=layer.output.weight.dtype, device=_find_device(layer))
        return lambda: copy.copy(cache), torch.no_grad()(lambda mine: target(x, cache=mine))
    raise CostError(
        f"A {type(target).__name__} has no decoding step.",
        asked='step="decode"',
        because="that needs a cache, which GPT, Transformer, TransformerBlock and MultiHeadAttention have",
        instead='step="forward", with tokens=1',
    )


def _make_tokens(model: Any, rows: int, count: int) -> Tensor:
    return torch.randint(model.vocab_size, (rows, count), device=_find_device(model))


def _fill_cache(cache: KVCache | StateCache, layer: MultiHeadAttention, rows: int, past: int) -> None:
    """Random keys and values: as long as real ones, and there at once."""
    sizes, dtype, device = layer.sizes, layer.output.weight.dtype, _find_device(layer)

    def tensor(heads: int, tokens: int, dim: int) -> Tensor:
        return torch.randn(rows, heads, tokens, dim, dtype=dtype, device=device)

    if isinstance(cache, KVCache):
        cache.append(tensor(sizes.kv_heads, past, sizes.key), tensor(sizes.kv_heads, past, sizes.value))
    else:
        layer(torch.randn(rows, past, sizes.input, dtype=dtype, device=device), cache=cache)


def _fork_caches(caches: Any, run: Callable[[Any], Any]) -> Trial:
    def fork() -> Any:
        mine = copy.copy(caches)
        mine.layers = [copy.copy(cache) for cache in caches.layers]
        return mine

    return fork, torch.no_grad()(run)


# What is in arguments and results


def _list_leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for each in value.values() for leaf in _list_leaves(each)]
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in _list_leaves(each)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [leaf for each in dataclasses.fields(value) for leaf in _list_leaves(getattr(value, each.name))]
    return [value]


def _list_tensors(value: Any) -> list[Tensor]:
    """Each tensor once."""
    return list({id(each): each for each in _list_leaves(value) if isinstance(each, Tensor)}.values())
