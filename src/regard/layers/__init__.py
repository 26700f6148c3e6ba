"""Layers: multi-head attention, positions, feed-forward, blocks, patches, windows, channels and caches."""

from regard.layers.block import Block
from regard.layers.cache import CrossCache, KVCache, Memory, StateCache
from regard.layers.feedforward import FeedForward
from regard.layers.linear import Linear
from regard.layers.multihead import MultiHeadAttention
from regard.layers.positions import GridPositions, LearnedPositions, SinusoidalPositions
from regard.layers.projections import Sizes
from regard.layers.rotary import Rotary, Rotation

__all__ = [
    "Block",
    "CrossCache",
    "FeedForward",
    "GridPositions",
    "KVCache",
    "LearnedPositions",
    "Linear",
    "Memory",
    "MultiHeadAttention",
    "Rotary",
    "Rotation",
    "SinusoidalPositions",
    "Sizes",
    "StateCache",
]
