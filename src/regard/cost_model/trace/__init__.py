"""Any module or function, followed with tensors that have shapes and no numbers.

`inputs` makes example inputs, `recording` writes down every operation, `operations` says what each one costs,
`fitting` reads letters off a few nearby sizes, `walking` finds the longest path, `follow` puts the parts together.
"""

from regard.cost_model.trace.follow import follow

__all__ = ["follow"]
