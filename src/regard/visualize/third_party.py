"""Attentions of other libraries, read by `regard.adapters`, one text or image at a time."""

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
    return None if reader is None else lambda *call: _single(reader(*call))


def read_hugging_face(model: Any, inputs: tuple, words: dict) -> list[AttentionMap]:
    """Every attention of a model of transformers."""
    return [_single(found) for found in record_attention(model, inputs, words)]


def _single(found: AttentionRows) -> AttentionMap:
    check_single(found.query)
    return AttentionMap(found.name, found.queries, found.keys, lambda queries: found.rows(queries)[0])
