"""Precision is the operator's business: autocast must not lower the products inside a softmax."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocasting(device: torch.device) -> bool:
    """Whether autocast is on for this kind of device; some, as `meta`, have none."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def full_precision(device: torch.device) -> AbstractContextManager:
    """What is computed inside keeps the precision of its tensors."""
    return torch.autocast(device.type, enabled=False) if autocasting(device) else nullcontext()
