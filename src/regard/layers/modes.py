"""A model in eval mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(model: object) -> Iterator[None]:
    """The model in eval mode; afterwards every submodule is in the mode it was in. What is no module is left alone."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    training = [module.training for module in modules]
    if not any(training):
        yield
        return
    try:
        modules[0].eval()
        yield
    finally:
        modules[0].train(training[0])  # a module may do more than set the flag
        for module, mode in zip(modules, training, strict=True):
            module.training = mode
