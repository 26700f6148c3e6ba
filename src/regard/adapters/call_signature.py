"""Reading a call signature: which argument is the mask, in which form, and which arguments only choose a variant."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MASKS = (
    "mask",
    "attn_mask",
    "attention_mask",
    "padding_mask",
    "pad_mask",
    "key_mask",
    "token_mask",
    "key_padding_mask",
    "src_key_padding_mask",
)
# torch's names for masks in which True hides.
TRUE_HIDES = ("key_padding_mask", "src_key_padding_mask")
# Arguments of a call that switch between two implementations.
SWITCHES = (
    "need_weights",
    "return_weights",
    "return_attention",
    "output_attentions",
    "return_attn",
    "fused",
    "fast",
    "flash",
    "use_flash",
    "use_sdpa",
    "use_fast_path",
)


def parameters(target: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a call; empty where Python cannot tell."""
    target = getattr(target, "_orig_mod", target)  # what torch.compile wraps
    call: Callable = target.forward if isinstance(target, nn.Module) else target
    try:
        return dict(inspect.signature(call).parameters)
    except (TypeError, ValueError):
        return {}


def mask_name(target: Any) -> str | None:
    """The name of the argument that takes a mask, or None."""
    names = parameters(target)
    for name in MASKS:
        if name in names:
            return name
    named = next((name for name in names if "mask" in name), None)
    if named is None and any(each.kind is inspect.Parameter.VAR_KEYWORD for each in names.values()):
        return MASKS[0]  # any keyword is accepted, so this one is tried
    return named


def find_switches(target: Any) -> dict[str, bool]:
    """Arguments of the call that only choose how to compute, and the value that is not their default."""
    found = {}
    for name, parameter in parameters(target).items():
        if name in SWITCHES and (isinstance(parameter.default, bool) or parameter.default is None):
            found[name] = not parameter.default
    return found


def required_arguments(target: Any) -> dict[str, Any]:
    """Arguments beside the input that a call cannot do without, with what means "nothing yet": no mask, no past."""
    found: dict[str, Any] = {}
    for name, parameter in list(parameters(target).items())[1:]:
        named = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if not named or parameter.default is not inspect.Parameter.empty:
            continue
        if "mask" in name or "cache" in name or "past" in name or name == "state":
            found[name] = None
        elif name in ("start_pos", "offset", "position", "pos", "position_offset"):
            found[name] = 0
    return found


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is True for what may be seen, as numbers to add to scores."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)


@dataclass(frozen=True)
class MaskForm:
    """How a mask that is True for what may be seen is handed over."""

    name: str
    hide: bool = False
    dtype: torch.dtype = torch.bool
    additive: bool = False
    # A mask of tokens given as one of keys: (batch, 1, 1, key) instead of (batch, token).
    broadcast: bool = False

    def give(self, mask: Tensor) -> Tensor:
        if self.broadcast and mask.ndim == 2:
            mask = mask[:, None, None, :]
        if self.additive:
            return additive(mask, self.dtype)
        mask = ~mask if self.hide else mask
        return mask if self.dtype == torch.bool else mask.to(self.dtype)


def accepted_form(call: Callable[[MaskForm], object], name: str, meaning: str) -> MaskForm:
    """The first form of mask with which a call succeeds: boolean, then 0 and 1; then the same over keys."""
    failure: Exception | None = None
    hide = meaning == "hide" or name in TRUE_HIDES
    if meaning == "additive":
        forms = [MaskForm(name, dtype=torch.float32, additive=True, broadcast=keys) for keys in (False, True)]
    else:
        dtypes = (torch.bool, torch.long, torch.float32)
        forms = [MaskForm(name, hide, dtype, broadcast=keys) for keys in (False, True) for dtype in dtypes]
    for form in forms:
        try:
            call(form)
            return form
        except Exception as reason:  # any error means that another form is wanted
            failure = failure or reason
    raise failure or RuntimeError("no form of mask was accepted")
