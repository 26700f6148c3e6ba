"""Conversion of convolutions to attention and back, for layers and whole networks."""

from regard.convert.from_conv import conv_to_attention
from regard.convert.leakage import Hardness, hardness, leak, steepness, theta
from regard.convert.low_rank import kernel_rank, low_rank_heads
from regard.convert.network import convert_network, restore_network
from regard.convert.to_conv import ConvFit, attention_to_conv, fit_conv

__all__ = [
    "ConvFit",
    "Hardness",
    "attention_to_conv",
    "conv_to_attention",
    "convert_network",
    "fit_conv",
    "hardness",
    "kernel_rank",
    "leak",
    "low_rank_heads",
    "restore_network",
    "steepness",
    "theta",
]
