"""The relative bias of Transformer-XL, which depends on queries and keys too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard.biases._arguments import (
    check_grid,
    check_heads,
    check_integer,
    draw_normal,
    format_arguments,
    to_default_dtype,
)
from regard.biases._encodings import feature_count, sinusoids
from regard.biases._geometry import find_deltas, find_distinct, zero_off_grid
from regard.biases.base import Bias
from regard.errors import BiasError

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class TransformerXL(Bias):
    r"""Scores between content and relative position, and a global bias for each.

        score[h, i, j] = scale * ( q[h, i] . r[h, delta] + u[h] . k[h, j] + v[h] . r[h, delta] )
        r[h, delta] = W[h] encoding(delta),   delta = position(j) - position(i)

    with `q` and `k` the projected queries and keys, `W` the parameter `projection` `(head, dim, feature)`,
    and `u` and `v` parameters `(head, dim)`. Together with the attention's own `scale * q . k` these are the
    paper's four terms; `scale` is `1 / sqrt(dim)`, like the attention's, unless given. `delta` is key minus query: one
    number on a sequence, or (row, column) on a `grid` in row-major order from position `start`. If a token is
    outside the grid, `r` is 0 for its pairs; `u . k`, which does not depend on position, stays.

    `r` is computed once per distinct delta of a tile: `rows + columns - 1` of them between neighbouring tokens.

    Source: Dai et al., "Transformer-XL" (ACL 2019), section 3.3; on a grid Cordonnier, Loukas and Jaggi (ICLR
    2020), equation (8).

    Where we differ: the paper encodes query minus key and puts all sines before all cosines; here they
    alternate. So a checkpoint's `W` needs its columns interleaved and the sine columns negated. All
    parameters start as N(0, 0.02^2), as in the authors' code.

    Args:
        heads: number of heads.
        dim: head dim of queries and keys.
        encoding: takes one integer tensor of deltas per axis and returns `(*deltas, feature)`; by default
            sinusoids, `heads * dim` of them as in the paper (on a grid half for rows, half for columns).
        grid: rows and columns; `None` is a sequence.
        start: position of the grid's first token, 1 after a class token.
        scale: factor of the three terms.
        generator: random generator of the initial parameters.
        dtype, device: of the parameters; torch's defaults if not given.

    >>> bias = TransformerXL(heads=3, dim=4)
    >>> query, key, position = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.arange(7)
    >>> tuple(bias.content_scores(position[2:], position, query, key).shape)
    (2, 3, 5, 7)
    """

    needs_content = True
    heads_first = True

    def __init__(
        self,
        heads: int,
        dim: int,
        encoding: Callable[..., Tensor] | None = None,
        grid: Sequence[int] | None = None,
        start: int = 0,
        scale: float | None = None,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.heads = check_heads("TransformerXL", heads)
        self.dim = check_integer(
            "TransformerXL",
            "dim",
            dim,
            1,
            because="dim is the size of one head's queries and keys",
            instead="the last size of the query, for instance dim=64",
        )
        self.grid, self.start = check_grid("TransformerXL", grid, start)
        self._scale = scale
        self.scale = self.dim**-0.5 if scale is None else float(scale)
        self._encoding = encoding
        self.encoding = sinusoids(self.heads * self.dim, self.grid) if encoding is None else encoding
        features = feature_count(self.encoding, axes=1 if self.grid is None else 2, device=device)

        def drawn(*shape: int) -> nn.Parameter:
            return nn.Parameter(to_default_dtype(draw_normal(shape, std=0.02, generator=generator), dtype, device))

        self.projection = drawn(self.heads, self.dim, features)
        self.u = drawn(self.heads, self.dim)
        self.v = drawn(self.heads, self.dim)

    def scores(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        raise self._make_content_error("scores(query_position, key_position)")

    def score(self, head: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        raise self._make_content_error("score(head, query_position, key_position)")

    def _make_content_error(self, asked: str) -> BiasError:
        return BiasError(
            "TransformerXL has no scores without content.",
            asked=asked,
            found="positions, but no queries and no keys",
            because="two of its terms multiply the projected queries and keys",
            instead="content_scores(query_position, key_position, query, key)",
        )

    def content_scores(
        self,
        query_position: Int[Tensor, "*tile query"],
        key_position: Int[Tensor, "*tile key"],
        query: Float[Tensor, "batch head *tile query dim"],
        key: Float[Tensor, "batch head *tile key dim"],
    ) -> Float[Tensor, "batch head *tile query key"]:
        """The bias of every pair of every tile; the caller repeats grouped key heads."""
        self._check(query, key)
        u, v = self.u.to(query.dtype), self.v.to(query.dtype)
        from_content = torch.einsum("bh...kd,hd->bh...k", key, u).unsqueeze(-2)
        along, inside = find_deltas(query_position.unsqueeze(-1), key_position.unsqueeze(-2), self.grid, self.start)
        pairs = along[0].shape
        if 0 in pairs:
            return self.scale * from_content.expand(*query.shape[:-1], key.shape[-2])
        values, which = find_distinct(self._encode(along).flatten(-2))
        r = self._project_encoding(values, query.dtype)
        toward = query + v.reshape(-1, *(1 for _ in pairs[:-1]), self.dim)
        by_delta = torch.einsum("bh...qd,h...nd->bh...qn", toward, r)
        index = which.reshape(pairs).expand(*by_delta.shape[:2], *pairs)
        return self.scale * (zero_off_grid(by_delta.gather(-1, index), inside) + from_content)

    def _project_encoding(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """`r` for the encoded deltas `values` `(*tile, distinct)`: `(head, *tile, distinct, dim)`."""
        once, which = values.unique(return_inverse=True)  # tiles share most of their deltas
        encoded = self.encoding(*self._decode(once)).to(dtype)
        return torch.einsum("hdf,nf->hnd", self.projection.to(dtype), encoded)[:, which]

    def _encode(self, along: tuple[Tensor, ...]) -> Tensor:
        """One integer per pair, equal exactly where the deltas are."""
        if self.grid is None:
            return along[0]
        rows, columns = self.grid
        return (along[0] + rows - 1) * (2 * columns - 1) + along[1] + columns - 1

    def _decode(self, codes: Tensor) -> tuple[Tensor, ...]:
        if self.grid is None:
            return (codes,)
        rows, columns = self.grid
        return codes // (2 * columns - 1) - (rows - 1), codes % (2 * columns - 1) - (columns - 1)

    def _check(self, query: Tensor, key: Tensor) -> None:
        fits = query.dim() >= 4 and query.dim() == key.dim() and query.shape[:-2] == key.shape[:-2]
        if not fits or query.shape[-1] != key.shape[-1] or query.shape[-1] != self.dim:
            because = f"q . r, u . k and v . r are products of {self.dim} numbers for each batch row, head and tile"
        elif self.heads not in (1, query.shape[1]):
            because = f"u, v and W exist for {self.heads} heads, the queries have {query.shape[1]}"
        else:
            return
        raise BiasError(
            "TransformerXL does not fit these queries and keys.",
            asked=repr(self),
            found=f"query {tuple(query.shape)}  key {tuple(key.shape)}",
            because=because,
            instead="query and key of shapes (batch, head, *tile, token, dim), grouped key heads repeated",
        )

    def extra_repr(self) -> str:
        encoding = getattr(self._encoding, "__name__", self._encoding)
        words = format_arguments(heads=self.heads, dim=self.dim)
        words += "" if encoding is None else f", encoding={encoding}"
        rest = format_arguments(grid=self.grid, start=self.start or None, scale=self._scale)
        return f"{words}, {rest}" if rest else words
