"""Who is this? From a target to the subject that knows how to call it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from regard.errors import InputError
from regard.laws.subjects.base import Conventions, Subject
from regard.laws.subjects.calling import parameters
from regard.laws.subjects.deepcopying import deepcopy
from regard.laws.subjects.layer import Layer
from regard.laws.subjects.model import Images, Model, said_image, takes_ids
from regard.laws.subjects.operator import Operator
from regard.patterns import Causal, Window

KINDS = ("operator", "layer", "model")
CONVENTIONS = tuple(Conventions.__dataclass_fields__)
QUERIES = ("q", "query", "queries", "Q")


def read(target: Any, kind: str | None = None, name: str | None = None, **options: Any) -> Subject:
    """The subject of a target: recognised by its library, or called as the kind says.

    Options are the fields of `Conventions`, and sizes: `heads kv_heads dim value_dim` of an operator, `channels` of a
    layer, `vocabulary longest image` of a model. `window=8` says causal, and that a token sees 8 keys, itself
    among them. What a target can do is found out by trying; `gradients=False` says that it has none, `cache=` is False
    or a `Cached`, and `weights=` a function of the target, its input and its mask, which gives its weights
    `(batch, head, query, key)`.
    """
    gradients, cache, weights = (options.pop(name, None) for name in ("gradients", "cache", "weights"))
    subject = _read(target, kind, name, options)
    if gradients is False:
        subject.abilities.discard("gradients")
    if cache is not None:
        subject.caching = cache or None
        subject.abilities = subject.abilities - {"cache"} | ({"cache"} if cache else set())
    if weights is not None:
        subject.shown = weights
    return subject


def _read(target: Any, kind: str | None, name: str | None, options: dict[str, Any]) -> Subject:
    if isinstance(target, Subject):
        return target
    if kind is not None and kind not in KINDS:
        raise InputError(
            f"there is no kind {kind!r}.",
            asked=f"kind={kind!r}",
            because="a subject is an operator, a layer or a model",
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
        target = _own_copy(target)
    for recognise in adapters():
        subject = recognise(target, kind, name, options)
        if subject is not None:
            return subject
    if not callable(target):
        raise InputError(
            "this cannot be called.",
            found=f"{type(target).__name__}",
            because="a law observes what a function or module does with its input",
            instead="f(query, key, value, mask=None), f(x, mask=None), or a module",
        )
    return plain(target, kind, name, options)


def _own_copy(module: nn.Module) -> nn.Module:
    """The module as it is checked: a copy in evaluation mode, where tensors are drawn. The user's own is left alone."""
    devices = {tensor.device.type for tensor in [*module.parameters(), *module.buffers()]}
    try:
        if "meta" in devices:
            raise TypeError("its tensors are on the device meta, which holds no numbers")
        return deepcopy(module).cpu().eval()
    except Exception as failure:
        raise InputError(
            f"{type(module).__name__} cannot be copied.",
            found=f"{type(failure).__name__}: {failure}",
            because="a law runs a copy of a module, in several precisions, and leaves the module alone",
            instead="a module with numbers in it; or a function that calls it: check(lambda x: module(x), ...)",
        ) from failure


def plain(target: Any, kind: str | None, name: str, options: dict[str, Any]) -> Subject:
    """A target that nobody recognises."""
    conventions = Conventions(**{key: value for key, value in options.items() if key in CONVENTIONS})
    sizes = {key: value for key, value in options.items() if key not in CONVENTIONS}
    if (window := sizes.pop("window", None)) is not None:
        # As models count it: the keys that a token sees, itself among them.
        conventions = replace(conventions, pattern=Causal() & Window(window - 1, 0))
    kind = kind or kind_of(target)
    if kind == "operator":
        return _built(Operator, target, name, conventions, sizes)
    if kind == "layer":
        return _built(Layer, target, name, conventions, sizes)
    image = sizes.pop("image", None)
    if image is None and not takes_ids(target):
        image = said_image(target)
    if image is not None:
        return _built(Images, target, name, conventions, {**sizes, "image": image})
    try:
        return _built(Model, target, name, conventions, sizes)
    except InputError:
        if takes_ids(target):
            raise
        layer = _built(Layer, target, name, conventions, sizes)  # a model of measurements: rows of numbers in
        layer.kind = "model"
        return layer


def _built(kind: Callable[..., Subject], target: Any, name: str, conventions: Conventions, sizes: dict) -> Subject:
    known = [key for key in inspect.signature(kind).parameters if key not in ("target", "name", "conventions")]
    for key in sizes:
        if key not in known:
            raise InputError(
                f"{key!r} is no option of a {kind.__name__.lower()}.",
                asked=f"{key}={sizes[key]!r}",
                because=f"its sizes are {', '.join(known)}, its conventions {', '.join(CONVENTIONS)}",
                instead="one of these",
            )
    return kind(target, name, conventions, **sizes)


def kind_of(target: Any) -> str:
    """The kind that a stranger looks like."""
    names = [name for name, parameter in parameters(target).items() if parameter.kind.name != "VAR_KEYWORD"]
    needed = [name for name in names if parameters(target)[name].default is inspect.Parameter.empty]
    if names and (names[0] in QUERIES or len(needed) >= 3):
        return "operator"
    if takes_ids(target) or said_image(target) is not None:
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


def adapters() -> list[Callable[[Any, str | None, str, dict[str, Any]], Subject | None]]:
    """Those who recognise the modules of a library, each without importing it."""
    from regard.laws.subjects import huggingface, ours, torch_modules, vision, x_transformers

    libraries = (ours, torch_modules, huggingface, vision, x_transformers)
    return [library.recognise for library in libraries]
