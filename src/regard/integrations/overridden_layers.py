"""Changes of single layers: installed, run and undone, in any order.

A layer keeps a list of overrides, of which the newest with a pattern, a bias or a scale counts. With the first one the
layer gets another `forward` (or a check that it uses our attention), with the last one it gets its own back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from regard.adapters.override import ATTRIBUTE, Override, find_override
from regard.errors import InputError
from regard.integrations.attention_layers import reads_table
from regard.integrations.multihead import run_multihead
from regard.integrations.sdpa_mode import sdpa

SWITCHED = "_regard_switched"  # on a module: attributes that had other values, or hooks that are ours
OWN_FORWARD = "forward"


def install(name: str, module: nn.Module, override: Override) -> None:
    """Let a layer compute its attention by Regard, with this override."""
    overrides = module.__dict__.setdefault(ATTRIBUTE, [])
    overrides.append(override)
    if len(overrides) > 1:
        return
    switched = module.__dict__.setdefault(SWITCHED, {})
    if reads_table(module):
        switched["hook"] = module.register_forward_pre_hook(_check_implementation)
        return
    before = module.__dict__.get(OWN_FORWARD)  # patched by someone else
    if before is not None:
        switched[OWN_FORWARD] = before
    if isinstance(module, nn.MultiheadAttention):
        module.__dict__[OWN_FORWARD] = functools.partial(_run_multihead, module, before)
        # nn.TransformerEncoderLayer runs a fused layer of its own in eval mode, unless a part of it has a hook.
        switched["hook"] = module.register_forward_pre_hook(_do_nothing)
        return
    if getattr(module, "fused_attn", True) is False:
        switch(module, "fused_attn", True)  # timm: the path through torch's function
    module.__dict__[OWN_FORWARD] = functools.partial(run_layer, name, module, before)


def uninstall(module: nn.Module, override: Override) -> None:
    """Take back one override; without any other the layer is as it was."""
    overrides = module.__dict__.get(ATTRIBUTE, [])
    overrides[:] = [other for other in overrides if other is not override]
    if not overrides and module.__dict__.pop(ATTRIBUTE, None) is not None:
        if not reads_table(module):
            module.__dict__.pop(OWN_FORWARD, None)
        switch_back(module)


def uninstall_changes(module: nn.Module) -> None:
    """Take back all overrides that change what the layer computes."""
    for override in list(module.__dict__.get(ATTRIBUTE, ())):
        if not override.is_empty:
            uninstall(module, override)


def switch(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute, if the module has it, until `switch_back`."""
    if hasattr(module, name):
        module.__dict__.setdefault(SWITCHED, {}).setdefault(name, getattr(module, name))
        setattr(module, name, value)


def switch_back(module: nn.Module) -> None:
    for name, value in module.__dict__.pop(SWITCHED, {}).items():
        if name == "hook":
            value.remove()
        elif name == OWN_FORWARD:
            module.__dict__[name] = value
        else:
            setattr(module, name, value)


def run_layer(name: str, module: nn.Module, before: Callable | None, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer whose `scaled_dot_product_attention` is ours."""
    override = find_override(module)
    with sdpa(override) as mode:
        output = type(module).forward(module, *args, **kwargs) if before is None else before(*args, **kwargs)
    if override is not None and not mode.calls:
        raise InputError(
            f"The layer {name} does not call scaled_dot_product_attention.",
            asked="regard.use on a " + type(module).__name__,
            because="its attention is computed by operations that cannot be told from others",
            instead=f"layers= without {name}, or an option of the layer that uses torch's function "
            "(fused_attn in timm, attn_flash=True in x-transformers)",
        )
    return output


def _run_multihead(module: nn.MultiheadAttention, before: Callable | None, *args: Any, **kwargs: Any) -> Any:
    override = find_override(module)
    if override is None:
        return nn.MultiheadAttention.forward(module, *args, **kwargs) if before is None else before(*args, **kwargs)
    return run_multihead(module, override, *args, **kwargs)


def _check_implementation(module: Any, args: tuple) -> None:
    """Before a layer of Hugging Face runs: another implementation would not know of the override."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", "regard")
    if name != "regard" and find_override(module) is not None:
        raise InputError(
            "The attention of this model was set to another implementation.",
            asked=f"regard.use on a {type(module).__name__}",
            found=f"_attn_implementation={name!r} in its configuration",
            because="only our own attention knows of the pattern, bias or scale of the layer",
            instead="regard.restore(model) before model.set_attn_implementation(...)",
        )


def _do_nothing(module: nn.Module, args: tuple) -> None:
    return None
