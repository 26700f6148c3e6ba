"""Attention by position alone, one axis of a grid after the other: the words a layer needs, in one place."""

from __future__ import annotations

from regard.biases import axis_scores, distances, table_scores
from regard.calculus import axis_weights, separable_attention, separable_weights

__all__ = ["axis_scores", "axis_weights", "distances", "separable_attention", "separable_weights", "table_scores"]
