"""Positional attention whose heads attend at a fixed offset from the query: the attention that a convolution is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.calculus import separable_attention, separable_weights
from regard.errors import ConfigError, InputError
from regard.layers.lattice import Lattice
from regard.layers.profiles import HeadProfile

Steps = Sequence[int] | Sequence[Sequence[float]] | Tensor


class SpatialAttention(nn.Module):
    r"""Multi-head self-attention between the pixels of an image, by position alone, channels first as in a convolution.

        output[q] = bias + sum_h W^(h) sum_k A_h[q, k] image[k]
        A_h[q, :] = softmax over k of -alpha_h |k - q - step_h|^2

    `q` is the pixel of a query, `k` that of a key, both (row, column), or one number along a line; `step_h` is where
    head `h` looks, from the query; `W^(h) = W_h^o W_h^v` its values and its part of the output matrix. As `alpha`
    grows, a head whose step is a whole number attends to one pixel, and the layer is a convolution whose taps are the
    `W^(h)`. `alpha=inf`, the default, is this limit itself: pixels are picked, nothing is multiplied by a weight, and
    the steps are fixed. With a finite `alpha` steps and widths are learned, `alpha = reference spread^2` as in
    `Quadratic`; the gradient of a step vanishes in the hard limit, so train soft, near 1/2.

    `lattice` says where queries stand, and what lies beyond the edges (`Lattice`). A row of `A_h` sums to one, so plain
    attention keeps a constant image constant and cannot pad with zeros. It can with one more key, the null key, whose
    value is zero and whose score is `-alpha / 2`: a step that ends on a pixel scores 0 and wins, one that ends outside
    scores `-alpha` at best and loses. Without it, the nearest pixel wins: `edges="replicate"`.

    Images `(batch, channel, row, column)` or `(batch, channel, position)` of any size; the batch may be left out. All
    pairs are never formed: soft weights are a softmax over rows times one over columns, with the null key too, whose
    share follows from the two sums.

    Source: Cordonnier, Loukas and Jaggi, On the Relationship between Self-Attention and Convolutional Layers (ICLR
    2020), theorem 1 and lemma 1. Where we differ: steps are key minus query, as in the paper's equation (9); in its
    lemma they are query minus key, which would flip the kernel. The square is completed, so that the best score is 0
    and nothing large cancels. The null key is ours.

    Args:
        in_channels: channels of the image.
        out_channels: channels that leave.
        steps: the offset of each head from the query: `(head, axis)`, or whole numbers for heads along a line.
        alpha: steepness of all heads, or one for each; all infinite or all finite.
        lattice: stride, trim and edges.
        groups: blocks of channels that do not see one another; zeros between them are neither stored nor multiplied.
        head_dim: channels of a head's values in each group. `None` keeps `W^(h)` as one matrix.
        bias: whether a bias is added.
        dtype, device: of the parameters.

        >>> from regard.layers import SpatialAttention
        >>> layer = SpatialAttention(3, 5, steps=[(0, -1), (0, 0), (0, 1)])
        >>> layer(torch.randn(2, 3, 7, 11)).shape
        torch.Size([2, 5, 7, 11])
        >>> layer.weights((1, 3))[2]  # the head that attends to the right; the last column is the null key
        tensor([[0., 1., 0., 0.],
                [0., 0., 1., 0.],
                [0., 0., 0., 1.]])
    """

    step: Tensor
    reference: Tensor
    _steps: tuple[tuple[int, ...], ...]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        steps: Steps,
        *,
        alpha: float | Tensor = math.inf,
        lattice: Lattice | None = None,
        groups: int = 1,
        head_dim: int | None = None,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        try:
            given = torch.as_tensor(steps, dtype=torch.float64, device="cpu")
        except (TypeError, ValueError):  # rows of different lengths, or no numbers: `_check_arguments` says so
            given = torch.empty(0, 0, dtype=torch.float64)
        given = given[:, None] if given.ndim == 1 else given
        alphas = torch.as_tensor(alpha, dtype=torch.float64, device="cpu").expand(len(given))
        _check_arguments(in_channels, out_channels, groups, head_dim, dtype, given, alphas)
        self.in_channels, self.out_channels, self.groups, self.head_dim = in_channels, out_channels, groups, head_dim
        self.lattice = Lattice() if lattice is None else lattice
        self.exact = bool(alphas.isinf().all())
        where = {"dtype": dtype, "device": device}
        if self.exact:
            self.register_buffer("step", given.long().to(device))
        else:
            self.step = nn.Parameter(given.to(**where))
            self.spread = nn.Parameter(torch.ones(self.heads, **where))
            self.register_buffer("reference", alphas.to(**where).clone())
        self.lattice.check_axes(self.axes)
        self._steps = _round_steps(given)
        self.register_load_state_dict_post_hook(self._update_steps)
        inside = in_channels // groups
        if head_dim is None:
            self.weight = nn.Parameter(torch.empty(out_channels, inside, self.heads, **where))
        else:
            self.value = nn.Parameter(torch.empty(groups, self.heads, head_dim, inside, **where))
            self.output = nn.Parameter(torch.empty(out_channels, head_dim, self.heads, **where))
        self.bias = nn.Parameter(torch.empty(out_channels, **where)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform within one over the root of the numbers that are summed, as `torch.nn` does."""
        for name in ("weight", "value", "output", "bias"):
            if (parameter := getattr(self, name, None)) is not None:
                summed = self.in_channels // self.groups * (1 if name == "value" else self.heads)
                parameter.uniform_(-(summed**-0.5), summed**-0.5)

    @property
    def heads(self) -> int:
        return self.step.shape[0]

    @property
    def axes(self) -> int:
        """1 for a line, 2 for an image."""
        return self.step.shape[1]

    @property
    def alpha(self) -> Tensor:
        """The steepness of every head, `(head,)`."""
        if self.exact:
            return torch.full((self.heads,), math.inf, device=self.step.device)
        return self.reference * self.spread.square()

    @property
    def steps(self) -> tuple[tuple[int, ...], ...]:
        """The offset of each head of an exact layer; of a soft one its initial offset, in whole pixels."""
        return self._steps

    def matrices(self) -> Tensor:
        """`W^(h)`, `(head, out, in / groups)`: what a head adds to the output for the pixel it sees."""
        if self.head_dim is None:
            return self.weight.permute(2, 0, 1)
        output = self.output.unflatten(0, (self.groups, -1))
        return torch.einsum("godh,ghdi->hgoi", output, self.value).flatten(1, 2)

    def forward(self, image: Tensor) -> Tensor:
        batch = make_batch(image, self.axes, self.in_channels)
        attended = self._attend_pixels(batch)
        if self.head_dim is None:
            weight = self.weight
        else:
            groups, weight = attended.unflatten(1, (self.groups, -1)), self.output
            attended = torch.einsum("ghdi,bgih...->bgdh...", self.value, groups).flatten(1, 2)
        output = join_heads(attended, weight, self.groups, self.bias)
        return output if image.ndim == batch.ndim else output[0]

    def head_contributions(self, image: Tensor) -> Tensor:
        """What each head adds to the output, `(head, *output)`: they sum to it, but for the bias."""
        batch = make_batch(image, self.axes, self.in_channels)
        attended = self._attend_pixels(batch).unflatten(1, (self.groups, -1))
        matrices = self.matrices().unflatten(1, (self.groups, -1))
        parts = torch.einsum("hgoi,bgih...->hbgo...", matrices, attended).flatten(2, 3)
        return parts if image.ndim == batch.ndim else parts[:, 0]

    def weights(self, size: int | Sequence[int]) -> Tensor:
        """The square `(head, query, key)` for an image of this size, pixels read row by row; for study.

        With zeros beyond the edges the null key is the last one, `(head, query, key + 1)`. Rows sum to one.
        """
        size = (size,) if isinstance(size, int) else tuple(size)
        if len(size) != self.axes:
            raise _image_error(f"an image of {size}", self.axes, self.in_channels)
        axes, lead = self._compute_axis_weights(size)
        square = separable_weights(axes[0], axes[1]) if self.axes == 2 else axes[0]
        if lead is None:
            return square
        lead = lead.flatten(1)[..., None]
        return torch.cat((square * lead.sigmoid(), (-lead).sigmoid()), -1)

    def head_profile(self, grid: tuple[int, int] | None = None) -> HeadProfile:
        """The attention of each head by relative position; a line is a single row, and the null key is not a place.

        `grid` is how far the answer reaches; unless given, as far as weights are at least 1e-9.
        """
        step, alpha = self.step.detach(), self.alpha.detach()
        centre = nn.functional.pad(step, (2 - self.axes, 0)).to(self._dtype)
        if grid is None:
            wide = 0 if self.exact else math.ceil(math.sqrt(math.log(1e9) / float(alpha.min().clamp(min=1e-3))))
            far = centre.abs().amax(0).ceil().long() + wide
            grid = (int(far[0]) + 1 if self.axes == 2 else 1, int(far[1]) + 1)
        down, across = (torch.arange(1 - side, side, device=step.device) for side in grid)
        distance = (down - centre[:, :1]).square()[:, :, None] + (across - centre[:, 1:]).square()[:, None]
        if self.exact:
            scores = torch.zeros_like(distance).masked_fill(distance > 0, -math.inf)
            return HeadProfile(scores, centre, None, join_groups(self.matrices().detach(), self.groups))
        precision = 2 * alpha[:, None, None] * torch.eye(2).to(alpha)
        return HeadProfile(
            -alpha[:, None, None] * distance, centre, precision, join_groups(self.matrices().detach(), self.groups)
        )

    @torch.no_grad()
    def with_alpha(self, alpha: float | Tensor) -> SpatialAttention:
        """The same heads with another steepness: soft ones to train on, or `math.inf` for the hard limit.

        Steps must be whole numbers to become hard: half-way between two pixels there is no single nearest one.
        """
        arguments = {"lattice": self.lattice, "groups": self.groups, "head_dim": self.head_dim}
        made = SpatialAttention(
            self.in_channels,
            self.out_channels,
            self.step.detach().cpu(),
            alpha=alpha,
            bias=self.bias is not None,
            dtype=self._dtype,
            device=self.step.device,
            **arguments,
        )
        for name in ("weight", "value", "output", "bias"):
            if (parameter := getattr(self, name, None)) is not None:
                getattr(made, name).copy_(parameter).requires_grad_(parameter.requires_grad)
        return made.train(self.training)

    # What heads see

    def _attend_pixels(self, image: Tensor) -> Tensor:
        """What the heads see, before their values: `A_h image`, `(batch, channel, head, *query)`."""
        if self.exact:
            return self.lattice.read(image, self._steps)
        axes, lead = self._compute_axis_weights(tuple(image.shape[2:]))
        axes = [axis.to(image.dtype) for axis in axes]
        pixels = image.movedim(1, -1)
        if self.axes == 1:
            single = pixels.new_ones(self.heads, 1, 1)
            attended = separable_attention(single, axes[0], pixels[:, None])[:, 0]
        else:
            attended = separable_attention(axes[0], axes[1], pixels)
        attended = attended.movedim((-1, -2), (1, 2))
        return attended if lead is None else attended * lead.sigmoid().to(attended.dtype)

    def _compute_axis_weights(self, size: tuple[int, ...]) -> tuple[list[Tensor], Tensor | None]:
        """Weights along each axis, `(head, query, key)`, and the pixels' lead over the null key, `(head, *query)`.

        With the null key the weights of all pairs fall apart but for one factor for each query, what is left to pixels:

            A[q, k] = a_row a_column sigmoid(lead),    lead = log(Z_row Z_column) + alpha / 2
        """
        axes, total = [], torch.zeros((), device=self.step.device)
        for axis, length in enumerate(size):
            self.lattice.check_mirror(self._find_reach_beyond_edge(size, axis), length)
            weights, along = self._compute_weights_along(
                self.lattice.places(size, axis, self.step.device), axis, length
            )
            axes.append(weights)
            total = along if axis == 0 else total[:, :, None] + along[:, None]
        if self.lattice.edges != "zeros":
            return axes, None
        if self.exact:
            return axes, total.where(total < 0, math.inf)
        return axes, total + self.alpha.to(total).view(-1, *[1] * self.axes) / 2

    def _compute_weights_along(self, places: Tensor, axis: int, length: int) -> tuple[Tensor, Tensor]:
        """The weights of queries at these places of an axis, and the logarithms of what they were divided by."""
        if self.exact:
            pixel = self.lattice.pixel(places + self.step[:, axis, None], length)
            hit = pixel[..., None] == torch.arange(length, device=pixel.device)
            return hit.to(self._dtype), hit.any(-1).to(self._dtype).log()
        # Scores are made in at least float32: a shorter format does not know all pixels apart.
        step = self.step.to(torch.promote_types(self._dtype, torch.float32))
        return self.lattice.soft_weights(places + step[:, axis, None], self.alpha.to(step), length)

    def _find_reach_beyond_edge(self, size: tuple[int, ...], axis: int) -> int:
        """How many pixels beyond the edge the farthest offset reaches."""
        last = (self.lattice.queries(size)[axis] - 1) * self.lattice.strides(self.axes)[axis]
        along = [step[axis] for step in self._steps]
        return max(-min(along), max(along) + last - size[axis] + 1, 0)

    @property
    def _dtype(self) -> torch.dtype:
        return (self.weight if self.head_dim is None else self.output).dtype

    @staticmethod
    def _update_steps(module: nn.Module, _) -> None:
        assert isinstance(module, SpatialAttention)
        if not module.step.is_meta:
            module._steps = _round_steps(module.step.detach())

    def extra_repr(self) -> str:
        alpha = "inf" if self.exact else f"{[round(number, 4) for number in self.alpha.tolist()]}"
        parts = [f"{self.in_channels}, {self.out_channels}, heads={self.heads}, alpha={alpha}, {self.lattice}"]
        parts += [f"groups={self.groups}"] if self.groups > 1 else []
        parts += [f"head_dim={self.head_dim}"] if self.head_dim is not None else []
        return ", ".join(parts)


