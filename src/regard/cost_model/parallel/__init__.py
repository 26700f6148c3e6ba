"""What a training step costs on several devices: bytes sent, memory of a device, time that is not overlapped.

`strategy` has the question, `ring_traffic` the keys and values that travel, `collectives` what is sent, `device_memory`
what a device holds, `timing` what overlaps, `parallel_cost` puts them together.
"""

from regard.cost_model.parallel.parallel_cost import ParallelCost, cost_parallel

__all__ = ["ParallelCost", "cost_parallel"]
