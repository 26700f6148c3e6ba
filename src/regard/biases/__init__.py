"""Positional biases: scores evaluated per pair, differentiable, without materialising the score matrix."""

from regard.biases._axes import axis_scores, distances, is_separable, table_scores
from regard.biases._encodings import quadratic_encoding
from regard.biases._features import features_of, has_features, tile_features
from regard.biases.alibi import Alibi
from regard.biases.base import Bias
from regard.biases.gaussian import Gaussian
from regard.biases.quadratic import Quadratic
from regard.biases.relative_table import RelativeTable
from regard.biases.row_column import RowColumn
from regard.biases.shift import Shift
from regard.biases.transformer_xl import TransformerXL

__all__ = [
    "Alibi",
    "Bias",
    "Gaussian",
    "Quadratic",
    "RelativeTable",
    "RowColumn",
    "Shift",
    "TransformerXL",
    "axis_scores",
    "distances",
    "features_of",
    "has_features",
    "is_separable",
    "quadratic_encoding",
    "table_scores",
    "tile_features",
]
