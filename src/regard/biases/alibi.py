"""ALiBi: attention with linear biases."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.biases._arguments import Numbers, check_heads, format_arguments, read_numbers, to_default_dtype
from regard.biases._geometry import select_head
from regard.biases.base import ElementwiseBias


class Alibi(ElementwiseBias):
    r"""A penalty that grows linearly with the distance, with a fixed slope per head.

        score[h, i, j] = -slope[h] * |i - j|

    with `i` the query's position, `j` the key's, and for `H` heads, a power of two,

        slope[h] = 2^(-8 h / H),   h = 1 .. H.

    For other `H` the slopes are those of the next lower power of two `P`, followed by the first `H - P` of
    every second slope of `2 P` heads. Nothing is learned: `slopes` is a buffer.

    Source: Press, Smith and Lewis, "Train Short, Test Long" (ICLR 2022), section 3 and the authors' code.

    Where we differ: the paper's attention is causal and its distance is `i - j`. Here it is `|i - j|`, which is
    the same under `Causal()` and extends to encoders.

    Args:
        heads: number of heads, `H`.
        slopes: `(head,)`, in place of the published slopes.
        dtype, device: of the slopes; torch's defaults if not given.

    >>> bias = Alibi(8)
    >>> bias.slopes.tolist()
    [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
    >>> bias.scores(torch.tensor(5), torch.arange(3, 7))[0].tolist()
    [-1.0, -0.5, -0.0, -0.5]
    """

    relative = True
    heads_first = True
    slopes: Tensor

    def __init__(
        self,
        heads: int,
        slopes: Numbers | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.heads = check_heads("Alibi", heads)
        self._slopes = None if slopes is None else read_numbers("Alibi", "slopes", slopes, (self.heads,), "head")
        values = published_slopes(self.heads) if self._slopes is None else self._slopes
        self._exact = tuple(values.tolist())
        # The constructor's arguments determine the slopes, so they are not part of the state dict.
        self.register_buffer("slopes", to_default_dtype(values, dtype, device), persistent=False)

    def reset_buffers(self) -> None:
        """Recompute the slopes, for a module that was built on the meta device."""
        self.slopes = torch.tensor(self._exact, dtype=torch.float64, device="cpu").to(self.slopes.dtype)

    def keep_heads(self, start: int, stop: int) -> list[str]:
        names = super().keep_heads(start, stop)
        if names:
            self._exact = self._exact[start:stop]
            self._slopes = torch.tensor(self._exact, dtype=torch.float64, device="cpu")
        return names

    def _apply(self, fn, recurse: bool = True):
        # A dtype conversion rounds; recompute, so that the next one does not start from rounded slopes.
        super()._apply(fn, recurse)
        if not self.slopes.is_meta:
            exact = torch.tensor(self._exact, dtype=torch.float64, device="cpu")
            self.slopes = exact.to(dtype=self.slopes.dtype, device=self.slopes.device)
        return self

    def score(self, head: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        return -self.slopes[select_head(self.heads, head)] * (key_position - query_position).abs()

    def extra_repr(self) -> str:
        return format_arguments(heads=self.heads, slopes=self._slopes)


def published_slopes(heads: int) -> Tensor:
    """The paper's slopes in float64, `(head,)`."""
    lower = 1 << (heads.bit_length() - 1)
    exponents = [8 * head / lower for head in range(1, lower + 1)]
    between = [8 * head / (2 * lower) for head in range(1, 2 * lower + 1, 2)]
    exponents += between[: heads - lower]
    return torch.exp2(-torch.tensor(exponents, dtype=torch.float64, device="cpu"))
