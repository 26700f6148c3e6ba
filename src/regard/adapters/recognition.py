"""`adapt`: select the adapter of a target."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from regard.adapters.base import Adapter, Conventions
from regard.adapters.call_signature import parameters
from regard.adapters.deepcopy import deepcopy
from regard.adapters.layer import LayerAdapter
from regard.adapters.model import ImageModelAdapter, ModelAdapter, find_image_size, takes_ids
from regard.adapters.operator import OperatorAdapter
from regard.errors import InputError
from regard.patterns import Causal, Window

KINDS = ("operator", "layer", "model")
CONVENTIONS = tuple(Conventions.__dataclass_fields__)
# Adapters of libraries whose claims are documented; those of the others are inferred from their classes.
DOCUMENTED = ("regard.adapters.regard_layers", "regard.adapters.torch_nn")
QUERIES = ("q", "query", "queries", "Q")


def adapt(target: Any, kind: str | None = None, name: str | None = None, **options: Any) -> Adapter:
    """The adapter of a target: recognised by its library, or called according to `kind`.

    Options are the fields of `Conventions`, and sizes: `heads kv_heads dim value_dim` of an operator, `channels` of a
    layer, `vocab_size max_length image_size` of a model. `window=8` means causal, and a token attends to 8 keys,
    itself included. What a target can do is found out by trying; `gradients=False` means that it has none, `cache=` is
    False or a `Cached`, and `weights=` a function of the target, its input and its mask, which gives its weights
    `(batch, head, query, key)`.
    """
    gradients, cache, weights = (options.pop(name, None) for name in ("gradients", "cache", "weights"))
    try:
        adapter = _adapt_target(target, kind, name, options)
    except InputError:
        # Some modules refuse to run with gradients enabled, as FlexAttention does on the CPU.
        if not isinstance(target, nn.Module) or not any(each.requires_grad for each in target.parameters()):
            raise
        try:
            adapter = _adapt_target(
                _copy_for_check(target).requires_grad_(False), kind, name or name_of(target), options
            )
        except InputError:
            adapter = None
        if adapter is None:
            raise
        adapter.missing["gradients"] = "it refuses to run where a parameter requires a gradient"
        gradients = False
    if gradients is False:
        adapter.abilities.discard("gradients")
    if cache is not None:
        adapter.caching = cache or None
        adapter.abilities = adapter.abilities - {"cache"} | ({"cache"} if cache else set())
    if weights is not None:
        adapter.weights_function = weights
    return adapter


def _adapt_target(target: Any, kind: str | None, name: str | None, options: dict[str, Any]) -> Adapter:
    if isinstance(target, Adapter):
        return target
    if kind is not None and kind not in KINDS:
        raise InputError(
            f"there is no kind {kind!r}.",
            asked=f"kind={kind!r}",
            because="a target is an operator, a layer or a model",
            instead=" or ".join(f'kind="{each}"' for each in KINDS),
        )
    if inspect.isclass(target):
        raise InputError(
            f"{target.__name__} is a class.",
            found=f"{target.__module__}.{target.__qualname__}",
            because="a law observes an instance, whose sizes are fixed",
            instead=f"check({target.__name__}(...)) with sizes of your choice",
        )
    name = name or name_of(target)
    if isinstance(target, nn.Module):
        target = _copy_for_check(target)
    for recognise in adapters():
        adapter = recognise(target, kind, name, options)
        if adapter is not None:
            for part in (adapter, *adapter.parts):
                part.documented = bool(part.claims) and recognise.__module__ in DOCUMENTED
            return adapter
    if not callable(target):
        raise InputError(
            "this cannot be called.",
            found=f"{type(target).__name__}",
            because="a law observes what a function or module does with its input",
            instead="f(query, key, value, mask=None), f(x, mask=None), or a module",
        )
    return adapt_unknown(target, kind, name, options)


def _copy_for_check(module: nn.Module) -> nn.Module:
    """The module as it is checked: a copy in evaluation mode, where tensors are drawn. The user's own is left alone."""
    devices = {tensor.device.type for tensor in [*module.parameters(), *module.buffers()]}
    try:
        if "meta" in devices:
            raise TypeError("its tensors are on the device meta, which holds no data")
        return deepcopy(module).cpu().eval()
    except Exception as failure:
        raise InputError(
            f"{type(module).__name__} cannot be copied.",
            found=f"{type(failure).__name__}: {failure}",
            because="a law runs a copy of a module, in several precisions, and leaves the module alone",
            instead="a module with numbers in it; or a function that calls it: check(lambda x: module(x), ...)",
        ) from failure


