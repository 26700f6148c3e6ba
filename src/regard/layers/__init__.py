"""Layers: multi-head attention, positions, feed-forward, blocks, patches, windows, channels and caches."""

from regard.layers.block import TransformerBlock
from regard.layers.cache import CrossCache, KVCache, ModelCache, StateCache
from regard.layers.channels import ChannelAttention
from regard.layers.feedforward import FeedForward
from regard.layers.grid import GridAttention
from regard.layers.incremental import IncrementalAttention
from regard.layers.lattice import Lattice
from regard.layers.linear import Linear, forget_weights, pack_weights, use_huge_pages
from regard.layers.multihead import MultiHeadAttention
from regard.layers.patches import PatchEmbedding
from regard.layers.positions import GridPositions, LearnedPositions, SinusoidalPositions
from regard.layers.profiles import HeadProfile, head_profile, head_profiles
from regard.layers.projections import AttentionSizes
from regard.layers.rotary import Rotary, Rotation
from regard.layers.spatial import SpatialAttention
from regard.layers.tables import TableAttention
from regard.layers.windows import WindowAttention

__all__ = [
    "AttentionSizes",
    "ChannelAttention",
    "CrossCache",
    "FeedForward",
    "GridAttention",
    "GridPositions",
    "HeadProfile",
    "IncrementalAttention",
    "KVCache",
    "Lattice",
    "LearnedPositions",
    "Linear",
    "ModelCache",
    "MultiHeadAttention",
    "PatchEmbedding",
    "Rotary",
    "Rotation",
    "SinusoidalPositions",
    "SpatialAttention",
    "StateCache",
    "TableAttention",
    "TransformerBlock",
    "WindowAttention",
    "forget_weights",
    "head_profile",
    "head_profiles",
    "pack_weights",
    "use_huge_pages",
]
