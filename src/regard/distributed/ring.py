"""Softmax attention of a sequence that is cut over several processes: every pattern, forward and backward.

Keys and values travel to the queries that see them, one piece at a time, while the piece before is being computed; the
outputs of the pieces are merged by their log-sum-exps. Backward, keys and values travel again, and their gradients
travel back. Source: Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers (2023); here the plan of the
pattern decides which pieces travel at all, so that they go straight to where they are needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.distributed.exchange import Exchange
from regard.distributed.messages import Group, Transfer
from regard.distributed.partial_attention import PartialAttention, locate
from regard.kernels.registration import refuse_second_gradient
from regard.patterns.submatrix import Runs


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


class RingSoftmax(torch.autograd.Function):
    """Output `(batch, head, own query, value_dim)` of a process."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, partial: PartialAttention, exchange: Exchange,
        group: Group | None, *learned: Tensor,
    ) -> Tensor:  # fmt: skip
        own_queries = exchange.own[0]
        output = torch.zeros(*query.shape[:3], value.shape[3], dtype=partial.dtype, device=query.device)
        lse = torch.full(query.shape[:3], -torch.inf, dtype=partial.dtype, device=query.device)
        for _, piece, received in _KeysAndValues(exchange, group, key, value):
            if piece is None:
                continue
            some = take_tokens(query, piece.queries, own_queries)
            part, part_lse = partial.forward(some, *received, piece, learned)
            if piece.owner == exchange.rank and part.shape == output.shape:
                output, lse = part, part_lse
            else:
                _merge(output, lse, part, part_lse, locate(piece.queries, own_queries))
        ctx.partial, ctx.exchange, ctx.group = partial, exchange, group
        ctx.save_for_backward(query, key, value, output, lse, *learned)
        return output.to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        query, key, value, output, lse, *learned = ctx.saved_tensors
        return _RingSoftmaxBackward.apply(
            gradients[0], query, key, value, output, lse, ctx.partial, ctx.exchange, ctx.group,
            any(ctx.needs_input_grad[6:]), *learned,
        )  # fmt: skip


class _RingSoftmaxBackward(torch.autograd.Function):
    """A function of its own, so that a second derivative is refused and not silently zero."""

    @staticmethod
    def forward(
        ctx: Any, grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor,
        partial: PartialAttention, exchange: Exchange, group: Group | None, learns: bool, *learned: Tensor,
    ) -> tuple:  # fmt: skip
        own_queries, own_keys = exchange.own
        grad_output = grad_output.to(partial.dtype)
        grads = [torch.zeros(each.shape, dtype=partial.dtype, device=each.device) for each in (query, key, value)]
        totals: list[Tensor] = []
        returning = _ReturningGradients(exchange, group, grads[1], grads[2])
        for step, piece, received in _KeysAndValues(exchange, group, key, value):
            made = None
            if piece is not None:
                runs = piece.queries, own_queries
                some = [take_tokens(each, *runs) for each in (grad_output, query, output, lse)]
                *made, others = partial.backward(some[0], some[1], *received, piece, some[2], some[3], learned, learns)
                add_tokens(grads[0], made[0], *runs)
                totals = (
                    others if not totals else [total.add_(each) for total, each in zip(totals, others, strict=True)]
                )
            if step is not None:
                returning.send(step, None if made is None else torch.cat((made[1], made[2]), dim=-1))
            elif piece is not None and made is not None:
                add_tokens(grads[1], made[1], piece.keys, own_keys)
                add_tokens(grads[2], made[2], piece.keys, own_keys)
        returning.finish()
        learned_grads = totals or [torch.zeros_like(each) if learns else None for each in learned]
        learned_grads = [
            None if grad is None else grad.to(each.dtype) for grad, each in zip(learned_grads, learned, strict=False)
        ]
        learned_grads += [None] * (len(learned) - len(learned_grads))
        given = (query, key, value)
        return *(grad.to(each.dtype) for grad, each in zip(grads, given, strict=True)), None, None, None, *learned_grads

    backward = staticmethod(refuse_second_gradient("ring", "its scores are not kept after the first backward pass"))


