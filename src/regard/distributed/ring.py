"""Softmax attention of a sequence that is cut over several processes: every pattern, forward and backward.

Keys and values travel to the queries that see them, one piece at a time, while the piece before is being computed; the
outputs of the pieces are merged by their log-sum-exps. Backward, keys and values travel again, and their gradients
travel back. Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers (2023); here the plan of the
pattern decides which pieces travel at all, so that they go straight to where they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.distributed.exchange import Exchange, Piece, Transfer
from regard.distributed.messages import Group, Message
from regard.distributed.partial_attention import PartialAttention, locate
from regard.kernels.registration import refuse_second_gradient
from regard.patterns.submatrix import Runs, count_tokens


def take_tokens(tensor: Tensor, runs: Runs, own: Runs) -> Tensor:
    """The tokens of the runs, of a tensor `(batch, head, token, ...)` that holds those of the runs `own`."""
    places = locate(runs, own)
    if len(places) == 1:
        start, stop = places[0]
        return tensor if (start, stop) == (0, tensor.shape[2]) else tensor[:, :, start:stop]
    return torch.cat([tensor[:, :, start:stop] for start, stop in places], dim=2)


def add_tokens(total: Tensor, part: Tensor, runs: Runs, own: Runs) -> None:
    """Add a part with the tokens of the runs to a tensor with those of the runs `own`."""
    at = 0
    for start, stop in locate(runs, own):
        total[:, :, start:stop] += part[:, :, at : at + stop - start]
        at += stop - start


@torch.no_grad()
def find_best_scores(
    query: Tensor, key: Tensor, partial: PartialAttention, exchange: Exchange, group: Group | None,
    learned: tuple[Tensor, ...],
) -> Tensor:  # fmt: skip
    """The best content score of this process's queries among the keys of all: `(batch, head, own query, 1)`.

    Keys travel once for it. NaN where the output of a query is NaN.
    """
    incoming = _Incoming("keys", exchange, group, key)
    best = torch.full((*query.shape[:3], 1), -torch.inf, dtype=partial.dtype, device=query.device)
    if exchange.local is not None:
        best = partial.find_best(query, key, exchange.local, learned)
    for transfer, received in incoming:
        if (piece := transfer.received) is not None and received is not None:
            some = take_tokens(query, piece.queries, exchange.own[0])
            part, at = partial.find_best(some, received[0], piece, learned), 0
            for start, stop in locate(piece.queries, exchange.own[0]):
                mine, other = best[:, :, start:stop], part[:, :, at : at + stop - start]
                mine.copy_(torch.maximum(mine, other))
                at += stop - start
    return best


def _take_best(best: Tensor | None, piece: Piece, exchange: Exchange) -> Tensor | None:
    return None if best is None else take_tokens(best, piece.queries, exchange.own[0])


class RingSoftmax(torch.autograd.Function):
    """Output `(batch, head, own query, value_dim)` of a process."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, partial: PartialAttention, exchange: Exchange,
        group: Group | None, best: Tensor | None, *learned: Tensor,
    ) -> Tensor:  # fmt: skip
        incoming = _Incoming("keys and values", exchange, group, key, value)
        if exchange.local is None:
            output = torch.zeros(*query.shape[:3], value.shape[3], dtype=partial.dtype, device=query.device)
            lse = torch.full(query.shape[:3], -torch.inf, dtype=partial.dtype, device=query.device)
        else:
            output, lse = partial.forward(query, key, value, exchange.local, learned, best)
        for transfer, received in incoming:
            if (piece := transfer.received) is not None and received is not None:
                some = take_tokens(query, piece.queries, exchange.own[0])
                part, part_lse = partial.forward(
                    some, received[0], received[1], piece, learned, _take_best(best, piece, exchange)
                )
                _merge(output, lse, part, part_lse, locate(piece.queries, exchange.own[0]))
        ctx.partial, ctx.exchange, ctx.group = partial, exchange, group
        ctx.save_for_backward(query, key, value, output, lse, best, *learned)
        return output.to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        query, key, value, output, lse, best, *learned = ctx.saved_tensors
        return _RingSoftmaxBackward.apply(
            gradients[0], query, key, value, output, lse, best, ctx.partial, ctx.exchange, ctx.group,
            any(ctx.needs_input_grad[7:]), *learned,
        )  # fmt: skip


