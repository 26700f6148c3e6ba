"""Another pattern, bias or scale in the attention layers of a model that exists.

with regard.use(model, pattern=Causal() & Window(512, 0) | First(4)):
    model(x)

regard.use(model, pattern=Window(256, 256), layers=range(0, 12, 2))
regard.restore(model)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard.adapters.override import ATTRIBUTE, Override, find_override
from regard.biases.base import Bias
from regard.errors import InputError
from regard.integrations.attention_layers import (
    Layers,
    find_attention_layers,
    reads_table,
    refuse_choice,
    refuse_model,
    select_layers,
)
from regard.integrations.overridden_layers import SWITCHED, install, switch, switch_back, uninstall, uninstall_changes
from regard.patterns import Pattern

BEFORE = "_regard_attention_before"  # on a model of Hugging Face: the implementations of its configurations


class Used:
    """What one call of `regard.use` changed; leaving it as a context undoes it, and no other call.

    Attributes:
        model: the model.
        layers: the names of the changed layers.
    """

    def __init__(self, model: nn.Module, chosen: dict[str, nn.Module], override: Override) -> None:
        self.model, self.layers = model, list(chosen)
        self._modules, self._override = list(chosen.values()), override

    def __enter__(self) -> nn.Module:
        return self.model

    def __exit__(self, *_: object) -> None:
        for module in self._modules:
            uninstall(module, self._override)
        _switch_back(self.model)

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
    different layers add up; for one layer the last one counts, and once it is undone the one before. All threads see
    the change. With gradient checkpointing, backward belongs inside the context as well: it runs the layers again.
    """
    _check_arguments(model, pattern, bias, scale)
    override = Override(pattern, bias, scale, replace_mask)
    found = find_attention_layers(model)
    if not found:
        raise refuse_model(model)
    chosen = select_layers(found, layers)
    if not chosen:
        raise refuse_choice(found, layers)
    if any(reads_table(module) for module in chosen.values()):
        _switch_implementation(model)
    for name, module in chosen.items():
        install(name, module, override)
    if any(isinstance(module, nn.MultiheadAttention) for module in chosen.values()):
        for part in model.modules():
            if isinstance(part, nn.TransformerEncoder):  # nested tensors have no patterns
                switch(part, "enable_nested_tensor", False)
                switch(part, "use_nested_tensor", False)
    return Used(model, chosen, override)


def restore(model: nn.Module) -> None:
    """Undo every `regard.use` of a model."""
    for module in model.modules():
        uninstall_changes(module)
    _switch_back(model)


def _check_arguments(model: Any, pattern: Any, bias: Any, scale: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{type(model).__name__} is not a module.",
            asked=f"regard.use({type(model).__name__}, ...)",
            because="attention layers are found among the submodules of a torch.nn.Module",
            instead="regard.use(model, ...) with the model itself",
        )
    if pattern is None and bias is None and scale is None:
        raise InputError(
            "Nothing was asked for.",
            asked="regard.use(model)",
            because="without a pattern, a bias or a scale the model stays as it is",
            instead="pattern=Window(256, 256), say; regard.accelerate(model) makes a model faster without a change",
        )
    kinds: list[tuple[str, Any, Any, str]] = [
        ("pattern", pattern, Pattern, "pattern=Window(256, 256), or Mask(tensor) for a tensor of booleans"),
        ("bias", bias, Bias | Tensor, "bias=Alibi(heads), or a tensor of floating-point scores"),
        ("scale", scale, int | float, "scale=0.125"),
    ]
    for name, value, kind, instead in kinds:
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise InputError(
                f"This is no {name}.",
                asked=f"regard.use(..., {name}=...) of type {type(value).__name__}",
                because=f"the layers were to compute with it as their {name}",
                instead=instead,
            )


def _switch_back(model: nn.Module) -> None:
    """Undo what belongs to no single layer, where no layer needs it any more."""
    for module in model.modules():
        if SWITCHED in module.__dict__ and not any(ATTRIBUTE in part.__dict__ for part in module.modules()):
            switch_back(module)
        if BEFORE in module.__dict__ and all(find_override(part) is None for part in module.modules()):
            module.set_attn_implementation(module.__dict__.pop(BEFORE))  # type: ignore[operator]


def _switch_implementation(model: Any) -> None:
    """Let a model of Hugging Face use our attention, and remember which one it used."""
    import regard.integrations.transformers  # noqa: F401  registers it

    owner = next((part for part in model.modules() if hasattr(part, "set_attn_implementation")), None)
    if owner is None:
        raise InputError(
            "This layer has no model around it.",
            asked=f"regard.use({type(model).__name__})",
            because="layers of Hugging Face look up their attention in the configuration of their model",
            instead="regard.use(model) with the whole model",
        )
    if BEFORE not in owner.__dict__:
        owner.__dict__[BEFORE] = list_implementations(owner)
    owner.set_attn_implementation("regard")


def list_implementations(model: Any) -> str | dict[str, Any]:
    """What `set_attn_implementation` takes to bring back the present implementations."""
    inner = {
        name: getattr(model.config, name)._attn_implementation
        for name in getattr(model.config, "sub_configs", {})
        if getattr(model.config, name, None) is not None
    }
    own = model.config._attn_implementation
    return {"": own, **inner} if inner else own
