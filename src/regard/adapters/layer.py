"""A layer: `f(x, mask=None)` on `(batch, token, channel)`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters import attention_watch
from regard.adapters.base import Adapter, Conventions, Variant, first_tensor
from regard.adapters.call_signature import (
    MaskForm,
    accepted_form,
    find_switches,
    mask_name,
    parameters,
    required_arguments,
)
from regard.adapters.deepcopy import deepcopy
from regard.adapters.inferred_cache import find_cache
from regard.adapters.rng import Rng
from regard.errors import InputError

# Channels to try where the target does not say.
CHANNELS = (16, 8, 32, 64, 12, 24, 48, 4, 6, 96, 128, 256, 512, 768, 1024, 10, 20, 30, 40, 100, 3, 5, 7, 2, 1)
CHANNEL_ATTRIBUTES = (
    "embed_dim",
    "d_model",
    "dim",
    "hidden_size",
    "channels",
    "in_features",
    "width",
    "n_embd",
    "model_dim",
)
# Attributes of modules that switch between two implementations.
FLAGS = ("fused_attn", "fused", "flash", "use_flash", "use_sdpa", "sdpa", "fast", "use_fast_path", "use_flash_attn")


class SequenceAdapter(Adapter):
    """What layers and models share: one input with tokens on axis 1, perhaps a mask of tokens.

    Attributes:
        form: the form of its mask argument, or None if it takes none.
    """

    def __init__(self, target: Any, name: str, conventions: Conventions | None = None) -> None:
        super().__init__(target, name, conventions)
        self.form: MaskForm | None = None
        self.required = required_arguments(target)

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        """Whatever the target returns."""
        if mask is not None and self.form is not None:
            more[self.form.name] = self.form.give(mask)
        return self.target(x, **{**self.required, **more})

    def run(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return first_tensor(self.call(x, mask))

    def weights(self, x: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        if self.weights_function is not None:
            found = self.weights_function(self.target, x, mask)
            return [found] if isinstance(found, Tensor) else list(found)
        return attention_watch.weights(lambda: self.call(x, mask), x.shape[0], x.shape[1])

    def variants(self) -> dict[str, Variant]:
        variants: dict[str, Variant] = {}
        for name, value in find_switches(self.target).items():
            variants[f"{name}={value}"] = self._run_with_argument(name, value)
        if isinstance(self.target, nn.Module):
            for flag in FLAGS:
                if any(isinstance(getattr(part, flag, None), bool) for part in self.target.modules()):
                    variants[f"{flag} turned over"] = self._run_with_flag_flipped(flag)
        return variants

    def _run_with_argument(self, name: str, value: bool) -> Variant:
        return lambda x, mask=None: first_tensor(self.call(x, mask, **{name: value}))

    def _run_with_flag_flipped(self, flag: str) -> Variant:
        other = copy.copy(self)
        other.target = deepcopy(self.target)
        for part in other.target.modules():
            if isinstance(value := getattr(part, flag, None), bool):
                setattr(part, flag, not value)
        return other.run

    def find_abilities(self) -> None:
        """Find out by calling: the form of the mask, whether outputs have tokens, whether there is a cache."""
        x = self.draw(2, self.lengths(5)[0], Rng(0, "abilities"))
        output = self.run(x)
        if output.ndim >= 3 and output.shape[:2] == x.shape[:2]:
            self.abilities.add("aligned")
        if x.is_floating_point():
            self.abilities.add("float")
        if self.max_length is None or self.max_length > self.min_length:
            self.abilities.add("lengths")
        self.abilities.add("gradients")
        argument = mask_name(self.target)
        if argument is not None and self.form is None:
            try:
                self.form = accepted_form(lambda form: self._try_form(form, x), argument, self.conventions.mask)
            except Exception as reason:  # a parameter of that name, but not for a mask of tokens
                self.form = None
                if argument in parameters(self.target):
                    words = f"{type(reason).__name__}: {(str(reason).strip().splitlines() or [''])[0]}"
                    self.missing["mask"] = (
                        f"it has an argument {argument!r}, but refuses a mask (batch, token): {words}"
                    )
        if self.form is not None:
            self.abilities.add("mask")
        if self.caching is None:
            self.caching = find_cache(self)
        if self.caching is not None:
            self.abilities.add("cache")

    def _try_form(self, form: MaskForm, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
        mask[-1, -1] = False
        self.form = form
        try:
            return self.run(x, mask)
        finally:
            self.form = None

    def _rebind(self, original: Adapter) -> None:
        if (bind := getattr(self.caching, "bound_to", None)) is not None:
            self.caching = bind(self)


class LayerAdapter(SequenceAdapter):
    """Rows of numbers in, rows of numbers out."""

    kind = "layer"

    def __init__(
        self, target: Any, name: str, conventions: Conventions | None = None, *, channels: int | None = None
    ) -> None:
        super().__init__(target, name, conventions)
        self._channels = self._find_channels(channels)
        self.find_abilities()

    @property
    def channels(self) -> int:
        return self._channels

    def draw(self, batch: int, tokens: int, rng: Rng) -> Tensor:
        return rng.normal(batch, tokens, self._channels, dtype=self.dtype)

    def call(self, x: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        if self.conventions.layout == "tokens":
            return self._in_columns(super().call(x.transpose(0, 1), mask, **more))
        return super().call(x, mask, **more)

    @staticmethod
    def _in_columns(output: Any) -> Any:
        if isinstance(output, tuple):
            return (first_tensor(output).transpose(0, 1), *output[1:])
        return first_tensor(output).transpose(0, 1)

    def _find_channels(self, given: int | None) -> int:
        if given is not None and type(self) is not LayerAdapter:
            return given  # set by the adapter of a known class
        failure: Exception | None = None
        wanted = [given] if given is not None else [*find_channels(self.target), *CHANNELS]
        for channels in dict.fromkeys(wanted):
            try:
                x = Rng(0, "channels").normal(2, 5, channels, dtype=self.dtype)
                first_tensor(self.call(x))
                return channels
            except Exception as reason:  # any error is a refusal of this size
                failure = failure or reason
        raise InputError(
            f"{self.name} does not run as a layer.",
            asked=f"f(x) with x of (2, 5, {'channels), channels in ' if given is None else ''}{given or CHANNELS[:6]}"
            + (")" if given is not None else ""),
            found=f"{type(failure).__name__}: {failure}",
            because="it has to be called before it can be checked",
            instead='channels= if its width is unusual; kind="operator" or kind="model" if it takes something else;\n'
            "a function if it needs more: check(lambda x, mask=None: layer(x, context, mask), ...)",
        ) from failure


def find_channels(target: Any) -> list[int]:
    """Widths that a target mentions: in its attributes, in its first matrix, in what a function closes over."""
    found: list[int] = []
    holders = [target, getattr(target, "__self__", None), getattr(target, "func", None)]
    holders += [cell.cell_contents for cell in getattr(target, "__closure__", None) or () if _is_filled(cell)]
    for holder in holders:
        for name in CHANNEL_ATTRIBUTES:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                found.append(value)
        if isinstance(holder, nn.Module):
            for part in holder.modules():
                found += [size for size in (getattr(part, "in_features", None),) if isinstance(size, int)]
            found += [parameter.shape[-1] for parameter in holder.parameters() if parameter.ndim > 1]
        if isinstance(holder, Tensor) and holder.ndim:
            found += [holder.shape[0], holder.shape[-1]]
    return list(dict.fromkeys(found))


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
