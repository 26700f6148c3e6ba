"""Every exhibit of the zoo."""

from __future__ import annotations

from zoo import (
    algebra,
    arithmetic,
    beyond,
    caches,
    corners,
    cost,
    gradients,
    halves,
    heads,
    masks,
    padding,
    paths,
    positions,
    state,
    windows,
)
from zoo.exhibit import Exhibit

HOUSES = (
    masks,
    caches,
    algebra,
    padding,
    arithmetic,
    beyond,
    heads,
    paths,
    state,
    positions,
    gradients,
    halves,
    windows,
    cost,
    corners,
)
EXHIBITS: list[Exhibit] = [exhibit for house in HOUSES for exhibit in house.EXHIBITS]