def _round_steps(steps: Tensor) -> tuple[tuple[int, ...], ...]:
    """Steps as Python's numbers, so that picking pixels never asks a device where they are."""
    return tuple(tuple(step) for step in steps.round().long().tolist())


def make_batch(image: Tensor, axes: int, channels: int) -> Tensor:
    """Images with a batch axis; refuses those of another shape."""
    if image.ndim - axes not in (1, 2) or image.shape[-axes - 1] != channels:
        raise _image_error(f"a tensor {tuple(image.shape)}", axes, channels)
    return image if image.ndim == axes + 2 else image[None]


def join_groups(matrices: Tensor, groups: int) -> Tensor:
    """Matrices `(head, out, in / groups)` with the zeros between groups, `(head, out, in)`."""
    blocks = matrices.unflatten(1, (groups, -1))
    return torch.stack([torch.block_diag(*parts) for parts in blocks])


def join_heads(attended: Tensor, weight: Tensor, groups: int, bias: Tensor | None) -> Tensor:
    """The output `(batch, out, *query)` of what heads see, `(batch, channel, head, *query)`.

        output[o] = bias[o] + sum_{c, h} weight[o, c, h] seen[c, h]

    `weight` is `(out, channel / groups, head)`. One product for all heads: side by side they meet one matrix, as the
    heads of any multi-head attention do.
    """
    queries = attended.shape[3:]
    columns = attended.reshape(len(attended), groups, math.prod(attended.shape[1:3]) // groups, math.prod(queries))
    rows = weight.reshape(groups, weight.shape[0] // groups, -1)
    # `rows[0] @ columns` would turn all images round to make a single product of them.
    one = groups == 1
    output = torch.bmm(rows.expand(len(attended), -1, -1), columns[:, 0]) if one else (rows @ columns).flatten(1, 2)
    if bias is not None:
        output = output + bias[:, None].to(output.dtype)  # autocast multiplies in a shorter format
    return output.unflatten(-1, queries)


def _image_error(found: str, axes: int, channels: int) -> InputError:
    places = "row, column" if axes == 2 else "position"
    return InputError(
        "This is not an image for these heads.",
        asked=f"(batch, {channels}, {places}) or ({channels}, {places})",
        found=found,
        because="heads step along rows and columns, or along a line, and channels come first",
        instead="image.movedim(-1, 1), if channels come last",
    )


def _check_arguments(
    in_channels: int,
    out_channels: int,
    groups: int,
    head_dim: int | None,
    dtype: torch.dtype,
    steps: Tensor,
    alpha: Tensor,
) -> None:
    because = ""
    if min(in_channels, out_channels, groups, head_dim or 1) < 1 or in_channels % groups or out_channels % groups:
        because = "channels are whole numbers of at least 1, and groups divide both"
    elif steps.ndim != 2 or steps.shape[1] not in (1, 2) or not len(steps) or not bool(steps.isfinite().all()):
        because = (
            "there is at least one head, and each has one step along a line, or one along rows and one along columns"
        )
    elif not bool((alpha >= 0).all()):
        because = "with a negative steepness a head would attend least to its centre"
    elif bool(alpha.isinf().any()) and not bool(alpha.isinf().all()):
        because = "hard heads pick pixels and soft ones mix them; a layer does one or the other"
    elif bool(alpha.isinf().all()) and not torch.equal(steps, steps.round()):
        because = "a hard head between pixels has no single nearest one: its neighbours tie"
    elif not dtype.is_floating_point:
        because = f"weights are real numbers, and {dtype} holds others"
    if because:
        raise ConfigError(
            "This spatial attention cannot be built.",
            asked=f"{in_channels} to {out_channels} channels in {groups} groups, head_dim={head_dim}, {dtype},\n"
            f"steps {steps.tolist() or 'that make no table of numbers'}, alpha {alpha.tolist()}",
            because=because,
            instead="SpatialAttention(3, 5, steps=[(0, -1), (0, 0), (0, 1)]); a finite alpha for steps between pixels",
        )