def _merge(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, places: Runs) -> None:
    """Merge the output over some keys with that over others: both are averaged by their log-sum-exps."""
    at = 0
    for start, stop in places:
        before, after = lse[:, :, start:stop], part_lse[:, :, at : at + stop - start]
        both = torch.logaddexp(before, after)
        shift = both.masked_fill(both == -torch.inf, 0)
        old, new = (before - shift).exp().unsqueeze(-1), (after - shift).exp().unsqueeze(-1)
        output[:, :, start:stop].mul_(old).add_(part[:, :, at : at + stop - start] * new)
        before.copy_(both)
        at += stop - start


class _KeysAndValues:
    """First the keys and values of this process, then those of the others; the next ones are already on their way.

    Yields the step (`None` for its own), the piece (`None` where no query sees any of these keys) and its tensors.
    """

    def __init__(self, exchange: Exchange, group: Group | None, key: Tensor, value: Tensor) -> None:
        self.exchange, self.group, self.key, self.value = exchange, group, key, value
        self.steps = list(exchange.steps())

    def _start(self, step: int) -> Transfer | None:
        if step >= len(self.steps):
            return None
        source, destination, piece, runs = self.steps[step]
        outgoing = incoming = None
        if runs:
            own = self.exchange.own[1]
            parts = [take_tokens(each, runs, own) for each in (self.key, self.value)]
            outgoing = torch.cat(parts, dim=-1).contiguous(), destination
        if piece is not None:
            shape = (*self.key.shape[:2], piece.count, self.key.shape[3] + self.value.shape[3])
            incoming = torch.empty(shape, dtype=self.key.dtype, device=self.key.device), source
        return Transfer("keys and values", self.group, outgoing, incoming)

    def __iter__(self) -> Any:
        transfer = self._start(0)
        yield None, self.exchange.local, (self.key, self.value)
        for step, (_, _, piece, _) in enumerate(self.steps):
            assert transfer is not None
            received, transfer = transfer.wait(), self._start(step + 1)
            if piece is None or received is None:
                yield step, None, None
            else:
                yield step, piece, (received[..., : self.key.shape[3]], received[..., self.key.shape[3] :])


class _ReturningGradients:
    """Gradients of other processes' keys go back to them, step by step; those of this one's keys come in."""

    def __init__(self, exchange: Exchange, group: Group | None, key_grad: Tensor, value_grad: Tensor) -> None:
        self.exchange, self.group, self.totals = exchange, group, (key_grad, value_grad)
        self.steps = list(exchange.steps())
        self.pending: list[tuple[Transfer, Runs]] = []

    def send(self, step: int, grads: Tensor | None) -> None:
        """The gradients of a step's keys, or nothing where none were received."""
        source, destination, _, runs = self.steps[step]
        outgoing = None if grads is None else (grads.contiguous(), source)
        incoming = None
        if runs:
            count = sum(stop - start for start, stop in runs)
            first = self.totals[0]
            shape = (*first.shape[:2], count, first.shape[3] + self.totals[1].shape[3])
            incoming = torch.empty(shape, dtype=first.dtype, device=first.device), destination
        self.pending.append((Transfer("gradients", self.group, outgoing, incoming), runs))
        if len(self.pending) > 1:
            self._collect()

    def _collect(self) -> None:
        transfer, runs = self.pending.pop(0)
        received = transfer.wait()
        if received is not None:
            width = self.totals[0].shape[3]
            for total, part in zip(self.totals, (received[..., :width], received[..., width:]), strict=True):
                add_tokens(total, part, runs, self.exchange.own[1])

    def finish(self) -> None:
        while self.pending:
            self._collect()
