"""Attention maps of torch, timm and Hugging Face modules, read by `regard.adapters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from regard.adapters import attention_readers
from regard.adapters.attention_readers import AttentionRows
from regard.adapters.huggingface_attention import record_attention
from regard.visualize.attention_map import AttentionMap, check_single


def find_reader(module: nn.Module) -> Callable[..., AttentionMap] | None:
    """The function that reads attention maps of a module of torch or timm."""
    reader = attention_readers.find_reader(module)
    return None if reader is None else lambda *call: _select_single(reader(*call))


def read_hugging_face(model: Any, inputs: tuple, keywords: dict) -> list[AttentionMap]:
    """The attention maps of a Hugging Face model."""
    return [_select_single(found) for found in record_attention(model, inputs, keywords)]


def _select_single(found: AttentionRows) -> AttentionMap:
    check_single(found.query)
    return AttentionMap(found.name, found.queries, found.keys, lambda queries: found.rows(queries)[0])
