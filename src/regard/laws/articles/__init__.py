"""Every law, in the order of their numbers. A new law is one file here and one line below."""

from regard.laws.articles.alignment import Alignment
from regard.laws.articles.batch_independence import BatchIndependence
from regard.laws.articles.cache import Cache
from regard.laws.articles.cache_algebra import CacheAlgebra
from regard.laws.articles.causality import Causality
from regard.laws.articles.cost_law import CostLaw
from regard.laws.articles.determinism import Determinism
from regard.laws.articles.empty_rows import EmptyRows
from regard.laws.articles.gradients import Gradients
from regard.laws.articles.head_groups import HeadGroups
from regard.laws.articles.jacobian import Jacobian
from regard.laws.articles.masked_values import MaskedValues
from regard.laws.articles.padding import Padding
from regard.laws.articles.paths import Paths
from regard.laws.articles.permutation import Permutation
from regard.laws.articles.range_law import Range
from regard.laws.articles.relative_position import RelativePosition
from regard.laws.articles.row_stochasticity import RowStochasticity
from regard.laws.articles.scale import Scale
from regard.laws.articles.shape import Shape
from regard.laws.articles.statelessness import Statelessness
from regard.laws.articles.support import Support
from regard.laws.articles.table_precision import TablePrecision
from regard.laws.law import Law

LAWS: tuple[Law, ...] = (
    Causality(),
    Alignment(),
    Cache(),
    Padding(),
    MaskedValues(),
    EmptyRows(),
    RowStochasticity(),
    Support(),
    Permutation(),
    BatchIndependence(),
    Paths(),
    Determinism(),
    Gradients(),
    Scale(),
    RelativePosition(),
    HeadGroups(),
    Range(),
    CacheAlgebra(),
    CostLaw(),
    TablePrecision(),
    Jacobian(),
    Statelessness(),
    Shape(),
)

__all__ = ["LAWS"]
