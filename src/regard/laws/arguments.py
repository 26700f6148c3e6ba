"""The tensors that a target is given, and whether it left them as they were."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.adapters.base import Adapter
from regard.laws.law import Observation, expect_equal


@dataclass(frozen=True)
class Argument:
    """A tensor that a call was given, and a copy of it from before the call."""

    name: str
    tensor: Tensor
    before: Tensor


@contextmanager
def record_arguments(subject: Adapter) -> Iterator[list[Argument]]:
    """Every tensor that the subject's target is given while this lasts.

    A mask is converted to the form that the target takes, which may be another tensor than the law's own.
    """
    found: list[Argument] = []

    def record(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {**{f"argument {place}": value for place, value in enumerate(args)}, **kwargs}
        for name, value in named.items():
            if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter):
                found.append(Argument(name, value, value.detach().clone()))

    target = subject.target
    if isinstance(target, nn.Module):
        with _record_forward(target, record):
            yield found
        return

    @functools.wraps(target, updated=())
    def recording(*args: Any, **kwargs: Any) -> Any:
        record(args, kwargs)
        return target(*args, **kwargs)

    subject.target = recording
    try:
        yield found
    finally:
        subject.target = target


@contextmanager
def _record_forward(module: nn.Module, record: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Record the arguments of a module's calls without a hook: torch's fused encoder layers are not used beside one."""
    own, forward = vars(module).get("forward"), module.forward

    @functools.wraps(forward, updated=())
    def recording(*args: Any, **kwargs: Any) -> Any:
        record(args, kwargs)
        return forward(*args, **kwargs)

    try:
        module.forward = recording
    except Exception:  # a scripted or exported module lets nothing be set
        hook = module.register_forward_pre_hook(lambda _, args, kwargs: record(args, kwargs), with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
        return
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def expect_unwritten(arguments: list[Argument]) -> Iterator[Observation]:
    """What a call was given is as it was."""
    for each in arguments:
        before, now = each.before, each.tensor.detach()
        same = before.shape == now.shape and torch.equal(before.nan_to_num(), now.nan_to_num())
        if not same or before.isnan().any():
            yield expect_equal(
                before.double(), now.double(), changed="nothing; the call itself", output=each.name, exact=True
            )


def expect_unchanged(given: dict[str, Tensor], before: list[Tensor]) -> Iterator[Observation]:
    """What a call was given is as it was."""
    for (name, now), kept in zip(given.items(), before, strict=True):
        yield expect_equal(
            kept.double(), now.detach().double(), changed="nothing; the call itself", output=name, exact=True
        )
