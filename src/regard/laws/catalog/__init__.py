"""Every law, in the order of their numbers. A new law is one file here and one line below."""

from regard.laws.catalog.alignment import Alignment
from regard.laws.catalog.batch_independence import BatchIndependence
from regard.laws.catalog.cache import Cache
from regard.laws.catalog.cache_algebra import CacheAlgebra
from regard.laws.catalog.causality import Causality
from regard.laws.catalog.cost_law import CostLaw
from regard.laws.catalog.determinism import Determinism
from regard.laws.catalog.empty_rows import EmptyRows
from regard.laws.catalog.gradients import Gradients
from regard.laws.catalog.head_groups import HeadGroups
from regard.laws.catalog.jacobian import Jacobian
from regard.laws.catalog.masked_values import MaskedValues
from regard.laws.catalog.padding import Padding
from regard.laws.catalog.paths import Paths
from regard.laws.catalog.permutation import Permutation
from regard.laws.catalog.range_law import Range
from regard.laws.catalog.relative_position import RelativePosition
from regard.laws.catalog.row_stochasticity import RowStochasticity
from regard.laws.catalog.scale import Scale
from regard.laws.catalog.shape import Shape
from regard.laws.catalog.statelessness import Statelessness
from regard.laws.catalog.support import Support
from regard.laws.catalog.table_precision import TablePrecision
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
