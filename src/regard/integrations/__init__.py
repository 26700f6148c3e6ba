"""Attention of Regard in the models of other libraries: Hugging Face, timm, torch, x-transformers.

Nothing here imports another library than torch before a model of that library is given.
"""

from __future__ import annotations

from regard.integrations.accelerate import Accelerated, accelerate
from regard.integrations.attention_layers import find_attention_layers
from regard.integrations.sdpa_mode import sdpa
from regard.integrations.use import Used, restore, use

__all__ = ["Accelerated", "Used", "accelerate", "find_attention_layers", "restore", "sdpa", "use"]
