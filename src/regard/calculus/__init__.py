"""The mathematics of softmax attention: pure torch functions, row layout, last axis by default."""

from regard.calculus._connected import connected_weight, skip_keys, straight_through
from regard.calculus._entropy import entropy, entropy_slope
from regard.calculus._gaussian_key import NoisyKey, perturb_key_gaussian
from regard.calculus._jacobian import jacobian, jvp, vjp
from regard.calculus._merge import Merged, append_key, merge, remove_key
from regard.calculus._moments import DotProductMoments, dot_product_moments
from regard.calculus._perturb import (
    Perturbed,
    perturb_attention,
    perturb_key,
    perturb_key_first_order,
    score_change,
)
from regard.calculus._separable import axis_weights, separable_attention, separable_weights
from regard.calculus._sinusoidal import sinusoidal, sinusoidal_rotation
from regard.calculus._softmax import logsumexp, softmax

__all__ = [
    "DotProductMoments",
    "Merged",
    "NoisyKey",
    "Perturbed",
    "append_key",
    "axis_weights",
    "connected_weight",
    "dot_product_moments",
    "entropy",
    "entropy_slope",
    "jacobian",
    "jvp",
    "logsumexp",
    "merge",
    "perturb_attention",
    "perturb_key",
    "perturb_key_first_order",
    "perturb_key_gaussian",
    "remove_key",
    "score_change",
    "separable_attention",
    "separable_weights",
    "sinusoidal",
    "sinusoidal_rotation",
    "skip_keys",
    "softmax",
    "straight_through",
    "vjp",
]
