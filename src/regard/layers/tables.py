"""Positional attention with a learned score for every offset of a small window."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.errors import ConfigError
from regard.layers.lattice import Lattice
from regard.layers.profiles import HeadProfile
from regard.layers.spatial import join_groups, join_heads, make_batch


class TableAttention(nn.Module):
    r"""Multi-head self-attention by position, with one learned score for each head and each step of a common window.

        output[q] = bias + sum_h W^(h) sum_t a[h, t] image[q + steps[t]]
        a[h, :] = softmax of scores[h, :]

    `q` is a query's pixel, `steps[t]` the t-th step of the window, from the query; outside the window scores are -inf.
    What lies beyond the edges is read as pixels that are keys like others (`Lattice`), zeros too. So the image is
    padded, and no query stands on the padding: a head's weights are the same for every query.

    A convolution whose kernel, as a matrix of taps times pairs of channels, has rank `r` needs at least `r` such heads,
    and `r + 1` are enough (`regard.convert.conv_to_attention(conv, heads="minimal")`).

        >>> from regard.layers.tables import TableAttention
        >>> layer = TableAttention(3, 5, heads=2, steps=[(0, -1), (0, 0), (0, 1)])
        >>> layer(torch.randn(2, 3, 7, 11)).shape, layer.offset_weights.shape
        (torch.Size([2, 5, 7, 11]), torch.Size([2, 3]))

    Args:
        in_channels, out_channels: channels of the image and of the output.
        heads: number of heads.
        steps: offsets of the window, `(row, column)` each, or `(position,)`.
        lattice: stride, trim and edges.
        groups: blocks of channels that do not see one another.
        bias: whether a bias is added.
        dtype, device: of the parameters.

    Parameters: `scores (head, step)`, `weight (out, in / groups, head)`, the matrices `W^(h)`, and `bias (out,)`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int,
        steps: Sequence[Sequence[int]],
        *,
        lattice: Lattice | None = None,
        groups: int = 1,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        axes = {len(step) for step in steps}
        if min(in_channels, out_channels, groups, heads) < 1 or in_channels % groups or out_channels % groups:
            because = "there is at least one head and one channel, and groups divide the channels"
        elif axes not in ({1}, {2}):
            because = "a window has at least one step, and all have a number for a line, or two for rows and columns"
        else:
            because = ""
        if because:
            raise ConfigError(
                "These tables cannot be built.",
                asked=f"{in_channels} to {out_channels} channels in {groups} groups, {heads} heads, steps {steps}",
                because=because,
                instead="TableAttention(3, 5, heads=2, steps=[(0, -1), (0, 0), (0, 1)])",
            )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.steps = tuple(tuple(int(delta) for delta in step) for step in steps)
        self.lattice = Lattice() if lattice is None else lattice
        self.lattice.check_axes(self.axes)
        where = {"dtype": dtype, "device": device}
        self.scores = nn.Parameter(torch.randn(heads, len(self.steps), **where))
        bound = (in_channels // groups * heads) ** -0.5
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, heads, **where))
        nn.init.uniform_(self.weight, -bound, bound)
        self.bias = nn.Parameter(torch.empty(out_channels, **where).uniform_(-bound, bound)) if bias else None

    @property
    def heads(self) -> int:
        return self.scores.shape[0]

    @property
    def axes(self) -> int:
        return len(self.steps[0])

    @property
    def offset_weights(self) -> Tensor:
        """The weights of every head, `(head, step)`."""
        return self.scores.softmax(-1)

    def forward(self, image: Tensor) -> Tensor:
        batch = make_batch(image, self.axes, self.in_channels)
        window = self.lattice.read(batch, self.steps)  # (batch, channel, step, *query)
        attended = (self.offset_weights @ window.flatten(3)).unflatten(-1, window.shape[3:])
        output = join_heads(attended, self.weight, self.groups, self.bias)
        return output if image.ndim == batch.ndim else output[0]

    def kernel(self) -> Tensor:
        """What the heads are together, tap by tap: `sum_h W^(h) a[h, t]`, `(out, in / groups, step)`."""
        return self.weight @ self.offset_weights

    def head_profile(self) -> HeadProfile:
        """The attention of each head by relative position; a line is a single row."""
        steps = torch.tensor(self.steps, device=self.scores.device)
        steps = nn.functional.pad(steps, (2 - self.axes, 0))
        far = steps.abs().amax(0)
        scores = self.scores.detach().new_full((self.heads, *(2 * far + 1).tolist()), -math.inf)
        scores[:, steps[:, 0] + far[0], steps[:, 1] + far[1]] = self.scores.detach()
        return HeadProfile(scores, values=join_groups(self.weight.detach().permute(2, 0, 1), self.groups))

    def extra_repr(self) -> str:
        grouped = f", groups={self.groups}" if self.groups > 1 else ""
        steps = len(self.steps)
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}, steps={steps}, {self.lattice}{grouped}"
