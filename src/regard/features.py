"""Feature maps: what linear attention puts in place of the exponential."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from regard.caching import constant_under_compile, lru_cache_bytes
from regard.errors import CalculusError

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = [
    "Elu1",
    "FavorPlus",
    "FeatureMap",
    "FromCallable",
    "Relu",
    "Taylor2",
    "feature_map",
    "scaled_features",
]


class FeatureMap:
    """A map phi whose inner products replace exp in attention, which makes its cost linear in the tokens.

        out_n = phi(q_n)^T [sum_m phi(k_m) v_m^T] / phi(q_n)^T [sum_m phi(k_m)]

    q, k, v: queries, keys, values; neither bracket depends on n. Inner products should be non-negative, or
    the denominator may vanish. A feature map is a value: frozen, hashable, equal to another with the same
    fields.

    Source: Katharopoulos et al., Transformers are RNNs (2020), section 3.2; Prince, Understanding Deep
    Learning, problem 12.10.

    Attributes:
        approximates_exp: whether `phi(q) . phi(k)` approximates `exp(q . k)`, so that scale has its usual
        meaning.
    """

    approximates_exp: ClassVar[bool] = False

    def __call__(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch feature"]:
        """The features of the vectors on the last axis."""
        raise NotImplementedError

    def width(self, dim: int) -> int:
        """How many features a vector of `dim` numbers has."""
        return dim

    def describe(self) -> str:
        """A one-line description: the map, and whether it approximates exp."""
        kind = "approximates exp" if self.approximates_exp else "a kernel of its own, not exp"
        return f"{self!r}: {kind}"


@dataclass(frozen=True)
class Elu1(FeatureMap):
    """The smooth positive map of the first linear transformers.

        phi(x) = elu(x) + 1 = x + 1 if x > 0, else exp(x)

    x: each number on its own. Source: Katharopoulos et al. (2020), eq. (7).

    Where we differ: exp is taken directly; `elu(x) + 1` rounds to 0 below x = -17 in float32, and phi must be
    positive.

    >>> Elu1()(torch.tensor([0.0, 2.0]))
    tensor([1., 3.])
    """

    def __call__(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch feature"]:
        return torch.where(x > 0, x + 1, x.clamp(max=0.0).exp())


@dataclass(frozen=True)
class Relu(FeatureMap):
    """The cheapest non-negative map; a query without a positive number sees nothing.

        phi(x) = max(x, 0)

    x: each number on its own. Source: Choromanski et al., Rethinking Attention with Performers (2021),
    generalised attention. Where we differ: no small constant is added.

    >>> Relu()(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def __call__(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch feature"]:
        return x.relu()


@dataclass(frozen=True)
class Taylor2(FeatureMap):
    """The exponential series up to its second power, exactly.

        phi(q) . phi(k) = 1 + x + x^2 / 2 = ((1 + x)^2 + 1) / 2 >= 1/2,     x = q . k
        phi(q) = (1,  q_i,  q_i^2 / sqrt(2),  q_i q_j for i < j)

    The kernel is positive for every x; its relative error against exp is at most |x|^3 e^|x| / 6.

    Source: the multinomial theorem; Prince, Understanding Deep Learning, problem 12.10, asks for such a map.

    Where we differ: each product q_i q_j is kept once, 1 + D + D (D + 1) / 2 features instead of 1 + D + D^2.

    >>> Taylor2().width(5)
    21
    """

    approximates_exp: ClassVar[bool] = True

    def __call__(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch feature"]:
        dim = x.shape[-1]
        row, column = torch.triu_indices(dim, dim, 1, device=x.device)
        square = x.square() * math.sqrt(0.5)
        return torch.cat((torch.ones_like(x[..., :1]), x, square, x[..., row] * x[..., column]), dim=-1)

    def width(self, dim: int) -> int:
        return 1 + dim + dim * (dim + 1) // 2


@dataclass(frozen=True)
class FavorPlus(FeatureMap):
    """Positive orthogonal random features: exp itself, on average.

        phi_r(x) = exp(w_r . x - |x|^2 / 2) / sqrt(m),     E[phi(q) . phi(k)] = exp(q . k)

    w_r: row r of m = `features` random directions, each N(0, I) on its own, orthogonal to one another in
    blocks of `dim`. That lowers the variance below exp(2 q . k) (exp(|q + k|^2) - 1) / m, which independent
    directions would have.

    Source: Choromanski et al., Rethinking Attention with Performers (2021), lemma 1.

    Where we differ: no maximum is subtracted, so the estimate stays unbiased; the exponent is at most |w|^2 /
    2, which bounds the features. Long vectors make all of them underflow: multiply by the root of the scale first. The
    directions depend on `features`, `seed` and the dim only, never on torch's random state; they are the same
    on every machine, to the rounding of its logarithm and cosine.

    >>> FavorPlus(features=3)(torch.zeros(1, 2))
    tensor([[0.5774, 0.5774, 0.5774]])
    """

    features: int = 256
    seed: int = 0
    approximates_exp: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.features < 1:
            raise CalculusError(
                "FavorPlus needs at least one random feature.",
                asked=f"features = {self.features}",
                because="an estimate from no samples does not exist",
                instead="features=256, or about dim * log(dim) for a close fit",
            )

    def __call__(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch feature"]:
        projection = self.projection(x.shape[-1], x.dtype, x.device)
        exponent = x @ projection.mT - x.square().sum(-1, keepdim=True) / 2
        return exponent.exp() / math.sqrt(self.features)

    def width(self, dim: int) -> int:
        return self.features

    def projection(self, dim: int, dtype: torch.dtype, device: torch.device | str) -> Float[Tensor, "feature dim"]:
        """The directions w, one per row; made once for each dim, dtype and device."""
        return _make_projection(self.features, self.seed, dim, dtype, torch.device(device))


@dataclass(frozen=True)
class FromCallable(FeatureMap):
    """Any function `(..., dim) -> (..., features)` taken at its word.

        phi(x) = function(x)

    Source: the user. Where we differ: nothing is assumed about exp, so `approximates_exp` is False.

    >>> FromCallable(torch.sigmoid)(torch.zeros(2))
    tensor([0.5000, 0.5000])
    """

    function: Callable[[Tensor], Tensor]

    def __call__(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch feature"]:
        return self.function(x)

    def width(self, dim: int) -> int:
        """Found by calling the function with a vector of zeros."""
        with torch.no_grad():
            return self.function(torch.zeros(1, dim)).shape[-1]


_NAMES: dict[str, type[FeatureMap]] = {"elu1": Elu1, "relu": Relu, "taylor2": Taylor2, "favor+": FavorPlus}


def feature_map(spec: str | FeatureMap | type[FeatureMap] | Callable[[Tensor], Tensor]) -> FeatureMap:
    """Turn a name, a feature map, its class, or any function into a feature map.

        feature_map("taylor2") = feature_map(Taylor2) = feature_map(Taylor2()) = Taylor2()

    spec: "elu1", "relu", "taylor2", "favor+", a `FeatureMap`, or a callable, which becomes `FromCallable`.

    >>> feature_map("favor+")
    FavorPlus(features=256, seed=0)
    """
    if isinstance(spec, FeatureMap):
        return spec
    if isinstance(spec, type) and issubclass(spec, FeatureMap):
        return spec()
    if isinstance(spec, str) and spec in _NAMES:
        return _NAMES[spec]()
    if callable(spec):
        return FromCallable(spec)
    names = ", ".join(f'"{name}"' for name in _NAMES)
    raise CalculusError(
        "There is no such feature map.",
        asked=f"feature_map = {spec!r}",
        found=f"the names {names}",
        because="a feature map is one of these names, a FeatureMap, or a callable",
        instead=f"one of {names}, or a function from (..., dim) to (..., features)",
    )


def scaled_features(features: FeatureMap, scale: float, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Features of queries and keys whose product sees scale: each gets its root, the query also its sign.

        phi(sign(scale) sqrt|scale| q) . phi(sqrt|scale| k)

    For a map that approximates exp this is about exp(scale q . k).

    >>> [x.tolist() for x in scaled_features(Relu(), 4.0, torch.tensor([3.0]), torch.tensor([5.0]))]
    [[6.0], [10.0]]
    """
    root = abs(scale) ** 0.5
    return features(query * (root if scale >= 0 else -root)), features(key * root)


@constant_under_compile
@lru_cache_bytes(lambda directions: directions.nbytes)
def _make_projection(features: int, seed: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return _orthogonal_gaussian(features, seed, dim).to(device, dtype)


def _orthogonal_gaussian(features: int, seed: int, dim: int) -> Tensor:
    """Rows that are N(0, I) each and orthogonal within every block of `dim`, in float64."""
    # Python documents that `random()` gives the same numbers for the same seed everywhere; torch does not.
    uniform = random.Random(f"favor+ {seed} {dim}").random

    def normal(rows: int) -> Tensor:
        pairs = [(math.sqrt(-2 * math.log(1 - uniform())), math.tau * uniform()) for _ in range(rows * dim)]
        return torch.tensor([radius * math.cos(angle) for radius, angle in pairs], dtype=torch.float64).view(rows, dim)

    blocks = []
    for start in range(0, features, dim):
        basis, triangle = torch.linalg.qr(normal(dim))
        # A positive diagonal makes the factors unique: uniform over rotations, the same in every LAPACK.
        basis = basis * torch.where(triangle.diagonal() < 0, -1.0, 1.0)
        rows = min(dim, features - start)
        blocks.append(basis.mT[:rows] * normal(rows).norm(dim=-1, keepdim=True))
    return torch.cat(blocks)
