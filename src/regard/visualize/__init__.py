"""Pictures of attention: maps on images and texts, positions of heads during training, effective kernels.

`show` draws everything; the other functions draw one kind of picture each. They need matplotlib: `pip install
"regard[show]"`. `Page` is a self-contained HTML page; `make_explorer` and `make_player` return figures for it.
"""

from regard.render.page import Page
from regard.visualize.animation import Animation, animate_heads
from regard.visualize.attention_map import AttentionMap, attention_maps
from regard.visualize.dispatch import show
from regard.visualize.explorer import ExplorerModel, make_explorer
from regard.visualize.heads import draw_head_paths, draw_heads
from regard.visualize.kernels import draw_kernels
from regard.visualize.notebook import widget
from regard.visualize.picture import Picture
from regard.visualize.player import make_player

__all__ = [
    "Animation",
    "AttentionMap",
    "ExplorerModel",
    "Page",
    "Picture",
    "animate_heads",
    "attention_maps",
    "draw_head_paths",
    "draw_heads",
    "draw_kernels",
    "make_explorer",
    "make_player",
    "show",
    "widget",
]
