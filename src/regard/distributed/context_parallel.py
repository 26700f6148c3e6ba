"""Context parallelism: every process holds some tokens of each sequence, and attention sees all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from regard.attention.checks import make_request
from regard.attention.description import Attention
from regard.attention.operator import reroute_attention
from regard.autocast import disable_autocast
from regard.backends.base import Request, accumulation_dtype
from regard.biases.base import Bias
from regard.distributed.exchange import plan_exchange
from regard.distributed.linear_state import attend_linear
from regard.distributed.messages import Group
from regard.distributed.partial_attention import choose_partial
from regard.distributed.ring import RingSoftmax, find_best_scores
from regard.distributed.sequence_layout import SequenceLayout
from regard.dropout import draw_seed
from regard.errors import BackendError, ShapeError
from regard.features import FeatureMap
from regard.patterns import Lengths, Pattern
from regard.patterns.submatrix import SequencePart


def ring_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention: Attention | None = None,
    *,
    layout: SequenceLayout,
    key_layout: SequenceLayout | None = None,
    group: Group | None = None,
    pattern: Pattern | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    bias: Bias | Tensor | None = None,
    feature_map: str | FeatureMap | Callable | None = None,
    dropout: float = 0.0,
    dropout_seed: int | Tensor | None = None,
) -> Tensor:
    """Attention of this process's queries over the keys of all processes; called by all of them.

    Tensors are `(*batch, head, own token, dim)`, the part that `layout.take(whole, rank)` gives. Everything else is as
    in `attend` on the whole sequence: `pattern`, a bias and dropout speak of positions in the whole. A tensor as bias
    has the rows of this process and all columns. `dropout_seed` must be the same on all processes; if it is not given,
    it is drawn from torch's generator, which then has to be in the same state on all of them.

    layout: which tokens each process holds; `key_layout`: the same for keys, where they are another sequence.
    group: the processes, in the order of the layout; all of them if None.

    The gradients of learned biases are those of this process's queries: sum them over the group, as all gradients of
    parameters.
    """
    rank = _check_layout(layout, key_layout or layout, group, query, key)
    keys = key_layout or layout
    part = SequencePart(Lengths(layout.tokens, keys.tokens), layout.runs(rank))
    fields = {"pattern": pattern, "scale": scale, "bias": bias, "feature_map": feature_map}
    _refuse_square(mask)
    request, shape = make_request(query, key, value, attention, None, fields, dropout, dropout_seed, part)
    with disable_autocast(query.device):
        if request.feature_map is not None:
            output = attend_linear(request, layout, keys, rank, group)
        else:
            output = _attend_softmax(request, layout, keys, rank, group)
    return output.reshape(shape)


def _refuse_square(mask: Tensor | None) -> None:
    if mask is not None:
        raise BackendError(
            "A mask is not cut over processes.",
            asked=f"mask of shape {tuple(mask.shape)} in attention over several processes",
            because="a process holds some of the tokens, and a mask has a row and a column for each of the whole",
            instead="pattern=Mask(mask) with the mask of the whole sequence, or a pattern without a square",
        )


def _attend_softmax(
    request: Request, layout: SequenceLayout, keys: SequenceLayout, rank: int, group: Group | None
) -> Tensor:
    given = request.value.dtype
    if not request.query.dtype == request.key.dtype == given:  # autocast may have made them differ
        dtype = accumulation_dtype(request)
        tensors = {name: getattr(request, name).to(dtype) for name in ("query", "key", "value")}
        request = replace(request, **tensors)
    exchange = plan_exchange(request.pattern, layout, keys, rank)
    partial = choose_partial(request, Lengths(layout.tokens, keys.tokens), exchange.own[0])
    tensors = request.query, request.key, request.value
    best = None
    if (
        request.hard
    ):  # keys travel once to find the best score of each query, then with the values of those that reach it
        best = find_best_scores(*tensors[:2], partial, exchange, group, partial.learned)
    output = RingSoftmax.apply(*tensors, partial, exchange, group, best, *partial.learned)
    if best is not None:
        output = torch.where(torch.isnan(best), torch.nan, output)
    return request.keep_graph(output).to(given)


def _check_layout(layout: SequenceLayout, keys: SequenceLayout, group: Group | None, query: Tensor, key: Tensor) -> int:
    """This process's rank; raises if layouts, group and tensors do not fit together."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if layout.processes != size or keys.processes != size:
        raise ShapeError(
            "The layout is not for this group.",
            asked=f"{layout}",
            found=f"{size} processes in the group",
            because="every process holds its own part of the tokens",
            instead=f"SequenceLayout({layout.tokens}, {size}, {layout.kind!r})",
        )
    for name, tensor, each in (("query", query, layout), ("key", key, keys)):
        if tensor.ndim > 1 and tensor.shape[-2] != each.count(rank):
            raise ShapeError(
                f"The {name} is not the part of this process.",
                asked=f"{name} {tuple(tensor.shape)} on process {rank}",
                found=f"{each.count(rank)} tokens in {each}",
                because="a process holds the tokens that the layout gives it",
                instead=f"layout.take({name}, {rank})",
            )
    return rank


@contextlib.contextmanager
def context_parallel(layout: SequenceLayout, group: Group | None = None) -> Iterator[None]:
    """Inside, every `attend` is one over all processes: a model runs unchanged on this process's tokens.

    The model gets its part of the tokens and their positions, `layout.positions(rank)`; what it computes for each
    token by itself needs no other process. Backward may run outside, unless activations are recomputed in it.

        with context_parallel(SequenceLayout(65_536, 4, "zigzag")):
            logits = model(tokens, positions=positions)
    """

    def attend_over_processes(query: Tensor, key: Tensor, value: Tensor, attention: Attention, **options) -> Tensor:
        if options["dropout"] and options["dropout_seed"] is None:
            # The generators of the processes need not agree. Where activations are recomputed, it is drawn again.
            seed = draw_seed()
            dist.broadcast(seed, group=group, group_src=0)
            options["dropout_seed"] = seed
        return ring_attend(query, key, value, attention, layout=layout, group=group, **options)

    with reroute_attention(attend_over_processes):
        yield


__all__ = ["context_parallel", "ring_attend"]
