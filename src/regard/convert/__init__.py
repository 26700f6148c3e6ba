"""Conversion of convolutions to attention and back, for layers and whole networks."""

from regard.convert.from_conv import conv_to_attention
from regard.convert.minimal import few_heads, kernel_rank
from regard.convert.network import convert_network, restore_network
from regard.convert.to_conv import Fit, attention_to_conv, fit_conv
from regard.convert.width import Hardness, hardness, leak, steepness, theta

__all__ = [
    "Fit",
    "Hardness",
    "attention_to_conv",
    "conv_to_attention",
    "convert_network",
    "few_heads",
    "fit_conv",
    "hardness",
    "kernel_rank",
    "leak",
    "restore_network",
    "steepness",
    "theta",
]
