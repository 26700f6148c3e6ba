"""Layers: multi-head attention, positions, feed-forward, blocks, patches, windows, channels and caches."""

from regard.layers.block import Block
from regard.layers.cache import CrossCache, KVCache, Memory, StateCache
from regard.layers.channels import ChannelAttention
from regard.layers.feedforward import FeedForward
from regard.layers.gaze import Gaze, gaze, gazes
from regard.layers.grid import GridAttention
from regard.layers.lattice import Lattice
from regard.layers.linear import Linear, settle
from regard.layers.multihead import MultiHeadAttention
from regard.layers.patches import PatchEmbedding
from regard.layers.positions import GridPositions, LearnedPositions, SinusoidalPositions
from regard.layers.projections import Sizes
from regard.layers.rotary import Rotary, Rotation
from regard.layers.running import RunningAttention
from regard.layers.spatial import SpatialAttention
from regard.layers.tables import TableAttention
from regard.layers.windows import WindowAttention

__all__ = [
    "Block",
    "ChannelAttention",
    "CrossCache",
    "FeedForward",
    "Gaze",
    "GridAttention",
    "GridPositions",
    "KVCache",
    "Lattice",
    "LearnedPositions",
    "Linear",
    "Memory",
    "MultiHeadAttention",
    "PatchEmbedding",
    "Rotary",
    "Rotation",
    "RunningAttention",
    "SinusoidalPositions",
    "Sizes",
    "SpatialAttention",
    "StateCache",
    "TableAttention",
    "WindowAttention",
    "gaze",
    "gazes",
    "settle",
]
