"""The attention layers of a model of any library, and a choice of them."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from regard.errors import InputError

Layers = None | int | str | Iterable[Any] | Callable[[str, nn.Module], bool]

# Parts of names by which libraries tell attention over other tokens, or over channels.
CROSS = ("cross", "encoder_attn", "encdec", "channel", "memory_attn", "multihead_attn")


def find_attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that compute attention, by name, in the order of the model."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if is_attention(module) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name or type(module).__name__] = module
    return found


def is_attention(module: nn.Module) -> bool:
    """Whether a module is known to compute one attention."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    library = type(module).__module__.split(".")[0]
    if library == "transformers":
        return _reads_table_of(type(module))
    if library == "x_transformers":
        return type(module).__name__ == "Attend"
    named = type(module).__name__.lower().endswith(("attention", "attentionrope", "attn"))
    return named and bool(list(module.children()))


def reads_table(module: nn.Module) -> bool:
    """Whether a layer of Hugging Face looks up its attention in the table of the library."""
    return type(module).__module__.startswith("transformers.") and _reads_table_of(type(module))


@functools.cache
def _reads_table_of(kind: type) -> bool:
    """Whether the code of a class of transformers looks up its attention in the table of the library."""
    names = getattr(getattr(kind.forward, "__wrapped__", kind.forward), "__code__", None)
    return names is not None and "ALL_ATTENTION_FUNCTIONS" in names.co_names


def select_layers(found: dict[str, nn.Module], layers: Layers) -> dict[str, nn.Module]:
    """The layers that `layers` of `regard.use` names; cross-attention only by its own name."""
    if callable(layers):
        return {name: module for name, module in found.items() if layers(name, module)}
    own = {name: module for name, module in found.items() if not _is_cross(name, module)}
    if layers is None:
        return own
    wanted = [layers] if isinstance(layers, int | str) else list(layers) if isinstance(layers, Iterable) else [layers]
    names = list(own)
    chosen: set[str] = set()
    for choice in wanted:
        if isinstance(choice, str):
            matching = set(fnmatch.filter(found, choice))
        elif isinstance(choice, int) and not isinstance(choice, bool) and -len(names) <= choice < len(names):
            matching = {names[choice]}
        else:
            matching = set()
        if not matching:
            raise refuse_choice(found, choice)
        chosen |= matching
    return {name: module for name, module in found.items() if name in chosen}


def refuse_model(model: nn.Module) -> InputError:
    """The error for a model without any attention layer that could be changed."""
    kinds = sorted({type(part).__name__ for part in model.modules() if "att" in type(part).__name__.lower()})
    return InputError(
        f"{type(model).__name__} has no attention layer that can be changed.",
        asked=f"an attention layer of {type(model).__name__}",
        found=", ".join(kinds) + ", which compute attention by operations of their own"
        if kinds
        else "no module that is known as attention",
        because="changed are layers that read the table of attentions of transformers or call torch's "
        "scaled_dot_product_attention",
        instead="another model (docs/architectures.md lists those of transformers), or regard.attend in the layer",
    )


def refuse_choice(found: dict[str, nn.Module], choice: object) -> InputError:
    """The error for a choice of layers that chooses none."""
    names = list(found)
    more = f", … ({len(names)} in all)" if len(names) > 8 else ""
    return InputError(
        "The model has no such attention layer.",
        asked=f"layers={choice!r}",
        found=", ".join(names[:8]) + more if names else "no module that is known as attention",
        because="a layer is chosen by its number among the self-attention layers, or by its name, where * is any text",
        instead="layers=lambda name, module: ... to choose by the modules themselves",
    )


def _is_cross(name: str, module: nn.Module) -> bool:
    text = f"{name} {type(module).__name__}".lower().replace("_", "")
    return bool(getattr(module, "is_cross_attention", False)) or any(mark.replace("_", "") in text for mark in CROSS)
