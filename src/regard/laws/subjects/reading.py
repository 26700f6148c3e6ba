"""Who is this? From a target to the subject that knows how to call it."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from regard.errors import InputError
from regard.laws.subjects.base import Conventions, Subject
from regard.laws.subjects.calling import parameters
from regard.laws.subjects.layer import Layer
from regard.laws.subjects.model import Images, Model, said_image, takes_ids
from regard.laws.subjects.operator import Operator

KINDS = ("operator", "layer", "model")
CONVENTIONS = tuple(Conventions.__dataclass_fields__)
QUERIES = ("q", "query", "queries", "Q")


def read(target: Any, kind: str | None = None, name: str | None = None, **options: Any) -> Subject:
    """The subject of a target: recognised by its library, or called as the kind says.

    Options are the fields of `Conventions`, and sizes: `heads kv_heads dim value_dim` of an operator, `channels` of a
    layer, `vocabulary longest image` of a model.
    """
    if isinstance(target, Subject):
        return target
    if kind is not None and kind not in KINDS:
        raise InputError(
            f"there is no kind {kind!r}.",
            because="a subject is an operator, a layer or a model",
            instead=" or ".join(f'kind="{each}"' for each in KINDS),
        )
    if not callable(target):
        raise InputError(
            "this cannot be called.",
            found=f"{type(target).__name__}",
            because="a law observes what a function or module does with its input",
            instead="f(query, key, value, mask=None), f(x, mask=None), or a module",
        )
    if inspect.isclass(target):
        raise InputError(
            f"{target.__name__} is a class.",
            because="a law observes an instance, whose sizes are fixed",
            instead=f"check({target.__name__}(...)) with sizes of your choice",
        )
    name = name or name_of(target)
    if isinstance(target, nn.Module):
        try:
            target = copy.deepcopy(target)  # nothing that is done here touches the user's own
        except Exception:  # some modules hold what cannot be copied; then theirs is used, and put back as it was
            pass
        target.eval()
    for recognise in adapters():
        subject = recognise(target, kind, name, options)
        if subject is not None:
            return subject
    return plain(target, kind, name, options)


def plain(target: Any, kind: str | None, name: str, options: dict[str, Any]) -> Subject:
    """A target that nobody recognises."""
    conventions = Conventions(**{key: value for key, value in options.items() if key in CONVENTIONS})
    sizes = {key: value for key, value in options.items() if key not in CONVENTIONS}
    kind = kind or kind_of(target)
    if kind == "operator":
        return _built(Operator, target, name, conventions, sizes)
    if kind == "layer":
        return _built(Layer, target, name, conventions, sizes)
    image = sizes.pop("image", None)
    if image is None and not takes_ids(target):
        image = said_image(target)
    if image is not None:
        return Images(target, name, conventions, image=image)
    return _built(Model, target, name, conventions, sizes)


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
    return []
