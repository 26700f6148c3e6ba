"""An image classifier whose heads attend by position alone and learn to convolve.

Cordonnier, Loukas and Jaggi, On the Relationship between Self-Attention and Convolutional Layers (ICLR 2020).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from regard.attention import attend
from regard.biases import Bias, Gaussian, Quadratic, axis_scores, distances, table_scores
from regard.biases.base import ElementwiseBias
from regard.calculus import axis_weights, separable_attention, separable_weights
from regard.errors import ConfigError, InputError
from regard.layers.linear import Linear
from regard.layers.patches import check_pixels
from regard.layers.profiles import HeadProfile, head_profile, relative_scores
from regard.models.config import Config
from regard.models.pretrained import Pretrained
from regard.models.validation import check_sizes, check_tensor

POSITIONS = ("quadratic", "gaussian", "learned", "content")


@dataclass(frozen=True)
class SpatialConfig(Config):
    """What a `SpatialTransformer` is built from; the defaults are the paper's, for CIFAR-10.

    Attributes:
        position: the scores of a head: `"quadratic"` (a centre and a spread), `"gaussian"` (a centre and a full
            covariance), `"learned"` (rows and columns from tables), `"content"` (tables and content).
        image, channels, patch: rows and columns of an image, its channels, and the side of a patch, in pixels.
        dim, layers, hidden_dim: hidden size, blocks, channels of the feed-forward part.
        heads: one number for all layers, or one for each, as after pruning heads.
        classes: number of logits.
        dropout, attention_dropout: while training, on residuals and on attention weights.
        norm_eps: of the norms.

        >>> from regard.models.spatial import SpatialConfig
        >>> SpatialConfig(image=(32, 48)).grid
        (16, 24)
    """

    position: str = "quadratic"
    image: tuple[int, int] = (32, 32)
    channels: int = 3
    patch: int = 2
    dim: int = 400
    layers: int = 6
    heads: int | tuple[int, ...] = 9
    hidden_dim: int = 512
    classes: int = 10
    dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        def refuse(asked: str, because: str, instead: str) -> None:
            raise ConfigError("SpatialConfig cannot be built.", asked=asked, because=because, instead=instead)

        check_sizes(self, "channels", "patch", "dim", "layers", "hidden_dim", "classes")
        if len(self.layer_heads) != self.layers or min(self.layer_heads) < 1:
            refuse(
                f"heads={self.heads}, layers={self.layers}",
                "every layer has at least one head",
                "heads=9, or a number of heads for each layer",
            )
        if self.position not in POSITIONS:
            known = ", ".join(map(repr, POSITIONS))
            refuse(f"position={self.position!r}", f"known are {known}", 'position="quadratic"')
        if min(self.image) < 1 or any(side % self.patch for side in self.image):
            refuse(
                f"image={self.image}, patch={self.patch}",
                "an image is cut into whole patches of patch x patch pixels",
                "sides that are multiples of the patch",
            )
        if self.position == "content" and self.dim % 2:
            refuse(
                f'position="content", dim={self.dim}',
                "half of a query meets the rows' table, half the columns'",
                "an even dim",
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return self.image[0] // self.patch, self.image[1] // self.patch

    @property
    def layer_heads(self) -> tuple[int, ...]:
        """The number of heads of every layer."""
        return self.heads if isinstance(self.heads, tuple) else (self.heads,) * self.layers


class SpatialTransformer(Pretrained):
    r"""Classify images by self-attention whose heads keep the full dimension and mostly attend by position.

        tokens = space_to_depth(image) W + b                                       2 x 2 pixels, 12 -> D
        y = norm(x + dense(sum_h A_h x V_h + b))                                   six times, and
        x = norm(y + gelu(y W1 + b1) W2 + b2)
        logits = mean over tokens of x, W + b

    `A_h` is the softmax over all keys of, for `delta` = key minus query in (row, column):

        quadratic   -alpha_h |delta - centre_h|^2,  alpha = spread^2 / 2             separable
        gaussian    -1/2 (delta - centre_h)^T S_h S_h^T (delta - centre_h)
        learned     w_h . row[delta_1] + u_h . column[delta_2]                      separable
        content     (q_h . k_h + q_h . [row[delta_1], column[delta_2]]) / sqrt(D)

    Source: the paper, and the parameters of its published code, counted to the unit. With `D` = 400, `H` heads,
    a grid of 16 x 16 and six layers, none of which shares anything:

        embedding 12 D + D, classifier 10 D + 10
        each layer  values H D D + D, dense D D + D, feed-forward 2 * 512 D + 512 + D, two norms 4 D
                    quadratic + 3 H (centre, spread)            gaussian + 6 H (centre, S)
                    learned + 2 * 31 D + 2 H D (two tables, two vectors for each head)
                    content + 2 * 31 D / 2 + 2 (H D D + H D) (two tables of half vectors; queries and keys, biased)

    which is 12 086 844, 12 087 006, 12 278 682 and 29 484 282 for nine heads, 18 806 970 for sixteen quadratic ones.
    Positional heads have no queries, keys or values of their own: each averages the same tokens, and the
    one matrix `V` of H D x D reads their concatenation. Biases start as in the paper, the rest as torch does.

    Where we differ: the grid need not be square. Where the weights are a product over the two axes they are never
    multiplied out (`separable_attention`), except in training with `attention_dropout`, which drops weights of single
    pairs: there, and for a slanted covariance, the scores are a bias of `attend`. With content, the two tables become
    more features: `[q, q . row, q . column]` meets `[k, one-hot row, one-hot column]`, an ordinary attention without a
    bias. Channels after `space_to_depth` are in the order of `torch.nn.functional.pixel_unshuffle`.

        >>> from regard.models.spatial import SpatialConfig, SpatialTransformer
        >>> model = SpatialTransformer(SpatialConfig(image=(6, 10), dim=8, heads=4, layers=2)).eval()
        >>> model(torch.randn(3, 3, 6, 10)).shape
        torch.Size([3, 10])
    """

    Config = SpatialConfig
    config: SpatialConfig

    def __init__(self, config: SpatialConfig) -> None:
        super().__init__(config)
        self.embedding = Linear(config.channels * config.patch**2, config.dim)
        self.blocks = nn.ModuleList(SpatialBlock(config, heads) for heads in config.layer_heads)
        self.classifier = Linear(config.dim, config.classes)

    def forward(self, image: Tensor) -> Tensor:
        """The logits `(batch, class)` of images `(batch, channel, row, column)`."""
        return self.classifier(self.features(image).mean(dim=(1, 2)))

    def features(self, image: Tensor) -> Tensor:
        """The last layer's tokens, `(batch, row, column, dim)`."""
        wanted = (self.config.channels, *self.config.image)
        check_tensor("images", image, "torch.randn(1, 1, 28, 28)")
        if image.ndim != 4 or tuple(image.shape[1:]) != wanted:
            raise InputError(
                "The images do not fit the model.",
                asked=f"images of shape {tuple(image.shape)}",
                found=f"a model for (batch, channel, row, column) = (any, {', '.join(map(str, wanted))})",
                because="the number of tokens and the tables of positions follow from the size of the image",
                instead="images resized to that, or a SpatialConfig with image=(rows, columns) and channels=...",
            )
        check_pixels(image, self.embedding.weight)
        x = functional.pixel_unshuffle(image, self.config.patch).permute(0, 2, 3, 1)
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x


