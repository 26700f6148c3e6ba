"""What an attention, a layer or a model costs before anyone runs it: formulas, and the numbers they give."""

from regard.cost.asking import cost
from regard.cost.cost import Cost
from regard.cost.counting import flop_counter
from regard.cost.quantity import Quantity

__all__ = ["Cost", "Quantity", "cost", "flop_counter"]
