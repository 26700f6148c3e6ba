"""What other people's libraries ask of numbers before they choose a way, answered where there are no numbers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from unittest.mock import patch


@contextlib.contextmanager
def not_packed() -> Iterator[None]:
    """Texts are not several texts in one row.

    Without a mask, models of transformers look at the numbers of their positions to find that out. Where there are none
    they build a mask to be safe, and attention is no longer seen to be causal.
    """
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or not hasattr(masks, "find_packed_sequence_indices"):
        yield
        return
    with patch.object(masks, "find_packed_sequence_indices", lambda *_, **__: None):
        yield
