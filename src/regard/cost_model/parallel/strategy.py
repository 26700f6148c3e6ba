"""How a model is spread over devices, as it is asked for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from regard.distributed.sequence_layout import KINDS
from regard.errors import CostError

STRATEGIES = ("ddp", "fsdp", "context", "tensor")


@dataclass(frozen=True)
class Strategy:
    """How a training step is spread over devices.

    Attributes:
        devices: how many there are.
        strategy: `"ddp"`, every device has the whole model and all-reduces its gradients; `"fsdp"`, parameters,
            gradients and optimizer state are sharded (FSDP2, a block is a unit); `"context"`, all devices share each
            sequence (ring attention) and are otherwise as in `"ddp"`; `"tensor"`, all devices share the heads and
            hidden channels of every block (Megatron) and one batch.
        context: how many devices share a sequence, of `"ddp"` and `"fsdp"`; it divides `devices`.
        layout: which tokens each of them holds: `"zigzag"`, as `regard train` has it, or `"contiguous"`.
        recompute: whether the activations of every block are computed again in the backward pass.
        param_dtype: of `"fsdp"`: in which dtype parameters are gathered and the model computes (as in
            `MixedPrecisionPolicy`); what is sharded stays in the dtype of the parameters.
        link_gbps: 10^9 bits that a device sends in a second, while it receives as many.
        device_tflops: 10^12 FLOPs that a device really does in a second; by default what this machine does.
    """

    devices: int
    strategy: str = "ddp"
    context: int | None = None
    layout: str = "zigzag"
    recompute: bool = False
    param_dtype: torch.dtype | None = None
    link_gbps: float | None = None
    device_tflops: float | None = None

    def __post_init__(self) -> None:
        _check_count("devices", self.devices)
        if self.strategy not in STRATEGIES:
            raise CostError(
                f"There is no strategy {self.strategy!r}.",
                asked=f"strategy={self.strategy!r}",
                because=f"strategies are {', '.join(STRATEGIES)}",
                instead='strategy="fsdp"',
            )
        if self.context is not None:
            _check_count("context", self.context)
            self._check_context(self.context)
        if self.layout not in KINDS:
            raise CostError(
                f"There is no layout {self.layout!r}.",
                asked=f"layout={self.layout!r}",
                because=f"the tokens of a sequence are dealt out {' or '.join(KINDS)}",
                instead='layout="zigzag"',
            )
        for name in ("link_gbps", "device_tflops"):
            rate = getattr(self, name)
            if rate is not None and not (isinstance(rate, int | float) and 0 < rate < float("inf")):
                raise CostError(
                    f"{name} is not a rate.",
                    asked=f"{name}={rate!r}",
                    because="times are amounts divided by rates, which are positive numbers",
                    instead=f"{name}=100",
                )
        if self.param_dtype is not None and self.strategy != "fsdp":
            raise CostError(
                f"{self.strategy} gathers no parameters.",
                asked=f"param_dtype={self.param_dtype} with strategy={self.strategy!r}",
                because="it is the dtype in which FSDP gathers parameters",
                instead='strategy="fsdp", or dtype=... for a model that has another dtype altogether',
            )

    def _check_context(self, context: int) -> None:
        if self.strategy in ("context", "tensor") and context not in (1, self.devices):
            raise CostError(
                f"The strategy {self.strategy} leaves no choice of context.",
                asked=f"context={context} with strategy={self.strategy!r} on {self.devices} devices",
                because="all devices share each sequence" if self.strategy == "context" else "none share a sequence",
                instead=f'strategy="ddp" or "fsdp" with context={context}',
            )
        if self.devices % context:
            raise CostError(
                f"{self.devices} devices cannot share sequences {context} by {context}.",
                asked=f"context={context} with devices={self.devices}",
                because="groups of equal size share the sequences",
                instead=f"context={max(each for each in range(1, context) if self.devices % each == 0)}",
            )

    @property
    def shared_by(self) -> int:
        """How many devices share a sequence."""
        return self.devices if self.strategy == "context" else 1 if self.strategy == "tensor" else self.context or 1

    @property
    def is_sharded(self) -> bool:
        return self.strategy == "fsdp"

    def to_dict(self) -> dict[str, Any]:
        found = dataclasses.asdict(self) | {"context": self.shared_by}
        return found | {"param_dtype": None if self.param_dtype is None else str(self.param_dtype)[6:]}


OPTIONS = tuple(field.name for field in dataclasses.fields(Strategy) if field.name != "devices")


def _check_count(name: str, count: Any) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise CostError(
            f"{name} is not a number of devices.",
            asked=f"{name}={count!r}",
            because="there is at least one device",
            instead=f"{name}=8",
        )