class _RingSoftmaxBackward(torch.autograd.Function):
    """A function of its own, so that a second derivative is refused and not silently zero."""

    @staticmethod
    def forward(
        ctx: Any, grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
        best: Tensor | None, partial: PartialAttention, exchange: Exchange, group: Group | None, learns: bool,
        *learned: Tensor,
    ) -> tuple:  # fmt: skip
        own, given = exchange.own, (query, key, value)
        grad_output = grad_output.to(partial.dtype)
        incoming = _Incoming("keys and values", exchange, group, key, value, in_steps=True)
        totals: list[Tensor] = []
        if exchange.local is None:
            grads = [torch.zeros(each.shape, dtype=partial.dtype, device=each.device) for each in given]
        else:
            *grads, totals = partial.backward(
                grad_output, query, key, value, exchange.local, output, lse, learned, learns, best
            )  # fmt: skip
        returning = _ReturningGradients(group, grads[1], grads[2], own[1])
        for transfer, received in incoming:
            made = None
            if (piece := transfer.received) is not None and received is not None:
                some = [take_tokens(each, piece.queries, own[0]) for each in (grad_output, query, output, lse)]
                part, *made, others = partial.backward(
                    some[0], some[1], received[0], received[1], piece, some[2], some[3], learned, learns,
                    _take_best(best, piece, exchange),
                )  # fmt: skip
                add_tokens(grads[0], part, piece.queries, own[0])
                totals = [total.add_(each) for total, each in zip(totals, others, strict=True)] if totals else others
                del part, some, received
            returning.send(transfer, None if made is None else torch.cat(made, dim=-1))
        returning.finish()
        learned_grads = [None] * len(learned)
        if learns:
            zeros = totals or [torch.zeros_like(each) for each in learned]
            learned_grads = [grad.to(each.dtype) for grad, each in zip(zeros, learned, strict=True)]
        wanted = (grad.to(each.dtype) for grad, each in zip(grads, given, strict=True))
        return *wanted, None, None, None, None, *learned_grads

    backward = staticmethod(refuse_second_gradient("ring", "its scores are not kept after the first backward pass"))


def _merge(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, places: Runs) -> None:
    """Merge the output over some keys with that over others: both are averaged by their log-sum-exps."""
    at = 0
    for start, stop in places:
        before, after = lse[:, :, start:stop], part_lse[:, :, at : at + stop - start]
        both = torch.logaddexp(before, after)
        shift = both.masked_fill(both == -torch.inf, 0)
        old, new = (before - shift).exp_().unsqueeze(-1), (after - shift).exp_().unsqueeze(-1)
        output[:, :, start:stop].mul_(old).add_(part[:, :, at : at + stop - start].mul_(new))
        before.copy_(both)
        at += stop - start


class _Incoming:
    """The keys, or keys and values, of other processes; the first are sent when it is made, then always the next.

    Two processes match their messages by their order alone. Where gradients return between keys, both have to begin
    them in the same order: `in_steps` begins no transfer before the gradients of the step before have left.
    """

    def __init__(
        self, kind: str, exchange: Exchange, group: Group | None, *tensors: Tensor, in_steps: bool = False
    ) -> None:
        self.kind, self.exchange, self.group, self.tensors, self.in_steps = kind, exchange, group, tensors, in_steps
        self.widths = [each.shape[3] for each in tensors]
        self.next = self._start(0)

    def _start(self, number: int) -> Message | None:
        if number >= len(self.exchange.transfers):
            return None
        _, destination, sent, source, piece = self.exchange.transfers[number]
        outgoing = incoming = None
        if sent:
            parts = [take_tokens(each, sent, self.exchange.own[1]) for each in self.tensors]
            outgoing = torch.cat(parts, dim=-1), destination
        if piece is not None:
            first = self.tensors[0]
            shape = (*first.shape[:2], piece.count, sum(self.widths))
            incoming = torch.empty(shape, dtype=first.dtype, device=first.device), source
        return Message(self.kind, self.group, outgoing, incoming)

    def __iter__(self) -> Iterator[tuple[Transfer, tuple[Tensor, ...] | None]]:
        transfers = self.exchange.transfers
        for number, transfer in enumerate(transfers, 1):
            assert self.next is not None
            received = self.next.wait()
            waits = self.in_steps and number < len(transfers) and transfers[number].step != transfer.step
            self.next = None if waits else self._start(number)
            yield transfer, None if received is None else received.split(self.widths, dim=-1)
            if waits:
                self.next = self._start(number)


class _ReturningGradients:
    """Gradients of other processes' keys go back to them; those of this one's keys come in and are added."""

    def __init__(self, group: Group | None, key_grad: Tensor, value_grad: Tensor, own: Runs) -> None:
        self.group, self.totals, self.own = group, (key_grad, value_grad), own
        self.pending: tuple[Message, Runs] | None = None

    def send(self, transfer: Transfer, grads: Tensor | None) -> None:
        """The gradients of a transfer's keys, or nothing where none were received."""
        self.finish()
        outgoing = incoming = None
        if grads is not None:
            outgoing = grads, transfer.source
        if transfer.sent:
            first, second = self.totals
            shape = (*first.shape[:2], count_tokens(transfer.sent), first.shape[3] + second.shape[3])
            incoming = torch.empty(shape, dtype=first.dtype, device=first.device), transfer.destination
        self.pending = Message("gradients", self.group, outgoing, incoming), transfer.sent

    def finish(self) -> None:
        """Add what has been on its way."""
        if self.pending is None:
            return
        (message, runs), self.pending = self.pending, None
        received = message.wait()
        if received is not None:
            width = self.totals[0].shape[3]
            for total, part in zip(self.totals, (received[..., :width], received[..., width:]), strict=True):
                add_tokens(total, part, runs, self.own)
