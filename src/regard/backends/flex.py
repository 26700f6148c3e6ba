"""torch's FlexAttention, from the same plan and bias."""

from __future__ import annotations

from torch import Tensor

from regard.backends.base import Backend, Request


class Flex(Backend):
    """Sparse attention by `torch.nn.attention.flex_attention`."""

    name = "flex"

    def refuse(self, request: Request) -> str | None:
        return "FlexAttention is being built"

    def run(self, request: Request) -> Tensor:
        raise NotImplementedError
