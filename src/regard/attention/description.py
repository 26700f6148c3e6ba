"""The description of an attention: a value that runs nowhere and can be run everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from regard.biases.base import Bias
from regard.features import FeatureMap
from regard.patterns import Pattern


@dataclass(frozen=True)
class Attention:
    """An attention, described: a value that runs nowhere and can be run everywhere.

        output[i] = sum_j weight[i, j] value[j]
        weight[i, j] = exp(scale query[i] . key[j] + bias[i, j]) / sum over the visible j

    Attributes:
        pattern: which pairs may interact; `None` is `Full()`.
        scale: inverse temperature; `None` is `1/sqrt(dim)`. Zero is the mean over visible keys, `inf` is hard
            attention with ties shared equally, negative prefers the smallest score.
        bias: scores that depend on position, added after `scale`: a tensor, or an object from `regard.biases`.
        feature_map: replaces `exp` by an inner product of features (linear attention): a name, or a callable. `scale`
            is then 1 unless the map approximates `exp`.
    """

    pattern: Pattern | None = None
    scale: float | None = None
    bias: Bias | Tensor | None = None
    feature_map: str | FeatureMap | Callable | None = None
