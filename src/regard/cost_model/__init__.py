"""What an attention, a layer or a model costs, computed without running it: formulas, and the numbers they give."""

from regard.cost_model.api import cost
from regard.cost_model.cost import Cost
from regard.cost_model.flop_formulas import flop_counter
from regard.cost_model.parallel import ParallelCost
from regard.cost_model.quantity import Quantity

__all__ = ["Cost", "ParallelCost", "Quantity", "cost", "flop_counter"]
