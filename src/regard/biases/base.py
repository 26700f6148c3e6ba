"""The interface of positional biases."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Bias(nn.Module):
    """Scores that depend on position, added to `scale * query . key` before the softmax.

    The matrix of scores is never materialised. `scores` takes two index tensors of absolute positions that
    broadcast against each other, and returns one score per head and pair. Backends call it tile by tile
    and differentiate the result, so a bias is written once, in plain torch, and has gradients on every
    backend.

    Attributes:
        heads: number of heads; `1` broadcasts over any number.
        needs_content: whether the scores also depend on the projected queries and keys (`TransformerXL`).
            Such a bias implements `content_scores(query_position, key_position, query, key)` instead.
        relative: whether a score depends on the relative position only: on a sequence or, when the bias has
            a `grid`, in rows and columns from its `start`. Kernels tabulate such a bias. The class that defines
            `scores` must declare it; a subclass that overrides `scores` does not inherit the declaration.
        heads_first: whether all that differs between heads are parameters and buffers whose first axis is the head, so
            that `keep_heads` can cut them. The class that defines the scores declares it, too.

    Positions are integers of any size, negative ones included, which arise with more queries than keys. On a
    grid, a pair with a token outside the grid has score 0.
    """

    heads: int = 1
    needs_content: bool = False
    relative: bool = False
    heads_first: bool = False

    def __init_subclass__(cls, **words) -> None:
        super().__init_subclass__(**words)
        if ("scores" in cls.__dict__ or "forward" in cls.__dict__) and "relative" not in cls.__dict__:
            cls.relative = False
        if cls.__dict__.keys() & {"score", "scores", "content_scores", "forward"} and "heads_first" not in cls.__dict__:
            cls.heads_first = False

    def scores(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """The bias of every pair, `(head, *pairs)`; `pairs` is the broadcast shape of the two indices."""
        raise NotImplementedError

    def score(self, head: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        """The bias of the given heads and pairs, the three indices broadcast against each other.

        `score(h, i, j)` equals `scores(i, j)[h]` but computes no other head. A compiled FlexAttention needs
        this form: with torch 2.13 on CPU, `scores(i, j)[h]` compiles there and gives wrong numbers.
        """
        raise NotImplementedError

    def keep_heads(self, start: int, stop: int) -> list[str]:
        """Keep the heads from `start` to `stop`, in place; the names of the tensors that were cut.

        Only where `heads_first`. A bias that all heads share stays as it is.
        """
        if self.heads == 1:
            return []
        names = []
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            part = tensor.detach()[start:stop].clone()
            setattr(self, name, nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part)
            names.append(name)
        self.heads = stop - start
        return names

    def forward(self, *positions_and_content: Tensor) -> Tensor:
        """`scores`, or `content_scores` if the bias needs content."""
        scores = self.content_scores if self.needs_content else self.scores
        return scores(*positions_and_content)

    def content_scores(self, query_position: Tensor, key_position: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The content-dependent bias of every pair: `(batch, head, *tile, query, key)`."""
        raise NotImplementedError


class ElementwiseBias(Bias):
    """A bias defined by `score`, which `scores` evaluates for all heads. Subclasses declare `relative`."""

    def scores(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        axes = max(query_position.dim(), key_position.dim())
        head = torch.arange(self.heads, device=key_position.device).reshape(-1, *(1,) * axes)
        return self.score(head, query_position, key_position)
