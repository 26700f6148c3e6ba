"""Autocast: the products inside a softmax keep the dtype of their tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def is_autocast_enabled(device: torch.device) -> bool:
    """Whether autocast is on for this device type; some types, such as `meta`, have none."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def disable_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which operations keep the dtype of their tensors."""
    return torch.autocast(device.type, enabled=False) if is_autocast_enabled(device) else nullcontext()
