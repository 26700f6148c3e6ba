"""The operator: description -> plan -> backend."""

from __future__ import annotations

from regard.attention.description import Attention
from regard.attention.explanation import Explanation
from regard.attention.operator import attend, explain, weights

__all__ = ["Attention", "Explanation", "attend", "explain", "weights"]
