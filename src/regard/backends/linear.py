"""Linear attention: a feature map in place of the exponential, so that no square is ever formed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard.backends.base import Backend, Request


class Linear(Backend):
    """Kernelised attention in time and memory linear in the tokens."""

    name = "linear"

    def refuse(self, request: Request) -> str | None:
        if request.feature_map is None:
            return "linear attention needs a feature map in place of exp"
        return "linear attention is being built"

    def run(self, request: Request) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class LinearState:
    sums: Tensor
    norm: Tensor


def step(query, key, value, state=None, *, feature_map, beta=None):
    raise NotImplementedError
