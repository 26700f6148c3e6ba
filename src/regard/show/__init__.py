"""Pictures of attention: what heads look at, on images and texts, while they learn, and as kernels.

`show` draws everything; the other names draw one thing each. Pictures need matplotlib: `pip install "regard[show]"`.
`Page` puts what is found into one page that needs nothing else, `explorer` and `player` let its reader play with it.
"""

from regard.show.animation import Animation, animate_heads
from regard.show.explorer import Seer, explorer
from regard.show.heads import heads, moving_heads
from regard.show.kernels import kernels
from regard.show.looking import Look, looks
from regard.show.page import Page
from regard.show.picture import Picture
from regard.show.player import player
from regard.show.showing import show

__all__ = [
    "Animation",
    "Look",
    "Page",
    "Picture",
    "Seer",
    "animate_heads",
    "explorer",
    "heads",
    "kernels",
    "looks",
    "moving_heads",
    "player",
    "show",
]
