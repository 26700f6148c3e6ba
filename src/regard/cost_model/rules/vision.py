"""All rules for images: layers from `grids.py` and `windows.py`, models from `images.py` and `spatial.py`."""

from __future__ import annotations

from regard.cost_model.rules import grids, images, spatial, windows

RULES = {**grids.RULES, **windows.RULES, **images.RULES, **spatial.RULES}
PARTS = (*images.PARTS, *spatial.PARTS)
