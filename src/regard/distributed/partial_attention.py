"""Softmax attention over some of the keys: output, log-sum-exp, and what these keys contribute to the gradients.

With output and log-sum-exp over *all* keys, the gradients of a piece are exact:

    weight = exp(score - lse),    d score = weight (d output . value - d output . output)

as in FlashAttention's backward pass (Dao et al. 2022), which treats tiles of keys in the same way. Hard attention is
the same among the keys whose content score is the best of all keys, which is known before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from regard.backends.base import Request, accumulation_dtype, bias_tensors
from regard.backends.blocked import BlockedSoftmax, BlockedSoftmaxBackward
from regard.backends.limits import find_winners
from regard.backends.native import Native
from regard.backends.scores import TileSettings
from regard.backends.tiles import fold_batch, tile_height, unfold_batch
from regard.distributed.exchange import Piece
from regard.kernels import library
from regard.kernels.bias_table import make_bias_table
from regard.kernels.constant_program import get_program
from regard.kernels.softmax import Score, TokenNumbers, run_backward, run_forward
from regard.patterns import Lengths
from regard.patterns.submatrix import Runs, list_tokens

Grads = tuple[Tensor, Tensor, Tensor, list[Tensor]]


class PartialAttention(ABC):
    """The attention of a request, piece by piece.

    Attributes:
        request: what is computed; its tensors are those of this process.
        whole: the lengths of the whole sequence.
        learned: the tensors of the bias, which get gradients of their own.
    """

    def __init__(self, request: Request, whole: Lengths) -> None:
        self.request, self.whole = request, whole
        self.dtype = accumulation_dtype(request)
        self.learned: tuple[Tensor, ...] = ()

    @abstractmethod
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, piece: Piece, learned: tuple[Tensor, ...],
        best: Tensor | None = None,
    ) -> tuple:  # fmt: skip
        """Output `(batch, head, query, value_dim)` and log-sum-exp `(batch, head, query)` over the keys of a piece.

        With `best` `(batch, head, query, 1)`, over those of them that reach it: hard attention.
        """

    @abstractmethod
    def backward(
        self, grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, piece: Piece, output: Tensor, lse: Tensor,
        learned: tuple[Tensor, ...], learns: bool, best: Tensor | None = None,
    ) -> Grads:  # fmt: skip
        """Gradients of query, key, value and of what is learned, for output and log-sum-exp over all keys."""

    def find_best(self, query: Tensor, key: Tensor, piece: Piece, learned: tuple[Tensor, ...]) -> Tensor:
        """The best content score of each query among the keys of a piece, `(batch, head, query, 1)`."""
        raise NotImplementedError(f"{type(self).__name__} has no hard limit")

    @property
    def _plain_bias(self) -> bool:
        return isinstance(self.request.bias, Tensor)

    def _take_columns(self, bias: Tensor, keys: Runs, queries: Runs, own: Runs) -> Tensor:
        """A tensor bias `(batch, head, own query or 1, key or 1)` at the queries and keys of a piece."""
        if bias.shape[-1] > 1:
            bias = bias.index_select(-1, _numbers(keys, bias.device))
        return bias if bias.shape[-2] == 1 else bias.index_select(-2, _numbers(locate(queries, own), bias.device))

    def _add_columns(self, total: Tensor, part: Tensor, keys: Runs, queries: Runs, own: Runs) -> None:
        rows = slice(None) if total.shape[-2] == 1 else _numbers(locate(queries, own), total.device)
        columns = slice(None) if total.shape[-1] == 1 else _numbers(keys, total.device)
        if isinstance(rows, Tensor) and isinstance(columns, Tensor):
            rows = rows[:, None]
        total[:, :, rows, columns] += part


class NativePartial(PartialAttention):
    """By the C++ kernels."""

    def __init__(self, request: Request, whole: Lengths, own: Runs) -> None:
        super().__init__(request, whole)
        self.own = own
        self.codes: tuple[Tensor, Tensor] | None = None
        if isinstance(request.bias, Tensor):
            self.learned = (request.bias.to(self.dtype),)
        elif request.bias is not None:
            table, *codes = make_bias_table(request.bias, whole)
            self.learned, self.codes = (table.to(self.dtype),), (codes[0], codes[1])

    def _describe(self, query: Tensor, key: Tensor, piece: Piece, learned: tuple[Tensor, ...]) -> tuple:
        request, device = self.request, query.device
        numbers = TokenNumbers(_numbers(piece.queries, device).int(), _numbers(piece.keys, device).int())
        table = query_code = key_code = bias = None
        if self._plain_bias:
            bias = self._take_columns(learned[0], piece.keys, piece.queries, self.own)
        elif self.codes is not None:
            table, query_code, key_code = learned[0], self.codes[0][numbers.query], self.codes[1][numbers.key]
        lengths = Lengths(query.shape[2], key.shape[2])
        words, masks = get_program(piece.pattern, lengths, library.lanes(self.dtype))
        score = Score(table, query_code, key_code, bias, words, masks, request.scale)
        if request.dropout is not None:
            score = score._replace(dropout=request.dropout.probability, seed=request.dropout.seed)
        return score, numbers

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, piece: Piece, learned: tuple[Tensor, ...],
        best: Tensor | None = None,
    ) -> tuple:  # fmt: skip
        assert best is None  # choose_partial leaves the hard limit to tiles of torch
        return run_forward(query, key, value, *self._describe(query, key, piece, learned))

    def backward(
        self, grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, piece: Piece, output: Tensor, lse: Tensor,
        learned: tuple[Tensor, ...], learns: bool, best: Tensor | None = None,
    ) -> Grads:  # fmt: skip
        assert best is None
        score, numbers = self._describe(query, key, piece, learned)
        wanted = learns and score.table is not None, learns and score.bias is not None
        *grads, table, bias = run_backward(grad_output, query, key, value, score, output, lse, wanted, numbers)
        totals: list[Tensor] = []
        if learns and self._plain_bias:
            totals = [torch.zeros_like(learned[0], memory_format=torch.contiguous_format)]
            self._add_columns(totals[0], bias, piece.keys, piece.queries, self.own)
        elif learns and learned:
            totals = [table]
        return grads[0], grads[1], grads[2], totals


class BlockedPartial(PartialAttention):
    """By tiles of plain torch, on any device and for any bias."""

    def __init__(self, request: Request, whole: Lengths, own: Runs) -> None:
        super().__init__(request, whole)
        self.own = own
        self.learned = bias_tensors(request.bias)

    def _describe(self, query: Tensor, key: Tensor, piece: Piece, learned: tuple[Tensor, ...]) -> tuple:
        request, device, rows = self.request, query.device, piece.pattern.rows
        lengths = Lengths(query.shape[2], key.shape[2])
        if self._plain_bias:
            learned = (self._take_columns(learned[0], piece.keys, piece.queries, self.own),)
        by_row = rows is not None and self._plain_bias and len(learned[0]) > 1
        task = TileSettings(
            pattern=piece.pattern,
            lengths=lengths,
            scale=request.scale,
            bias=None if isinstance(request.bias, Tensor) else request.bias,
            block=tile_height(piece.pattern, lengths, request.group),
            group=request.group,
            bias_by_row=by_row,
            dropout=0.0 if request.dropout is None else request.dropout.probability,
            numbers=(_numbers(piece.queries, device), _numbers(piece.keys, device)),
            whole=self.whole,
        )
        return task, (fold_batch(learned[0], rows),) if by_row else learned

    def _fold(self, piece: Piece, *tensors: Tensor) -> list[Tensor]:
        return [fold_batch(tensor.to(self.dtype), piece.pattern.rows) for tensor in tensors]

    def _fold_best(self, piece: Piece, best: Tensor | None) -> Tensor | None:
        return None if best is None else self._fold(piece, best)[0]

    def find_best(self, query: Tensor, key: Tensor, piece: Piece, learned: tuple[Tensor, ...]) -> Tensor:
        task, learned = self._describe(query, key, piece, learned)
        folded_query, folded_key = self._fold(piece, query, key)
        return unfold_batch(find_winners(folded_query, folded_key, task, learned)[0], piece.pattern.rows)

    @property
    def _seed(self) -> Tensor | None:
        return None if self.request.dropout is None else self.request.dropout.seed

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, piece: Piece, learned: tuple[Tensor, ...],
        best: Tensor | None = None,
    ) -> tuple:  # fmt: skip
        task, learned = self._describe(query, key, piece, learned)
        folded = self._fold(piece, query, key, value)
        made = BlockedSoftmax.forward(*folded, self._fold_best(piece, best), self._seed, task, *learned)
        output, lse = (unfold_batch(each, piece.pattern.rows) for each in made)
        return output, lse.squeeze(-1)

    def backward(
        self, grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, piece: Piece, output: Tensor, lse: Tensor,
        learned: tuple[Tensor, ...], learns: bool, best: Tensor | None = None,
    ) -> Grads:  # fmt: skip
        task, parts = self._describe(query, key, piece, learned)
        folded = self._fold(piece, query, key, value)
        given = self._fold(piece, output, lse.unsqueeze(-1), grad_output)
        made = BlockedSoftmaxBackward.forward(
            *folded, self._fold_best(piece, best), *given, self._seed, replace(task, learns=learns), *parts
        )
        rows = piece.pattern.rows
        grads, others = [unfold_batch(each, rows) for each in made[:3]], list(made[3:])
        if self._plain_bias and learns:
            total = torch.zeros_like(learned[0], memory_format=torch.contiguous_format)
            part = unfold_batch(others[0], rows) if task.bias_by_row else others[0]
            self._add_columns(total, part, piece.keys, piece.queries, self.own)
            others = [total]
        return grads[0], grads[1], grads[2], others if learns else []


def choose_partial(request: Request, whole: Lengths, own: Runs) -> PartialAttention:
    """The kernels where they can, else tiles of torch."""
    kind = NativePartial if Native().refuse(request) is None else BlockedPartial
    return kind(request, whole, own)


def locate(runs: Runs, inside: Runs) -> Runs:
    """Where runs of token numbers lie in a tensor that holds the tokens of the runs `inside`; neighbours are one."""
    found: list[tuple[int, int]] = []
    at = 0
    for start, stop in inside:
        for first, last in runs:
            low, high = at + max(first, start) - start, at + min(last, stop) - start
            if low < high and found and found[-1][1] == low:
                found[-1] = found[-1][0], high
            elif low < high:
                found.append((low, high))
        at += stop - start
    return tuple(found)


def _numbers(runs: Runs, device: torch.device) -> Tensor:
    return torch.from_numpy(list_tokens(runs)).to(device)
