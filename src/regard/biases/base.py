"""What every positional bias promises to the operator."""

from __future__ import annotations

from torch import Tensor, nn


class Bias(nn.Module):
    """Scores that depend on position, added to `beta * query . key` before the softmax.

    A bias never builds the square. It is asked for the scores of the pairs somebody needs, given as two
    index tensors of absolute positions that broadcast against each other, and answers with one score per
    head and pair. Backends ask for it tile by tile and differentiate the answer, so a bias is written once,
    in plain torch, and gets gradients everywhere.

    Attributes:
        heads: how many heads the bias knows; `1` fits any number of heads.
        needs_content: whether the scores also depend on the projected queries and keys (`TransformerXL`).
            Such a bias is asked through `content_scores(query_position, key_position, query, key)` instead.
        relative: whether a score depends only on how far key and query are apart: along a line or, when the bias has
            a `grid`, in rows and columns from its `start`. Fast kernels tabulate such a bias. It must be claimed by the
            class that writes `scores`; a subclass with other scores does not inherit the claim.

    Positions are integers of any size. Along a line each has its place, also the negative ones that arise
    with more queries than keys. On a grid, a pair with a token that is not on the grid scores 0.
    """

    heads: int = 1
    needs_content: bool = False
    relative: bool = False

    def __init_subclass__(cls, **words) -> None:
        super().__init_subclass__(**words)
        if ("scores" in cls.__dict__ or "forward" in cls.__dict__) and "relative" not in cls.__dict__:
            cls.relative = False

    def scores(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        """The bias of every pair, `(head, *pairs)`; `pairs` is the broadcast shape of the two indices."""
        raise NotImplementedError

    def score(self, head: Tensor, query_position: Tensor, key_position: Tensor) -> Tensor:
        """The bias of the given heads and pairs, the three indices broadcast against each other.

        `score(h, i, j)` equals `scores(i, j)[h]` but computes no other head. A compiled FlexAttention needs
        this form: with torch 2.13 on CPU, `scores(i, j)[h]` compiles there and gives wrong numbers.
        """
        raise NotImplementedError

    def forward(self, *positions_and_content: Tensor) -> Tensor:
        """What the operator asks for: `scores`, or `content_scores` where the bias needs content."""
        answer = self.content_scores if self.needs_content else self.scores
        return answer(*positions_and_content)

    def content_scores(self, query_position: Tensor, key_position: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The bias of every pair when it reads content: `(batch, head, *tile, query, key)`."""
        raise NotImplementedError
