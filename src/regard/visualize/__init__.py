"""Pictures of attention: what heads look at, on images and texts, while they learn, and as kernels.

`show` draws everything; the other names draw one thing each. Pictures need matplotlib: `pip install "regard[show]"`.
`Page` puts what is found into one page that needs nothing else, `explorer` and `player` let its reader play with it.
"""

from regard.render.page import Page
from regard.visualize.animation import Animation, animate_heads
from regard.visualize.attention_map import AttentionMap, attention_maps
from regard.visualize.dispatch import show
from regard.visualize.explorer import ExplorerModel, make_explorer
from regard.visualize.heads import draw_head_paths, draw_heads
from regard.visualize.kernels import draw_kernels
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
]
