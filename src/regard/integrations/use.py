"""Another pattern, bias or scale in the attention layers of a model that exists.

with regard.use(model, pattern=Causal() & Window(512, 0) | First(4)):
    model(x)

regard.use(model, pattern=Window(256, 256), layers=range(0, 12, 2))
regard.restore(model)
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from regard.biases.base import Bias
from regard.errors import InputError
from regard.integrations.override import ATTRIBUTE, Override
from regard.integrations.multihead import run_multihead
from regard.integrations.sdpa_mode import sdpa
from regard.patterns import Pattern

Layers = None | int | str | Iterable[Any] | Callable[[str, nn.Module], bool]

BEFORE = "_regard_attention_before"  # on a model of Hugging Face: the implementations of its configurations
SWITCHED = "_regard_switched"  # on a module: attributes that had other values, or hooks that are ours
# Parts of names by which libraries tell attention over other tokens, or over channels.
CROSS = ("cross", "encoder_attn", "encdec", "channel", "memory_attn", "multihead_attn")


class Used:
    """What `regard.use` changed; leaving it as a context undoes it.

    Attributes:
        model: the model.
        layers: the names of the changed layers.
    """

    def __init__(self, model: nn.Module, layers: list[str]) -> None:
        self.model, self.layers = model, layers

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(self, *_: object) -> None:
        restore(self.model)

    def __repr__(self) -> str:
        shown = ", ".join(self.layers[:3]) + (", …" if len(self.layers) > 3 else "")
        return f"Used({type(self.model).__name__}: {len(self.layers)} attention layers: {shown})"


def use(
    model: nn.Module,
    *,
    pattern: Pattern | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    layers: Layers = None,
    replace_mask: bool = False,
) -> Used:
    """Change the self-attention of a model: who sees whom, what is added to the scores, and their scale.

    Works with models of Hugging Face that read the library's table of attentions, with timm, `nn.MultiheadAttention`
    and all that contains it, x-transformers, and any layer that calls torch's `scaled_dot_product_attention`.

    pattern: joins the mask of the model: both have to allow a pair, so that padding stays hidden and a decoder stays
        causal. Positions count from the first token of the row.
    bias: a bias or a tensor that is added to the scores.
    scale: replaces the scale of the scores.
    layers: which attention layers: their numbers in order, a name with `*`, several of these, or a function
        `(name, module) -> bool`. By default all self-attention; cross- and channel attention are left alone.
    replace_mask: let the pattern replace the mask of the model; in Hugging Face padding stays hidden.

    The change stays until the returned value is left as a context, or until `regard.restore(model)`. Several calls for
    different layers add up; for one layer the last one counts.
    """
    if pattern is None and bias is None and scale is None:
        raise InputError(
            "Nothing was asked for.",
            asked="regard.use(model)",
            because="without a pattern, a bias or a scale the model stays as it is",
            instead="pattern=Window(256, 256), say; regard.accelerate(model) makes a model faster without a change",
        )
    override = Override(pattern, bias, scale, replace_mask)
    found = find_attention_layers(model)
    chosen = _select(found, layers)
    if not chosen:
        raise InputError(
            f"{type(model).__name__} has no such attention layer.",
            asked=f"regard.use(..., layers={layers!r})",
            found=", ".join(found) or "no module that is known as attention",
            because="layers are chosen among the attention layers that were found",
            instead="layers=lambda name, module: ... to name the modules themselves",
        )
    if any(reads_table(module) for module in chosen.values()):
        _switch_implementation(model)
    for name, module in chosen.items():
        _install(model, name, module, override)
    if any(isinstance(module, nn.MultiheadAttention) for module in chosen.values()):
        for part in model.modules():
            if isinstance(part, nn.TransformerEncoder):  # nested tensors have no patterns
                switch(part, "enable_nested_tensor", False)
                switch(part, "use_nested_tensor", False)
    return Used(model, list(chosen))


def restore(model: nn.Module) -> None:
    """Undo every `regard.use` of a model."""
    for module in model.modules():
        if ATTRIBUTE in module.__dict__ or SWITCHED in module.__dict__:
            restore_layer(module)
        before = module.__dict__.pop(BEFORE, None)
        if before is not None:
            module.set_attn_implementation(before)  # type: ignore[operator]


def restore_layer(module: nn.Module) -> None:
    """Undo what was changed in one module."""
    module.__dict__.pop(ATTRIBUTE, None)
    module.__dict__.pop("forward", None)
    for name, value in module.__dict__.pop(SWITCHED, {}).items():
        if name == "hook":
            value.remove()
        else:
            setattr(module, name, value)


def find_attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that compute attention, by name, in the order of the model."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if is_attention(module) and not any(_is_inside(name, outer) for outer in found):
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
    return type(module).__name__.lower().endswith(("attention", "attentionrope", "attn")) and bool(
        list(module.children())
    )


def _is_inside(name: str, outer: str) -> bool:
    return name.startswith(f"{outer}.")


@functools.cache
def _reads_table_of(kind: type) -> bool:
    """Whether the code of a class of transformers looks up its attention in the table of the library."""
    names = getattr(getattr(kind.forward, "__wrapped__", kind.forward), "__code__", None)
    return names is not None and "ALL_ATTENTION_FUNCTIONS" in names.co_names


def reads_table(module: nn.Module) -> bool:
    """Whether a layer of Hugging Face looks up its attention in the table of the library."""
    return type(module).__module__.startswith("transformers.") and _reads_table_of(type(module))


def _select(found: dict[str, nn.Module], layers: Layers) -> dict[str, nn.Module]:
    if callable(layers):
        return {name: module for name, module in found.items() if layers(name, module)}
    own = {name: module for name, module in found.items() if not _is_cross(name, module)}
    if layers is None:
        return own
    wanted = [layers] if isinstance(layers, int | str) else list(layers)
    chosen = {}
    for index, (name, module) in enumerate(own.items()):
        numbers = [number % len(own) for number in wanted if isinstance(number, int) and -len(own) <= number < len(own)]
        if index in numbers or any(isinstance(text, str) and fnmatch.fnmatch(name, text) for text in wanted):
            chosen[name] = module
    for name, module in found.items():  # cross-attention, if it is named
        if name not in own and any(isinstance(text, str) and fnmatch.fnmatch(name, text) for text in wanted):
            chosen[name] = module
    return chosen


def _is_cross(name: str, module: nn.Module) -> bool:
    text = f"{name} {type(module).__name__}".lower().replace("_", "")
    return bool(getattr(module, "is_cross_attention", False)) or any(mark.replace("_", "") in text for mark in CROSS)


def _switch_implementation(model: Any) -> None:
    """Let a model of Hugging Face use our attention, and remember which one it used."""
    import regard.integrations.transformers  # noqa: F401  registers it

    owner = (
        model
        if hasattr(model, "set_attn_implementation")
        else next((part for part in model.modules() if hasattr(part, "set_attn_implementation")), None)
    )
    if owner is None:
        raise InputError(
            "This layer has no model around it.",
            asked=f"regard.use({type(model).__name__})",
            because="layers of Hugging Face look up their attention in the configuration of their model",
            instead="regard.use(model) with the whole model",
        )
    if BEFORE not in owner.__dict__:
        before = list_implementations(owner)
        owner.set_attn_implementation("regard")
        owner.__dict__[BEFORE] = before


def list_implementations(model: Any) -> str | dict[str, Any]:
    """What `set_attn_implementation` takes to bring back the present implementations."""
    inner = {
        name: getattr(model.config, name)._attn_implementation
        for name in getattr(model.config, "sub_configs", {})
        if getattr(model.config, name, None) is not None
    }
    own = model.config._attn_implementation
    return {"": own, **inner} if inner else own


def _install(model: nn.Module, name: str, module: nn.Module, override: Override) -> None:
    module.__dict__[ATTRIBUTE] = override
    if reads_table(module):
        return
    if isinstance(module, nn.MultiheadAttention):
        module.__dict__["forward"] = functools.partial(run_multihead, module, override)
        # nn.TransformerEncoderLayer runs a fused layer of its own in eval mode, unless a part of it has a hook.
        switched = module.__dict__.setdefault(SWITCHED, {})
        if "hook" not in switched:
            switched["hook"] = module.register_forward_pre_hook(_do_nothing)
        return
    if getattr(module, "fused_attn", True) is False:
        switch(module, "fused_attn", True)  # timm: the path through torch's function
    module.__dict__["forward"] = functools.partial(run_layer, name, module, override)


def switch(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute until `restore`."""
    if hasattr(module, name):
        module.__dict__.setdefault(SWITCHED, {}).setdefault(name, getattr(module, name))
        setattr(module, name, value)


def _do_nothing(module: nn.Module, args: tuple) -> None:
    return None


def run_layer(
    name: str, module: nn.Module, override: Override, *args: Any, must_call: bool = True, **kwargs: Any
) -> Any:
    """The forward of a layer whose `scaled_dot_product_attention` is ours."""
    with sdpa(override) as mode:
        output = type(module).forward(module, *args, **kwargs)
    if must_call and not mode.calls:
        raise InputError(
            f"The layer {name} does not call scaled_dot_product_attention.",
            asked="regard.use on a " + type(module).__name__,
            because="its attention is computed by operations that cannot be told from others",
            instead=f"layers= without {name}, or an option of the layer that uses torch's function "
            "(fused_attn in timm, attn_flash=True in x-transformers)",
        )
    return output
