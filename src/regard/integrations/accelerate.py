"""Faster inference of a model that exists, on the CPU: its attention, linear layers and generation by our kernels.

report = regard.accelerate(model, weights="int8")
print(report)
report.restore()
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.override import Override
from regard.errors import InputError
from regard.integrations.attention_layers import find_attention_layers, reads_table
from regard.integrations.generation import WeightVersions, convert_decoder, generate_like_huggingface
from regard.integrations.overridden_layers import install, uninstall
from regard.integrations.probe import make_probe, make_token_probe, run_probe
from regard.integrations.use import list_implementations
from regard.kernels.library import missing
from regard.kernels.quantized import QuantizedTensor
from regard.layers.linear import MIN_WEIGHTS, Linear
from regard.layers.modes import eval_mode
from regard.models import GPT
from regard.render.table import Column, Table

FORMATS = {"float32": None, "bf16": "bf16", "int8": "q8_0"}
BYTES = {"float32": 4.0, "bf16": 2.0, "int8": 34 / 32}
# The largest difference from the outputs before, relative to the largest of them: rounding in float32, a mantissa of
# 8 bits, and blocks of 8 bits whose activations are rounded as well.
BOUNDS = {"float32": 1e-4, "bf16": 3e-2, "int8": 6e-2}


@dataclass
class Change:
    """One row of the report."""

    modules: str
    count: int
    now: str
    why: str
    expected: str


@dataclass(eq=False)
class Accelerated:
    """What `accelerate` changed: printed as a table, and undone by `restore`.

    Attributes:
        model: the model, changed in place.
        changes: what was replaced, and what was left as it is.
        difference: of the outputs on the probe batch, relative to the largest output before.
        bound: the largest difference that is accepted.
    """

    model: nn.Module
    weights: str
    bound: float
    difference: float = 0.0
    changes: list[Change] = field(default_factory=list)
    _undo: list[Callable[[], object]] = field(default_factory=list, repr=False)

    def restore(self) -> nn.Module:
        """Undo everything, and what later calls of `accelerate` changed in the same model; returns the model."""
        active = _active.get(self.model, [])
        while self in active:
            last = active.pop()
            while last._undo:
                last._undo.pop()()
        return self.model

    def __str__(self) -> str:
        rows = [(c.modules, str(c.count), c.now, c.why, c.expected) for c in self.changes]
        table = Table([Column(name) for name in ("modules", "count", "now", "why", "expected")], rows)
        compared = f"outputs on the probe batch differ by {self.difference:.1e} of the largest, bound {self.bound:.0e}"
        return f"{table}\n{compared}"


# What is accelerated now, the latest last. Not kept on the model: copies of the model have reports of no one.
_active: weakref.WeakKeyDictionary[nn.Module, list[Accelerated]] = weakref.WeakKeyDictionary()


def accelerate(
    model: nn.Module,
    weights: str = "float32",
    *,
    training: bool = False,
    example: dict[str, Any] | Tensor | None = None,
) -> Accelerated:
    """Replace attention and linear layers by our kernels where they are faster, and check that outputs stay the same.

    weights: "float32" keeps them; "bf16" and "int8" round the matrices of linear layers, which decoding reads once a
        token: half, and about a quarter of the bytes.
    training: replace what has gradients alone, which is attention.
    example: inputs for the comparison, by name or one tensor; needed where they cannot be made up for the model.

    GPT-2, Llama, Mistral and Qwen2 of Hugging Face also get `generate` by one native call for each token, for greedy
    decoding; other options of `generate` run as before, and so does all of it once weights have changed. The model is
    changed in place; `restore()` of the result undoes it. If outputs differ beyond the bound, everything is undone and
    an error says by how much. A model with rounded weights takes no gradients, and is saved after `restore()`.
    """
    _check(model, weights, training)
    probe = make_probe(model, example)
    with eval_mode(model):
        before = run_probe(model, probe)
    report = Accelerated(model, weights, BOUNDS[weights])
    _active.setdefault(model, []).append(report)
    try:
        decoder, reason = (None, "") if training else convert_decoder(model, weights)
        if decoder is not None:  # `generate` does not run the model, so it is compared by itself
            ids = make_token_probe(model)
            with eval_mode(model):
                report.difference = _measure_difference(run_probe(decoder, ids), run_probe(model, ids))
        _replace_attention(report)
        if not training:
            _replace_linear(report)
            _replace_generation(report, decoder, reason)
        if weights != "float32":
            _freeze(report)
        with eval_mode(model):
            report.difference = max(report.difference, _measure_difference(run_probe(model, probe), before))
    except BaseException:
        report.restore()
        raise
    if not report.difference <= report.bound:
        names = [change.modules for change in report.changes]
        report.restore()
        raise InputError(
            "The outputs changed too much; the model is as it was.",
            asked=f"regard.accelerate({type(model).__name__}, weights={weights!r})",
            found=f"a difference of {report.difference:.1e} of the largest output, after replacing {', '.join(names)}",
            because=f"the bound of {weights} is {report.bound:.0e}",
            instead='weights="float32"' if weights != "float32" else "regard.use or attn_implementation alone",
        )
    return report


def _measure_difference(after: Tensor, before: Tensor) -> float:
    return float((after - before).abs().max() / before.abs().max().clamp_min(1e-30))


def _check(model: nn.Module, weights: str, training: bool) -> None:
    if weights not in FORMATS:
        raise InputError(
            "There are no such weights.",
            asked=f"weights={weights!r}",
            because=f"known are {', '.join(FORMATS)}",
            instead='weights="int8"',
        )
    if training and weights != "float32":
        raise InputError(
            "Rounded weights cannot be trained.",
            asked=f"weights={weights!r}, training=True",
            because="a step of training is far smaller than the steps that they can hold",
            instead='weights="float32" for training, "int8" afterwards',
        )
    found = {(p.device.type, p.dtype) for p in model.parameters() if p.is_floating_point()}
    if any(device != "cpu" or dtype != torch.float32 for device, dtype in found):
        raise InputError(
            "The kernels are for the CPU and float32.",
            asked=f"regard.accelerate({type(model).__name__})",
            found=", ".join(sorted(f"{dtype} on {device}" for device, dtype in found)),
            because="they read float32 weights in the memory of the CPU, and round them if asked",
            instead='model.float().to("cpu")',
        )
    if (reason := missing()) is not None:
        raise InputError(
            "The kernels are missing.",
            asked=f"regard.accelerate({type(model).__name__})",
            because=reason,
            instead="pip install regard on a machine with a C++ compiler",
        )


def _replace_attention(report: Accelerated) -> None:
    model: Any = report.model
    layers = find_attention_layers(model)
    listed = {name: layer for name, layer in layers.items() if reads_table(layer)}
    if listed and hasattr(model, "set_attn_implementation"):
        import regard.integrations.transformers  # noqa: F401  registers it

        before = list_implementations(model)
        model.set_attn_implementation("regard")
        report._undo.append(lambda: model.set_attn_implementation(before))
        _add(report, listed, "regard", "masks are patterns: hidden pairs are not computed", "less time for long inputs")
    others = {name: layer for name, layer in layers.items() if name not in listed}
    others = {name: layer for name, layer in others.items() if not isinstance(layer, nn.MultiheadAttention)}
    unchanged = Override()
    for name, layer in others.items():
        install(name, layer, unchanged)
        report._undo.append(functools.partial(uninstall, layer, unchanged))
    if others:
        _add(
            report, others, "regard.sdpa", "its scaled_dot_product_attention is attend", "1.1 to 1.5 times sdpa's speed"
        )


def _replace_linear(report: Accelerated) -> None:
    chosen: dict[str, Any] = {}
    small: dict[str, nn.Module] = {}
    format = FORMATS[report.weights]
    made: dict[int, tuple[Tensor, nn.Parameter]] = {}
    for name, module in report.model.named_modules():
        if type(module) is not nn.Linear:
            continue
        if module.weight.numel() < MIN_WEIGHTS // 4:
            small[name] = module
            continue
        chosen[name] = module
        module.__class__ = Linear
        report._undo.append(functools.partial(setattr, module, "__class__", nn.Linear))
        if format is not None:
            weight: Any = module.weight
            if id(weight) not in made:
                made[id(weight)] = weight, nn.Parameter(QuantizedTensor.quantize(weight, format), requires_grad=False)
            module._parameters["weight"] = made[id(weight)][1]
            report._undo.append(functools.partial(module._parameters.__setitem__, "weight", weight))
    if chosen:
        read = sum(module.weight.numel() for module in chosen.values())
        expected = f"{read * BYTES[report.weights] / 1e6:.0f} MB a token, {read * 4 / 1e6:.0f} before"
        why = "few rows are bound by memory, many fill the registers"
        _add(report, chosen, f"regard {report.weights}", why, expected)
    if small:
        _add(report, small, "as before", "the weights stay in the CPU caches, where torch is as fast", "no change")


def _replace_generation(report: Accelerated, decoder: GPT | None, reason: str) -> None:
    model: Any = report.model
    if decoder is None:
        if reason:
            report.changes.append(Change("generate", 1, "as before", reason, "no change"))
        return
    model.__dict__["generate"] = functools.partial(generate_like_huggingface, model, decoder, WeightVersions(model))
    report._undo.append(lambda: model.__dict__.pop("generate", None))
    why = "the architecture is known exactly; greedy tokens by one native call each"
    size = sum(parameter.numel() for parameter in decoder.parameters())
    expected = f"{size * BYTES[report.weights] / 1e6:.0f} MB read a token, {size * 4 / 1e6:.0f} before"
    report.changes.append(Change("generate", 1, "regard.models.GPT", why, expected))


def _freeze(report: Accelerated) -> None:
    """No parameter asks for gradients, which rounded weights could not pass on, and none is saved."""
    for parameter in report.model.parameters():
        if parameter.requires_grad:
            parameter.requires_grad_(False)
            report._undo.append(functools.partial(parameter.requires_grad_, True))
    if hasattr(report.model, "save_pretrained"):
        report.model.__dict__["save_pretrained"] = functools.partial(_refuse_saving, type(report.model).__name__)
        report._undo.append(lambda: report.model.__dict__.pop("save_pretrained", None))


def _refuse_saving(name: str, *args: Any, **kwargs: Any) -> None:
    raise InputError(
        "A model with rounded weights is not saved.",
        asked=f"{name}.save_pretrained(...) after regard.accelerate",
        because="a checkpoint holds the weights as they were before they were rounded",
        instead="report.restore() first, and regard.accelerate again afterwards",
    )


def _add(report: Accelerated, modules: dict[str, nn.Module], now: str, why: str, expected: str) -> None:
    kinds = sorted({type(module).__name__ for module in modules.values()})
    report.changes.append(Change(", ".join(kinds), len(modules), now, why, expected))
