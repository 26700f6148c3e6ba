"""Head profiles: the attention weights of positional heads by relative position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from regard.biases import Bias, Gaussian, Quadratic
from regard.errors import InputError


@dataclass(frozen=True, eq=False)
class HeadProfile:
    r"""The attention of positional heads by relative position `delta` = key minus query, (row, column).

        weights[h, delta] = exp(scores[h, delta]) / sum over all delta of exp(scores[h, delta])

    A grid of `R` rows and `C` columns knows `(2 R - 1) (2 C - 1)` relative positions, and `weights` is the softmax over
    all of them: what a query in the middle of an endless image does. A query of the grid sees the part of it that lies
    on the grid, normalised anew.

    It is a picture, not a part of a model: the tensors are copies without gradients, and training does not move them.

    Attributes:
        scores: `(head, 2 R - 1, 2 C - 1)`, entry `[h, row + R - 1, column + C - 1]`; -inf has weight 0.
        centre: `(head, 2)`, the parameter, where there is one.
        precision: `(head, 2, 2)`, the inverse covariance `Sigma^-1` of the parameters, where there is one.
        values: `(head, out, in)`, `W[h]`: what a head adds to the output for the pixel it sees, where that is known.

    Source: Cordonnier, Loukas and Jaggi, On the Relationship between Self-Attention and Convolutional Layers
    (ICLR 2020), section 4: centres and widths while training. Where we differ: `mean`, the centre of mass, is told
    beside the parameter `centre`. They agree while a head is soft; a hard head (`alpha` above about 1) whose centre
    lies between pixels attends to the nearest ones.

        >>> from regard.layers.profiles import head_profile
        >>> found = head_profile(Quadratic(1, grid=(8, 9), centre=[[0, 1]], alpha=0.5))
        >>> found, f"{found.mean[0, 1]:.3f}", f"{found.width[0]:.3f}"
        (HeadProfile(heads=1, grid=(8, 9)), '1.000', '1.000')
    """

    scores: Tensor
    centre: Tensor | None = None
    precision: Tensor | None = None
    values: Tensor | None = None

    def __post_init__(self) -> None:
        wanted = {"centre": (2,), "precision": (2, 2), "values": (None, None)}
        fine = self.scores.ndim == 3 and all(side % 2 for side in self.scores.shape[1:])
        for name, shape in wanted.items():
            given = getattr(self, name)
            if given is None:
                continue
            fits = given.ndim == 1 + len(shape) and len(given) == len(self.scores)
            fine &= fits and all(side in (None, found) for side, found in zip(shape, given.shape[1:], strict=True))
        if not fine:
            given = {field.name: getattr(self, field.name) for field in fields(self)}
            raise InputError(
                "These tensors are no head profile.",
                asked=", ".join(f"{name} {tuple(value.shape)}" for name, value in given.items() if value is not None),
                because="scores are (head, 2 R - 1, 2 C - 1), centre is (head, 2), precision (head, 2, 2) and values\n"
                "(head, out, in)",
                instead="head_profile(layer), which makes them",
            )
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                object.__setattr__(self, field.name, value.detach().clone())  # frozen outside of this method

    def __repr__(self) -> str:
        return f"HeadProfile(heads={self.heads}, grid={self.grid})"

    @property
    def heads(self) -> int:
        return self.scores.shape[0]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns, `R` and `C`."""
        return (self.scores.shape[1] + 1) // 2, (self.scores.shape[2] + 1) // 2

    @property
    def weights(self) -> Tensor:
        """`(head, 2 R - 1, 2 C - 1)`: the softmax of the scores over all relative positions; zeros if none is seen."""
        scores = self.scores.flatten(1)
        blind = scores.amax(-1, keepdim=True) == -torch.inf
        return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0).view_as(self.scores)

    # What the weights are like

    @property
    def mean(self) -> Tensor:
        """The centre of mass of the weights, `(head, 2)`."""
        return self.weights.flatten(1) @ self._deltas

    @property
    def covariance(self) -> Tensor:
        """The covariance of the weights, `(head, 2, 2)`."""
        off = self._deltas - self.mean[:, None]  # (head, delta, 2)
        return torch.einsum("hd,hda,hdb->hab", self.weights.flatten(1), off, off)

    @property
    def width(self) -> Tensor:
        """The standard deviation of the weights along an axis, the mean of both: `sqrt(trace(covariance) / 2)`."""
        return (self.covariance.diagonal(dim1=1, dim2=2).sum(-1) / 2).sqrt()

    def mass_level(self, mass: float) -> Tensor:
        """The largest weight `w`, `(head,)`, such that the positions with weight `>= w` hold at least `mass` together.

        The contour at this level encloses the probability `mass` of the head's attention.

            >>> from regard.layers.profiles import HeadProfile
            >>> halves = HeadProfile(torch.tensor([[[0.5, 0.25, 0.25]]]).log())
            >>> [round(halves.mass_level(mass).item(), 2) for mass in (0.5, 0.6, 0.9)]
            [0.5, 0.25, 0.25]
        """
        if not 0 < mass <= 1:
            raise InputError(
                f"There is no level for a mass of {mass}.",
                because="the weights of a head sum to one",
                instead="mass=0.5, or another number above 0 and up to 1",
            )
        ordered = self.weights.flatten(1).sort(-1, descending=True).values
        # What is summed has rounding errors: a mass that is reached but for these is reached.
        enough = ordered.double().cumsum(-1) >= mass - torch.finfo(ordered.dtype).eps * ordered.shape[1]
        return ordered.gather(1, enough.int().argmax(-1, keepdim=True))[:, 0]

    def inside(self, mass: float) -> Tensor:
        """Which relative positions lie within the contour of this mass, `(head, 2 R - 1, 2 C - 1)`."""
        return self.weights >= self.mass_level(mass)[:, None, None]

    def coverage(self, mass: float = 0.5) -> int:
        """How many relative positions lie within the contour of at least one head."""
        return int(self.inside(mass).any(0).sum())

    def degenerate(self, condition: float = 1000.0, least: float = 1e-5) -> Tensor:
        r"""Which heads attend to no position in particular, `(head,)`.

            cond(Sigma^-1) > condition   or   largest eigenvalue of Sigma^-1 < least

        the rule by which the paper's code drops heads: such a head is flat along one direction, or everywhere. A head
        without a `precision` (tables) is judged by its scores alone. It is degenerate when they differ by less than
        `least / 2 ((R - 1)^2 + (C - 1)^2)`, which is the most that scores of a Gaussian with this largest eigenvalue
        and its centre in the middle differ by, or when it attends nowhere; a table that is flat along one direction
        only is not.
        """
        if self.precision is not None:
            eigenvalues = torch.linalg.eigvalsh(self.precision.double())
            low, high = eigenvalues.clamp(min=0).unbind(-1)
            return (high > condition * low) | (high < least)
        rows, columns = self.grid
        scores = self.scores.flatten(1).double()
        high, low = scores.amax(-1), scores.amin(-1)
        return (high - low < least / 2 * ((rows - 1) ** 2 + (columns - 1) ** 2)) | (high == -torch.inf)

    # What the heads do together

    @property
    def kernel(self) -> Tensor:
        """The effective kernel `sum_h weights[h] W[h]`, `(out, in, 2 R - 1, 2 C - 1)`.

        What the layer does to an endless image: a convolution with this kernel, entry `delta` for the pixel at `delta`.
        """
        return torch.einsum("hrc,hoi->oirc", self.weights, self._require_values())

    @property
    def kernel_norm(self) -> Tensor:
        """The Frobenius norm of the kernel, without building it: `|K|^2 = sum_hg (a_h . a_g) (W_h . W_g)`."""
        weights, values = self.weights.flatten(1), self._require_values().flatten(1)
        return ((weights @ weights.T) * (values @ values.T)).sum().clamp(min=0).sqrt()

    def _require_values(self) -> Tensor:
        if self.values is None:
            raise InputError(
                "The effective kernel is not known.",
                asked=repr(self),
                found="no values",
                because="attention weights alone do not determine what a head adds to the output",
                instead="head_profile(layer) of a layer with values, or HeadProfile(..., values=W)",
            )
        return self.values

    @property
    def _deltas(self) -> Tensor:
        """All relative positions in the order of the scores, `(delta, 2)`."""
        axes = [torch.arange(1 - size, size, device=self.scores.device) for size in self.grid]
        return torch.cartesian_prod(*axes).to(self.scores.dtype)

    # Files

    def to_tensors(self) -> dict[str, Tensor]:
        """What is there, by its name: for safetensors."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value.contiguous() for name, value in given.items() if value is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> HeadProfile:
        """The head profile again; names that a head profile does not have are refused."""
        known = [field.name for field in fields(cls)]
        if "scores" not in tensors or any(name not in known for name in tensors):
            raise InputError(
                "These tensors are no head profile.",
                asked=", ".join(tensors) or "no tensors",
                because=f"a head profile has scores, and may have {', '.join(known[1:])}",
                instead="what to_tensors() gave",
            )
        return cls(**tensors)

    @classmethod
    def observed(cls, weights: Tensor, grid: tuple[int, int], values: Tensor | None = None) -> HeadProfile:
        """The mean attention of content-based heads: weights `(batch, head, query, key)`, averaged.

            weight[h, delta] = mean over images and over the queries that have a key at delta

        normalised over all `delta`. A relative position from one corner to the other is met by a single query, the
        neighbours by nearly all: what is far away is known less well.

            >>> from regard.layers.profiles import HeadProfile
            >>> HeadProfile.observed(torch.eye(6)[None, None], (2, 3)).weights[0]
            tensor([[0., 0., 0., 0., 0.],
                    [0., 0., 1., 0., 0.],
                    [0., 0., 0., 0., 0.]])
        """
        rows, columns = grid
        if weights.ndim != 4 or weights.shape[2:] != (rows * columns,) * 2:
            raise InputError(
                "These weights do not fit the grid.",
                asked=f"weights {tuple(weights.shape)} on a grid of {rows} x {columns}",
                because="weights are (batch, head, query, key), and every token of the grid is a query and a key",
                instead=f"weights (batch, head, {rows * columns}, {rows * columns})",
            )
        square = weights.detach().mean(0)
        place = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).to(square.device)
        delta = place - place[:, None] + torch.tensor([rows - 1, columns - 1], device=square.device)
        entry = (delta[..., 0] * (2 * columns - 1) + delta[..., 1]).flatten()
        total = square.new_zeros(len(square), (2 * rows - 1) * (2 * columns - 1))
        total.index_add_(1, entry, square.flatten(1))
        scores = (total / entry.bincount().to(square)).log()
        return cls(scores.unflatten(1, (2 * rows - 1, 2 * columns - 1)), values=values)


def head_profile(source: nn.Module) -> HeadProfile:
    """The attention by relative position of the heads of a layer, or of a relative bias on a grid.

    A layer answers itself, by a method `head_profile()`. A bias is asked for the score of every relative position.

        >>> from regard.layers.profiles import head_profile
        >>> head_profile(RelativeTable(3, grid=(5, 7)))
        HeadProfile(heads=3, grid=(5, 7))
    """
    if hasattr(source, "head_profile"):
        answer: Any = source.head_profile
        return answer()
    if isinstance(source, Bias) and source.relative and getattr(source, "grid", None) is not None:
        return _profile_of_bias(source)
    if isinstance(source, Bias) and not source.needs_content:
        because = "its scores do not follow from relative rows and columns"
    else:
        because = "content-based attention differs from query to query"
    raise InputError(
        f"{type(source).__name__} has no fixed attention by position.",
        asked=f"head_profile({type(source).__name__})",
        because=because,
        instead="a relative bias on a grid, a layer with head_profile(), or HeadProfile.observed(weights, grid)",
    )


def head_profiles(model: nn.Module) -> dict[str, HeadProfile]:
    """The head profile of each positional layer of a model, by the module's name; content-based layers are left out.

    >>> from regard.layers.profiles import head_profiles
    >>> from regard.models.spatial import SpatialConfig, SpatialTransformer
    >>> head_profiles(SpatialTransformer(SpatialConfig(image=(6, 10), dim=8, heads=4, layers=2)))
    {'blocks.0.attention': HeadProfile(heads=4, grid=(3, 5)), 'blocks.1.attention': HeadProfile(heads=4, grid=(3, 5))}
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{type(model).__name__} is no model.",
            asked=f"head_profiles({type(model).__name__})",
            because="positional layers are found among the modules of a torch.nn.Module",
            instead="head_profiles(SpatialTransformer(config))",
        )
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "head_profile"):
            try:
                found[name] = head_profile(module)
            except InputError:  # content-based attention
                continue
    return found


