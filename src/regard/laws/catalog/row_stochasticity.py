"""L7: the weights of a query are non-negative and sum to one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.adapters import attention_watch
from regard.adapters.base import Adapter
from regard.adapters.call_signature import find_switches
from regard.adapters.layer import SequenceAdapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.law import Case, Law, Observation, expect_equal, expect_zero
from regard.laws.masks import BROADCAST_MASKS, draw_broadcast_mask, make_padding
from regard.laws.probes import find_visible_lengths

# A sum that is as near to one as this, in any precision, was normalised.
ROUNDED = 1e-4


class RowStochasticityLaw(Law):
    id = "L7"
    slug = "row-stochasticity"
    title = "Row-stochasticity"
    headline = "the weights of a query do not sum to one."
    statement = (
        "Weights are non-negative and sum to one over the keys, for each head and each query with a visible key."
    )
    equation = "A_ij >= 0,  sum_j A_ij = 1"
    catches = (
        "a softmax over the wrong axis, a mask after the softmax, no normalisation after a selection, added epsilons"
    )
    smallest = {"batch": 1, "queries": 1, "keys": 1, "tokens": 2}
    kinds = ("by", "mask", "tokens", "keys")
    minimum = 4

    def applies(self, subject: Adapter) -> str | None:
        if isinstance(subject, OperatorAdapter):
            return None
        if "lengths" not in subject.abilities:
            return "its tokens cannot be named from outside"
        return (
            None
            if find_visible_lengths(subject) or _maps_equal_tokens_to_equal_outputs(subject)
            else "its weights cannot be observed"
        )

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        masked = "mask" in subject.abilities
        if not isinstance(subject, OperatorAdapter):
            yield from self._make_layer_cases(subject, masked, fast)
            return
        masks = BROADCAST_MASKS if masked else BROADCAST_MASKS[:1]
        for mask in masks:
            yield {"batch": 3, "queries": 5, "keys": 5, "mask": mask}
        # Tails of several keys behind whole blocks of 8, 16, 32, 64 and 128; one query; the smallest.
        lengths = [(37, 37), (1, 37), (3, 70), (1, 1), (7, 7), (2, 141), (1, 6), (3, 11), (11, 4), (43, 5)]
        for place, (queries, keys) in enumerate(lengths if fast else [*lengths, (33, 33), (141, 141)]):
            for mask in dict.fromkeys(("none", masks[(place + 1) % len(masks)], masks[(place + 3) % len(masks)])):
                yield {"batch": 1 + 2 * (place % 2), "queries": queries, "keys": keys, "mask": mask}
        if not fast:
            for queries, keys in ((2, 2), (17, 17), (17, 65), (66, 9), (129, 131), (1, 131)):
                for mask in masks:
                    yield {"batch": 1, "queries": queries, "keys": keys, "mask": mask}

    def _make_layer_cases(self, subject: Adapter, masked: bool, fast: bool) -> Iterator[Case]:
        masks = ("none", "right", "left") if masked else ("none",)
        visible = find_visible_lengths(subject)
        for tokens in visible[: 4 if fast else None]:
            for mask in masks:
                for batch in (3, 1) if tokens < 60 or not fast else (2,):
                    if batch != tokens:
                        yield {"batch": batch, "tokens": tokens, "mask": mask, "by": "weights"}
        # What shows its weights in short sequences only may be another path in long ones.
        if not visible or (max(visible) < 100 and _maps_equal_tokens_to_equal_outputs(subject)):
            for tokens in subject.lengths(5, 37, 1, 3, 70, 141) if fast else subject.lengths(5, 37, 1, 3, 17, 70, 141):
                for mask in masks:
                    yield {"batch": 2, "tokens": tokens, "mask": mask, "by": "constant tokens"}

    def is_ordinary(self, case: Case) -> bool:
        return case["mask"] == "none"

    def possible(self, case: Case) -> bool:
        return case.get("tokens") != case["batch"]

    @torch.no_grad()
    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        if isinstance(subject, OperatorAdapter):
            yield from self._observe_operator(subject, case, rng)
        elif case["by"] == "weights":
            yield from self._observe_weights(subject, case, rng)
        else:
            yield from self._observe_constants(subject, case, rng)

    def _observe_operator(self, subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
        batch, queries, keys = int(case["batch"]), int(case["queries"]), int(case["keys"])
        query, key, _ = subject.tensors(rng, batch, queries, keys)
        weights = free = subject.matrix(query, key)
        # Queries before the first key may see nothing; elsewhere NaN is a fault.
        nonempty = (free != 0).any(-1) & ~(free.isnan().any(-1) & (queries > keys))
        if queries <= keys:
            nonempty = nonempty | _find_dead_heads(nonempty, keys)
        if case["mask"] != "none":
            mask = draw_broadcast_mask(str(case["mask"]), rng, batch, subject.heads, queries, keys)
            weights = subject.matrix(query, key, mask)
            nonempty = ((free > 0) & mask).any(-1) & ~free.isnan().any(-1)
        changed = f"a mask of {case['mask']}" if case["mask"] != "none" else "no mask"
        yield from expect_shares(weights, nonempty, changed, case["mask"] == "none")
        if case["mask"] == "none" and queries <= keys and subject.conventions.layout != "tokens":
            for returned in _find_returned_weights(
                subject.target(*subject.tensors(rng, batch, queries, keys)), queries, keys
            ):
                yield from expect_shares(
                    returned, torch.ones_like(returned[..., 0], dtype=torch.bool), "weights returned"
                )

    def _observe_weights(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        batch, tokens = int(case["batch"]), int(case["tokens"])
        if not attention_watch.fair_lengths(subject, batch, tokens):
            return
        x = subject.draw(batch, tokens, rng)
        mask = make_padding(str(case["mask"]), batch, tokens)
        for place, weights in enumerate(subject.weights(x, mask)):
            if weights.shape[-2:] != (tokens, tokens):
                continue
            real = torch.ones(batch, tokens, dtype=torch.bool) if mask is None else mask
            nonempty = (weights != 0).any(-1)
            nonempty = nonempty | _find_dead_heads(nonempty, tokens)
            if weights.shape[0] == batch:
                nonempty = nonempty & real[:, None, :]
            elif mask is not None:
                continue
            yield from expect_shares(weights, nonempty, f"{case['mask']} padding, attention {place}", mask is None)
        if mask is None and isinstance(subject, SequenceAdapter):
            calls = [{}, *({name: value} for name, value in find_switches(subject.target).items())]
            for words in calls:
                for returned in _find_returned_weights(subject.call(x, **words), tokens, tokens):
                    description = f"weights returned with {words}" if words else "weights returned"
                    yield from expect_shares(returned, (returned != 0).any(-1), description)

    def _observe_constants(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        """Equal tokens have equal values, and their mean by any weights is that value again."""
        batch, tokens = int(case["batch"]), int(case["tokens"])
        x = subject.draw(batch, tokens, rng)
        constant = x[:, :1].expand_as(x).contiguous()
        one = subject.run(x[:, :1].contiguous())
        mask = make_padding(str(case["mask"]), batch, tokens)
        if mask is not None:
            constant = torch.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - 2)), constant, x)
        many = subject.run(constant, mask)
        yield expect_equal(
            one.expand_as(many),
            many,
            where=mask,
            by_design=mask is None,
            changed=f"one token, repeated {tokens} times",
            reduction=tokens + subject.channels,
        )


def _find_dead_heads(nonempty: Tensor, keys: int) -> Tensor:
    """Heads whose weights are all zero: a query may see nothing, and features may happen to be orthogonal; not all."""
    many = nonempty.shape[0] * nonempty.shape[2] * keys >= 25
    return ~nonempty.any(-1, keepdim=True).any(0, keepdim=True) & many


def _find_returned_weights(output: Any, queries: int, keys: int) -> Iterator[Tensor]:
    """Tensors returned beside the output that may be weights: of shape (..., query, key), none of them negative."""
    beside = output[1:] if isinstance(output, tuple | list) else ()
    for each in beside:
        if (
            isinstance(each, Tensor)
            and each.ndim in (3, 4)
            and each.shape[-2:] == (queries, keys)
            and (each >= 0).all()
        ):
            yield each if each.ndim == 4 else each[:, None]


def may_be_meant(weights: Tensor, nonempty: Tensor) -> bool:
    """Whether weights that do not sum to one over the keys may be another kind of attention.

    Sigmoid, softmax-one, ReLU, retention, differences and sinks miss one in every head that sees anything. They sum to
    one along no other axis, as a softmax over the wrong one does, and no head of theirs is zero everywhere.
    """
    total = weights.sum(-1)
    if not total.isfinite().all():
        return False
    off = torch.where(nonempty, (total - 1).abs(), 0.0).amax((0, 2))
    missed = bool(((off > ROUNDED) | ~nonempty.any(2).any(0)).all())
    dead = weights[:, 0].numel() >= 25 and not bool((weights != 0).any(3).any(2).any(0).all())
    axes = [weights.sum(axis) for axis in (0, 1, 2, (2, 3), (1, 3), (0, 3))]
    other = any(bool(((sums - 1).abs() < ROUNDED).all()) for sums in axes)
    return missed and not dead and not other


def expect_shares(weights: Tensor, nonempty: Tensor, changed: str, ordinary: bool = False) -> Iterator[Observation]:
    """Weights `(batch, head, query, key)` are shares wherever `seen`, which is `(batch, head, query)`."""
    meant = ordinary and may_be_meant(weights, nonempty)
    total = weights.sum(-1)
    total = torch.where(nonempty, total, torch.ones_like(total)).transpose(1, 2)
    keys = weights.shape[-1]
    worst = total[(total - 1).abs().nan_to_num(torch.inf, torch.inf, torch.inf) > 0]
    effect = f"sums to {float(worst[(worst - 1).abs().argmax()]):.6g}, not 1" if worst.numel() else ""
    words = {"changed": changed, "output": "weights", "reduction": keys, "by_design": meant}
    yield expect_equal(torch.ones_like(total), total, scale=1.0, effect=effect, **words)
    least = torch.where(nonempty[..., None], weights, torch.zeros_like(weights)).amin(-1).transpose(1, 2)
    yield expect_zero(least.clamp(max=0), 1.0, effect="is negative", **words)


@torch.no_grad()
def _maps_equal_tokens_to_equal_outputs(subject: Adapter) -> bool:
    """Whether equal tokens must give equal outputs: nothing in the subject depends on positions.

    Then outputs move with their tokens when these change places; or, if it sees only what came before, the last output
    does not care about the order of the others.
    """
    if not {"aligned", "lengths"} <= subject.abilities:
        return False
    view = subject.at(torch.float64) or subject
    try:
        tokens = view.lengths(7)[0]
        x = view.draw(2, tokens, Rng(0, "order"))
        order = Rng(0, "order of tokens").permutation(tokens - 1)
        order = torch.cat([order, torch.tensor([tokens - 1])])
        before, after = view.run(x), view.run(x[:, order])
    except Exception:  # the law itself will meet it
        return False
    near = 1e-6 * float(before.abs().max())
    everywhere = float((before[:, order] - after).abs().max()) < near
    if everywhere:
        return True
    return "causality" in subject.context and float((before[:, -1] - after[:, -1]).abs().max()) < near
