"""Attention inside the windows of a grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.attention import Attention, attend
from regard.attention import weights as attention_weights
from regard.errors import ConfigError, InputError
from regard.kernels import library, training
from regard.layers.linear import Linear, can_fuse_residual, is_plain_linear, linear
from regard.layers.row_subset import restrict_to_queries
from regard.patterns import GridWindow


class WindowAttention(nn.Module):
    """Multi-head attention of every token over the tokens of its own window.

        q, k, v = x Wqkv + bqkv
        output[i] = Wproj concat_h( sum_{j in window(i)} softmax_j(q_i . k_j / sqrt(d)) v_j ) + bproj

    Windows of `window` rows and columns lie side by side on the grid from its upper left corner; `d = dim / heads`.
    A grid that is not a whole number of windows is padded with zeros on the right and at the bottom and cropped
    afterwards. The padding is made of zeros *before* the projection, so that its keys are the key's bias, and tokens
    of the last windows see them. `sees_padding=False` hides it: windows at the edge are then just smaller.

    Grids are `(batch, row, column, channel)`, coming in and going out.

    Sources: Liu et al., Swin Transformer (2021), section 3.2; Ding et al., DaViT (2022), section 3.2, whose code pads
    like this and does not shift windows.

        >>> WindowAttention(8, heads=2, window=7)(torch.randn(2, 9, 16, 8)).shape
        torch.Size([2, 9, 16, 8])

    Args:
        dim: channels of the tokens.
        heads: number of heads.
        window: side of a window, or its rows and columns.
        bias: whether the projections of query, key and value have a bias.
        sees_padding: whether tokens attend to the padding of incomplete windows.
    """

    def __init__(
        self, dim: int, heads: int, window: int | tuple[int, int], *, bias: bool = True, sees_padding: bool = True
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ConfigError(
                "Heads do not share the channels evenly.",
                asked=f"WindowAttention(dim={dim}, heads={heads})",
                because=f"{dim} channels cannot be cut into {heads} equal heads",
                instead="a number of heads that divides dim",
            )
        self.dim, self.heads, self.sees_padding = dim, heads, sees_padding
        self.window = (window, window) if isinstance(window, int) else (window[0], window[1])
        GridWindow((1, 1), self.window)  # refuses what is not a window
        self.qkv = Linear(dim, 3 * dim, bias=bias)
        self.proj = Linear(dim, dim)

    def forward(self, grid: Tensor) -> Tensor:
        self._check_grid(grid)
        rows, columns = grid.shape[1:3]
        padded = self._pad(grid)
        mixed = self.proj(self._mix(padded))
        return mixed if padded is grid else mixed[:, :rows, :columns]

    def add_to(self, residual: Tensor, grid: Tensor) -> Tensor:
        """`residual + self(grid)`, in one pass over the result where that is possible."""
        if not can_fuse_residual(self, WindowAttention, self.proj, residual, grid):
            return residual + self(grid)
        self._check_grid(grid)
        if self._pad(grid) is not grid:
            return residual + self(grid)
        return linear(self._mix(grid), self.proj.weight, self.proj.bias, residual=residual)

    def weights(self, grid: Tensor, queries: Sequence[int]) -> Tensor:
        """Attention weights of some tokens over all tokens of the grid, `(batch, head, query, key)`, for study.

        Tokens are counted row by row. Weights outside the window of a query are zero; where tokens see the padding of
        incomplete windows, its weight is what is missing to one.
        """
        self._check_grid(grid)
        rows, columns = grid.shape[1:3]
        padded = self._pad(grid)
        height, width = padded.shape[1:3]
        places = torch.arange(height * width, device=grid.device).view(height, width)[:rows, :columns].flatten()
        query, key, _ = self._split_heads(self.qkv(padded).flatten(1, 2))
        chosen = places[torch.as_tensor(queries, device=grid.device)]
        described = Attention(pattern=GridWindow((height, width), self.window))
        query = query[..., chosen, :]
        return attention_weights(query, key, restrict_to_queries(described, chosen, query, key))[..., places]

    def _check_grid(self, grid: Tensor) -> None:
        if grid.ndim != 4 or grid.shape[-1] != self.dim:
            raise InputError(
                "This is not a grid of tokens.",
                asked=f"(batch, row, column, {self.dim})",
                found=f"a tensor {tuple(grid.shape)}",
                because="windows are cut from rows and columns, and channels come last",
                instead="image.permute(0, 2, 3, 1), if channels come first",
            )

    def _pad(self, grid: Tensor) -> Tensor:
        """The grid with the zeros that its tokens see."""
        below, right = -grid.shape[1] % self.window[0], -grid.shape[2] % self.window[1]
        return pad(grid, (0, 0, 0, right, 0, below)) if self.sees_padding and (below or right) else grid

    def _mix(self, grid: Tensor) -> Tensor:
        """What the heads read from their windows, `(batch, row, column, channel)`."""
        heads = self._project_for_training(grid)
        return self._attend(self.qkv(grid)) if heads is None else self._attend_heads(*heads, grid)

    def _attend(self, qkv: Tensor) -> Tensor:
        """The attention between the projections, by the faster of two equivalent computations.

        In place reads keys from the grid where they are; folding copies every window into a batch row first. Where
        our kernels run, in place was measured 1.25 to 1.35 times as fast forward and 1.0 to 1.15 times with gradients
        (grids from 14 x 14 to 56 x 56, window 7, batch 8); a grid of one window is the same either way. Elsewhere
        windows in the batch are dense, which every device does well.
        """
        height, width = qkv.shape[1:3]
        whole = not (height % self.window[0] or width % self.window[1])
        if whole and (qkv.device.type != "cpu" or library.missing() is not None):
            return self._attend_folded(qkv)
        return self._attend_in_place(qkv)

    def _project_for_training(self, grid: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Query, key and value whose gradients come back side by side, if the projection can be such a function."""
        weight, bias = self.qkv.weight, self.qkv.bias
        if not is_plain_linear(self.qkv) or not training.can_train(grid, weight, bias):
            return None
        query, key, value = training.project_heads(grid.flatten(1, 2), weight, bias, (self.dim,) * 3, (self.heads,) * 3)
        return query, key, value

    def _attend_in_place(self, qkv: Tensor) -> Tensor:
        return self._attend_heads(*self._split_heads(qkv.flatten(1, 2)), qkv)

    def _attend_heads(self, query: Tensor, key: Tensor, value: Tensor, grid: Tensor) -> Tensor:
        batch, height, width, _ = grid.shape
        one = height <= self.window[0] and width <= self.window[1]
        pattern = None if one else GridWindow((height, width), self.window)
        mixed = attend(query, key, value, pattern=pattern)
        return mixed.transpose(1, 2).reshape(batch, height, width, self.dim)

    def _attend_folded(self, qkv: Tensor) -> Tensor:
        batch, height, width, _ = qkv.shape
        down, across = self.window
        windows = qkv.unflatten(2, (width // across, across)).unflatten(1, (height // down, down))
        windows = windows.transpose(2, 3)  # batch, window row, window column, row, column, channel
        query, key, value = self._split_heads(windows.flatten(3, 4).flatten(0, 2))
        mixed = attend(query, key, value).transpose(1, 2)  # window, token, head, dim
        mixed = mixed.reshape(batch, height // down, width // across, down, across, self.dim).transpose(2, 3)
        return mixed.reshape(batch, height, width, self.dim)

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views `(batch, head, token, dim)` of `(batch, token, 3 head dim)`."""
        parts = qkv.unflatten(-1, (3, self.heads, self.dim // self.heads)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        return query, key, value

    def extra_repr(self) -> str:
        extra = "" if self.sees_padding else ", sees_padding=False"
        return f"{self.dim}, heads={self.heads}, window={self.window}{extra}"


__all__ = ["WindowAttention"]