class SpatialBlock(nn.Module):
    """Attention, then a feed-forward part, each added to its input and normalised: see `SpatialTransformer`."""

    def __init__(self, config: SpatialConfig, heads: int) -> None:
        super().__init__()
        self.attention = SpatialHeads(config, heads)
        self.dense = Linear(config.dim, config.dim)
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.inner = Linear(config.dim, config.hidden_dim)
        self.outer = Linear(config.hidden_dim, config.dim)
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.dense(self.attention(x))))
        hidden = functional.gelu(self.inner(x))
        return self.norm(x + self.dropout(self.outer(hidden)))


class SpatialHeads(nn.Module):
    """Heads of full dimension over a grid of tokens `(batch, row, column, dim)`: see `SpatialTransformer`.

    `position` gives the scores by position: a `Quadratic` or `Gaussian` bias, or the tables of relative rows and
    columns.
    """

    def __init__(self, config: SpatialConfig, heads: int | None = None) -> None:
        super().__init__()
        heads = config.layer_heads[0] if heads is None else heads
        self.grid, self.heads, self.dim = config.grid, heads, config.dim
        self.attention_dropout = config.attention_dropout
        if config.position == "quadratic":
            self.position = Quadratic(heads, config.grid)
        elif config.position == "gaussian":
            self.position = Gaussian(heads, config.grid)
        elif config.position == "learned":
            self.position = LearnedPosition(config.grid, config.dim, heads)
        else:
            self.position = ContentPosition(config.grid, config.dim // 2)
            self.query = Linear(config.dim, heads * config.dim)
            self.key = Linear(config.dim, heads * config.dim)
        self.value = Linear(heads * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        dropout = self.attention_dropout if self.training else 0.0
        if not dropout and (axes := self._compute_axis_weights()) is not None:
            rows, columns = (axis.to(x.dtype) for axis in axes)
            return self.value(separable_attention(rows, columns, x).flatten(3))
        tokens = x.flatten(1, 2)[:, None]  # one key head that all query heads share
        if isinstance(self.position, Bias):
            nothing = tokens.new_zeros(1, 1, 1, 1).expand(*tokens.shape[:3], 1)
            query = nothing.expand(-1, self.heads, -1, -1)
            heads = attend(query, nothing, tokens, scale=0, bias=self.position, dropout=dropout)
        else:
            query, key = self._compute_content_features(x)
            value = tokens.expand(-1, self.heads, -1, -1)
            heads = attend(query, key, value, scale=1 / math.sqrt(self.dim), dropout=dropout)
        return self.value(heads.transpose(1, 2).reshape(*x.shape[:3], -1))

    def weights(self, x: Tensor) -> Tensor:
        """The square `(batch or 1, head, query, key)`, for study."""
        if (axes := self._compute_axis_weights()) is not None:
            return separable_weights(*axes)[None]
        if isinstance(self.position, Gaussian):
            token = torch.arange(self.grid[0] * self.grid[1], device=x.device)
            return self.position.scores(token[:, None], token).softmax(-1)[None]
        query, key = self._compute_content_features(x)
        return (query @ key.mT / math.sqrt(self.dim)).softmax(-1)

    def head_profile(self) -> HeadProfile:
        """The attention of the heads by relative position, and their values; content-based heads are refused.

        The values are those of this layer alone; what a block adds is its `dense` of that.
        """
        values = self.value.weight.unflatten(1, (self.heads, self.dim)).transpose(0, 1)  # (head, out, in)
        if isinstance(self.position, LearnedPosition):
            return HeadProfile(relative_scores(self.position), values=values)
        profile = head_profile(self.position)
        return HeadProfile(profile.scores, profile.centre, profile.precision, values)

    def relative_weights(self) -> Tensor:
        """What a query in the middle of an endless image gives to every relative position, with gradients."""
        if not isinstance(self.position, Bias):
            return head_profile(self.position).weights  # refuses content-based attention
        scores = relative_scores(self.position)
        return scores.flatten(1).softmax(-1).view_as(scores)

    def _compute_axis_weights(self) -> tuple[Tensor, Tensor] | None:
        """Weights over rows and over columns, when the weights of all pairs are their products."""
        if isinstance(self.position, LearnedPosition):
            return axis_weights(*self.position.axis_scores())
        scores = axis_scores(self.position) if isinstance(self.position, Quadratic) else None
        return None if scores is None else axis_weights(*scores)

    def _compute_content_features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys whose inner product is the score with content times `sqrt(D)`."""
        assert isinstance(self.position, ContentPosition)
        shape = (x.shape[0], *self.grid, self.heads, self.dim)
        query, key = self.query(x).view(shape), self.key(x).view(shape)
        row, column = self.position(query)
        one_hot = self._make_one_hot_positions(x).expand(*shape[:-1], -1)
        wide = torch.cat((query, row, column), -1), torch.cat((key, one_hot), -1)
        query, key = (features.flatten(1, 2).transpose(1, 2) for features in wide)
        return query, key

    def _make_one_hot_positions(self, x: Tensor) -> Tensor:
        """Which row and which column a token lies in, `(row, column, 1, rows + columns)`."""
        rows, columns = (torch.eye(size, dtype=x.dtype, device=x.device) for size in self.grid)
        down = rows[:, None].expand(*self.grid, -1)
        return torch.cat((down, columns.expand(*self.grid, -1)), -1)[:, :, None]


class LearnedPosition(ElementwiseBias):
    """A vector for each relative row and column, read by one vector per head and axis; no content.

    score[h, delta] = row_head[h] . row[delta_1 + R - 1] + column_head[h] . column[delta_2 + C - 1]
    """

    relative = True

    def __init__(self, grid: tuple[int, int], dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.grid = heads, grid
        bound = 1 / math.sqrt(dim)
        self.row = nn.Parameter(torch.randn(2 * grid[0] - 1, dim))
        self.column = nn.Parameter(torch.randn(2 * grid[1] - 1, dim))
        self.row_head = nn.Parameter(torch.empty(heads, dim).uniform_(-bound, bound))
        self.column_head = nn.Parameter(torch.empty(heads, dim).uniform_(-bound, bound))

    def score(self, head: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        """The scores of these heads, queries and keys, all on the grid."""
        rows, columns = self.grid
        down = key_position // columns - query_position // columns + rows - 1
        across = key_position % columns - query_position % columns + columns - 1
        return (self.row_head @ self.row.T)[head, down] + (self.column_head @ self.column.T)[head, across]

    def axis_scores(self) -> tuple[Tensor, Tensor]:
        """Scores along rows `(head, R, R)` and along columns `(head, C, C)`."""
        return table_scores(self.row_head @ self.row.T), table_scores(self.column_head @ self.column.T)


class ContentPosition(nn.Module):
    """A vector for each relative row and column, half as long as a query, read by the query's two halves."""

    def __init__(self, grid: tuple[int, int], half: int) -> None:
        super().__init__()
        self.grid = grid
        self.row = nn.Parameter(torch.randn(2 * grid[0] - 1, half))
        self.column = nn.Parameter(torch.randn(2 * grid[1] - 1, half))

    def forward(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Of `(batch, R, C, head, D)` the products with every key row, `(..., R)`, and every key column, `(..., C)`."""
        (rows, columns), half = self.grid, self.row.shape[1]
        row = self.row[distances(rows, self.row.device) + rows - 1]  # (query, key, half)
        column = self.column[distances(columns, self.column.device) + columns - 1]
        down = torch.einsum("brchd,rkd->brchk", query[..., :half], row)
        return down, torch.einsum("brchd,cld->brchl", query[..., half:], column)
