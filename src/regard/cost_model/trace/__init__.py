"""Any module or function, traced with fake tensors.

`inputs` makes example inputs, `recorder` records every operation, `operator_formulas` and `operator_costs` price each
one, `symbolic` finds symbols from a few runs at neighbouring sizes, `critical_path` finds the depth, `engine` puts the
parts together.
"""

from regard.cost_model.trace.engine import trace_cost

__all__ = ["trace_cost"]