def relative_scores(bias: Bias) -> Tensor:
    """A relative bias at every relative position of its grid, `(head, 2 R - 1, 2 C - 1)`, with gradients."""
    grid, start = getattr(bias, "grid", None), getattr(bias, "start", 0)
    if grid is None:
        raise InputError(
            f"{type(bias).__name__} has no grid.",
            asked=repr(bias),
            because="relative rows and columns are those of a grid",
            instead="a bias with grid=(rows, columns)",
        )
    rows, columns = grid
    example = next(iter(bias.parameters()), None)
    device = None if example is None else example.device
    row, column = torch.arange(1 - rows, rows, device=device), torch.arange(1 - columns, columns, device=device)
    # The query lies where the key still finds room on the grid.
    query = row.neg().clamp(min=0)[:, None] * columns + column.neg().clamp(min=0) + start
    return bias.scores(query, query + row[:, None] * columns + column)


@torch.no_grad()
def _profile_of_bias(bias: Bias) -> HeadProfile:
    scores = relative_scores(bias)
    if isinstance(bias, Quadratic):
        return HeadProfile(scores, bias.centre, 2 * bias.alpha[:, None, None] * torch.eye(2).to(bias.alpha))
    if isinstance(bias, Gaussian):
        return HeadProfile(scores, bias.centre, bias.precision)
    return HeadProfile(scores)