def adapt_unknown(target: Any, kind: str | None, name: str, options: dict[str, Any]) -> Adapter:
    """The adapter of a target of unknown origin."""
    conventions = Conventions(**{key: value for key, value in options.items() if key in CONVENTIONS})
    sizes = {key: value for key, value in options.items() if key not in CONVENTIONS}
    if (window := sizes.pop("window", None)) is not None:
        # As models count it: the keys that a token sees, itself among them.
        conventions = replace(conventions, pattern=Causal() & Window(window - 1, 0))
    kind = kind or kind_of(target)
    if kind == "operator":
        return _build_adapter(OperatorAdapter, target, name, conventions, sizes)
    if kind == "layer":
        return _build_adapter(LayerAdapter, target, name, conventions, sizes)
    image = sizes.pop("image_size", None)
    if image is None and not takes_ids(target):
        image = find_image_size(target)
    if image is not None:
        return _build_adapter(ImageModelAdapter, target, name, conventions, {**sizes, "image_size": image})
    try:
        return _build_adapter(ModelAdapter, target, name, conventions, sizes)
    except InputError:
        if takes_ids(target):
            raise
        layer = _build_adapter(
            LayerAdapter, target, name, conventions, sizes
        )  # a model of measurements: rows of numbers in
        layer.kind = "model"
        return layer


def _build_adapter(kind: type[Adapter], target: Any, name: str, conventions: Conventions, sizes: dict) -> Adapter:
    known = [key for key in inspect.signature(kind).parameters if key not in ("target", "name", "conventions")]
    for key in sizes:
        if key not in known:
            raise InputError(
                f"Unknown option {key!r} for kind {kind.kind!r}.",
                asked=f"{key}={sizes[key]!r}",
                because=f"its sizes are {', '.join(known)}, its conventions {', '.join(CONVENTIONS)}",
                instead="one of these",
            )
    return kind(target, name, conventions, **sizes)


def kind_of(target: Any) -> str:
    """Operator, layer or model, inferred from the call signature and the parts."""
    names = [name for name, parameter in parameters(target).items() if parameter.kind.name != "VAR_KEYWORD"]
    needed = [name for name in names if parameters(target)[name].default is inspect.Parameter.empty]
    if names and (names[0] in QUERIES or len(needed) >= 3):
        return "operator"
    if takes_ids(target) or find_image_size(target) is not None:
        return "model"
    return "layer"


def name_of(target: Any) -> str:
    """What a report calls a target."""
    if isinstance(target, nn.Module):
        sizes = {
            key: value
            for key, value in vars(target).items()
            if isinstance(value, int) and not key.startswith("_") and key != "training" and not isinstance(value, bool)
        }
        shown = ", ".join(f"{key}={value}" for key, value in list(sizes.items())[:4])
        return f"{type(target).__name__}({shown})"
    if isinstance(target, functools.partial):
        return f"partial({name_of(target.func)})"
    return getattr(target, "__qualname__", type(target).__name__).removeprefix("<locals>.")


def adapters() -> list[Callable[[Any, str | None, str, dict[str, Any]], Adapter | None]]:
    """The functions that recognise the modules of a library, each without importing it."""
    from regard.adapters import huggingface, regard_layers, timm_torchvision, torch_nn, x_transformers

    libraries = (regard_layers, torch_nn, huggingface, timm_torchvision, x_transformers)
    return [library.recognise for library in libraries]
