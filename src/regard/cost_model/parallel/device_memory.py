"""What a device holds during a training step on several devices.

    ddp        parameters, gradients (in DDP's buckets, all the time), optimizer state, activations of its own tokens
    fsdp       a K-th of the first three; of the whole model only the root and its gradients, and of the blocks one that
               is computed, one that is already gathered for the next step, and the gradients of one
    context    the activations of a c-th of the tokens; and pieces of keys and values on their way
    tensor     a K-th of the matrices of all blocks and of what they leave for the backward pass

Peaks are traced as in `peak_memory`, with what these strategies add at the moments at which it is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from regard.cost_model.cost import Cost
from regard.cost_model.parallel.collectives import RingLayers
from regard.cost_model.parallel.sharding import Units
from regard.cost_model.parallel.strategy import Strategy
from regard.cost_model.peak_memory import TracedMemory
from regard.cost_model.symbols import size_symbols

B, N, D, L, K, c = size_symbols("B N D L K c")
ZERO = sympy.Integer(0)


@dataclass(frozen=True)
class DeviceMemory:
    """Formulas of what a device holds, in bytes.

    Attributes:
        parameters, gradients, optimizer_state: that stay on the device.
        activations: what the forward pass leaves for the backward pass.
        gathered: parameters and gradients of whole units that are there for a moment.
        received: keys, values and their gradients of other devices that are there for a moment.
    """

    parameters: Any
    gradients: Any
    optimizer_state: Any
    activations: Any
    gathered: Any = ZERO
    received: Any = ZERO

    @property
    def total(self) -> Any:
        """All of them at once: what has to fit, but for temporary results."""
        return (
            self.parameters + self.gradients + self.optimizer_state + self.activations + self.gathered + self.received
        )


def find_activations(cost: Cost, strategy: Strategy) -> sympy.Expr:
    """What the forward pass leaves on a device; recomputed blocks leave their inputs, and one block its own."""
    formula = sympy.expand(cost.activation_bytes.formula)
    by_block, rest = formula.coeff(L, 1), formula.coeff(L, 0)
    by_layers = sympy.expand(by_block * L + rest - formula) == 0 and by_block != 0
    inputs = cost.mode.item * B * D * N
    if strategy.recompute and by_layers:
        formula = rest + by_block + L * inputs
    elif strategy.strategy == "tensor" and by_layers:
        # Inputs and outputs of the two norms are on every device (Korthikanti et al. 2022, without sequence parallel).
        kept = 4 * inputs
        formula = rest + L * kept + L * (by_block - kept) / K
    return sympy.expand(formula.xreplace({N: N / c}) if strategy.shared_by > 1 else formula)


def find_received(layers: list[RingLayers], item: int, wide: int) -> sympy.Expr:
    """One piece that is used, one that arrives and one that is sent; of gradients as many. The largest layer's."""
    travels = [each for each in layers if each.attention.feature_map is None]
    if not travels:
        return ZERO
    largest = max(travels, key=lambda each: each.kv_heads * (each.key + each.value) * each.tokens.largest_piece)
    return 3 * (item + wide) * B * largest.width * largest.tokens.piece


def find_gathered(units: Units, size: int) -> sympy.Expr:
    """The root and its gradients; a block, the next one, and the gradients of one."""
    return sympy.expand(size * (2 * units.root + 3 * units.block))


def find_peak(
    traced: TracedMemory, memory: DeviceMemory, units: tuple[int, int] | None, strategy: Strategy, parameters: int
) -> int:
    """The most that a device holds at one time, from the trace of one device's share and numbers for `memory`.

    traced: of a step on one device with this device's batch rows and tokens.
    units: bytes of the largest block and of the root, where these are sharded.
    parameters: bytes of the whole model.
    """
    others = traced.resident - parameters  # inputs and buffers
    held = others + memory.parameters + memory.optimizer_state
    # Pieces of other devices are there during attention, when the logits and their gradients, often the peak, are not.
    inside = traced.saved + memory.received
    if units is None:
        return held + memory.gradients + max(traced.without_gradients, inside, traced.scratch)
    block, root = units
    shard = memory.gradients
    moments = (
        # Between the passes: the root, and the last block that was gathered.
        traced.without_gradients + root + block,
        # The last block, the first in backward: everything that was saved is there, and no sharded gradients yet.
        inside + 2 * root + 3 * block,
        # The one before: its gradients, while those of the last block are still being reduced.
        inside - traced.saved_by_block + 2 * root + 4 * block,
        # The root: its gradients are copied, and reduced in a copy by gloo.
        2 * root + block + shard,
        shard + traced.scratch // strategy.devices,
    )
    return held + max(moments)
