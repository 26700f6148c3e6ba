"""Every law, in the order of their numbers. A new law is one file here and one line below."""

from regard.laws.catalog.alignment import AlignmentLaw
from regard.laws.catalog.batch_independence import BatchIndependenceLaw
from regard.laws.catalog.cache import CacheLaw
from regard.laws.catalog.cache_algebra import CacheAlgebraLaw
from regard.laws.catalog.causality import CausalityLaw
from regard.laws.catalog.cost_law import CostLaw
from regard.laws.catalog.determinism import DeterminismLaw
from regard.laws.catalog.empty_rows import EmptyRowsLaw
from regard.laws.catalog.gradients import GradientsLaw
from regard.laws.catalog.head_groups import HeadGroupsLaw
from regard.laws.catalog.jacobian import JacobianLaw
from regard.laws.catalog.masked_values import MaskedValuesLaw
from regard.laws.catalog.padding import PaddingLaw
from regard.laws.catalog.paths import PathsLaw
from regard.laws.catalog.permutation import PermutationLaw
from regard.laws.catalog.range_law import RangeLaw
from regard.laws.catalog.relative_position import RelativePositionLaw
from regard.laws.catalog.row_stochasticity import RowStochasticityLaw
from regard.laws.catalog.scale import ScaleLaw
from regard.laws.catalog.shape import ShapeLaw
from regard.laws.catalog.statelessness import StatelessnessLaw
from regard.laws.catalog.support import SupportLaw
from regard.laws.catalog.table_precision import TablePrecisionLaw
from regard.laws.law import Law

LAWS: tuple[Law, ...] = (
    CausalityLaw(),
    AlignmentLaw(),
    CacheLaw(),
    PaddingLaw(),
    MaskedValuesLaw(),
    EmptyRowsLaw(),
    RowStochasticityLaw(),
    SupportLaw(),
    PermutationLaw(),
    BatchIndependenceLaw(),
    PathsLaw(),
    DeterminismLaw(),
    GradientsLaw(),
    ScaleLaw(),
    RelativePositionLaw(),
    HeadGroupsLaw(),
    RangeLaw(),
    CacheAlgebraLaw(),
    CostLaw(),
    TablePrecisionLaw(),
    JacobianLaw(),
    StatelessnessLaw(),
    ShapeLaw(),
)

__all__ = ["LAWS"]
