"""Attention of sequences that are cut over several processes (context parallelism), by torch.distributed."""

from __future__ import annotations

from regard.distributed.context_parallel import context_parallel, ring_attend
from regard.distributed.messages import Traffic, count_traffic
from regard.distributed.sequence_layout import SequenceLayout

__all__ = ["SequenceLayout", "Traffic", "context_parallel", "count_traffic", "ring_attend"]
