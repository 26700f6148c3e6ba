"""L16: fewer key heads are the same as repeating each of them for its group of query heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.adapters import attention_watch
from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.law import Case, Law, Observation, expect_equal, expect_true
from regard.laws.masks import draw_broadcast_mask
from regard.laws.probes import find_visible_lengths

GROUPS = ((6, 2), (4, 2), (6, 3), (8, 4), (3, 1), (4, 1), (2, 2), (5, 5))
# Masks that broadcast to (batch, head, query, key); the first has one for each query head.
MASKS = ("pairs of heads", "rows of keys", "pairs", "pairs of rows")


class HeadGroupsLaw(Law):
    id = "L16"
    slug = "head-groups"
    title = "Head groups"
    headline = "a query head used the keys of another group."
    statement = (
        "With fewer key/value heads, query head h uses key/value head h // group; heads do not mix and may be permuted."
    )
    equation = "attn(Q, K, V)_h = attn(Q_h, K_{h // g}, V_{h // g}),  g = heads / kv_heads"
    catches = "keys that are tiled instead of repeated, heads that mix, values or masks grouped differently from keys"
    smallest = {"batch": 1, "tokens": 1, "queries": 1, "keys": 1}
    kinds = ("heads", "kv_heads", "mask")
    minimum = 4

    def applies(self, subject: Adapter) -> str | None:
        if isinstance(subject, OperatorAdapter):
            return None
        if "lengths" not in subject.abilities:
            return "its tokens cannot be named from outside"
        lengths = find_visible_lengths(subject)[:1]
        view = subject.at(torch.float64) or subject
        if not lengths:
            return "its heads cannot be observed"
        for tokens in lengths:
            if any(
                _find_key_heads(call, watched.rows) is not None
                for call, watched in _watch_calls(view, 2, tokens, Rng(0, "heads"))
            ):
                return None
        return "it has as many key heads as query heads, or they cannot be observed"

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        if not isinstance(subject, OperatorAdapter):
            for tokens in find_visible_lengths(subject)[:2]:
                yield {"batch": 2, "tokens": tokens}
            return
        groups = list(GROUPS)
        if subject.kv_heads != subject.heads and (subject.heads, subject.kv_heads) not in groups:
            groups.insert(0, (subject.heads, subject.kv_heads))
        masks = MASKS if "mask" in subject.abilities else ()
        first, second = groups[0], groups[1]

        def case(queries: int, keys: int, group: tuple[int, int], mask: str = "none") -> Case:
            batch, (heads, kv_heads) = 2 if queries == 5 else 1, group
            return {
                "batch": batch,
                "queries": queries,
                "keys": keys,
                "heads": heads,
                "kv_heads": kv_heads,
                "mask": mask,
            }

        yield case(5, 5, first)
        yield case(5, 67, second)  # more keys than a block has, and no multiple of one
        yield case(1, 41, first)
        for mask in masks:
            yield case(5, 5, first, mask)
        for place, mask in enumerate(masks):
            yield case(*((3, 41), (1, 9), (37, 37), (5, 7))[place], second, mask)
        for queries, keys in ((5, 5), (3, 7)) if fast else ((5, 5), (3, 7), (1, 9), (33, 33), (66, 131)):
            for place, group in enumerate(groups):
                yield case(queries, keys, group)
                if masks and not fast:
                    yield case(queries, keys, group, masks[place % len(masks)])

    @torch.no_grad()
    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        if isinstance(subject, OperatorAdapter):
            yield from self._observe_operator(subject, case, rng)
            return
        batch, tokens = int(case["batch"]), int(case["tokens"])
        if not attention_watch.fair_lengths(subject, batch, tokens):
            return
        for call, watched in _watch_calls(subject, batch, tokens, rng):
            pairs = _find_key_heads(call, watched.rows)
            if pairs is not None:
                wrong = next(
                    (f"{head} uses key head {own}, not {right}" for head, own, right in pairs if own != right), ""
                )
                yield expect_true(not wrong, f"head {wrong}", output="query", changed="nothing")

    def _observe_operator(self, subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
        batch, queries, keys = int(case["batch"]), int(case["queries"]), int(case["keys"])
        heads, kv_heads = int(case["heads"]), int(case["kv_heads"])
        query, key, value = subject.tensors(rng, batch, queries, keys, heads=heads, kv_heads=kv_heads)
        mask, under = None, ""
        if case["mask"] != "none":
            mask = draw_broadcast_mask(str(case["mask"]), rng, batch, heads, queries, keys)
            mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
            under = f", under a mask of {case['mask']}"
        output = subject.attend(query, key, value, mask)
        terms = keys + subject.dim
        group = heads // kv_heads
        if group > 1:
            wide = [part.repeat_interleave(group, 1) for part in (key, value)]
            repeated = subject.attend(query, *wide, mask=mask)
            changed = f"{kv_heads} key heads, each repeated {group} times{under}"
            yield expect_equal(repeated.transpose(1, 2), output.transpose(1, 2), changed=changed, reduction=terms)
        # Changing one key head must not change the outputs of other groups.
        chosen = rng.integer(0, kv_heads)
        _, fresh, other = subject.tensors(rng, batch, queries, keys, heads=heads, kv_heads=kv_heads)
        moved = [part.clone() for part in (key, value)]
        moved[0][:, chosen], moved[1][:, chosen] = fresh[:, chosen], other[:, chosen]
        after = subject.attend(query, *moved, mask=mask)
        other_groups = [head for head in range(heads) if head // group != chosen]
        yield expect_equal(
            output[:, other_groups].transpose(1, 2),
            after[:, other_groups].transpose(1, 2),
            changed=f"key and value of head {chosen}{under}",
            reduction=terms,
            scale=float(output.abs().nan_to_num(0, 0, 0).max()),
        )
        if group == 1 and mask is None and self._has_equal_heads(subject, key):
            order = rng.permutation(heads)
            swapped = subject.attend(query[:, order], key[:, order], value[:, order])
            yield expect_equal(
                output[:, order].transpose(1, 2),
                swapped.transpose(1, 2),
                changed=f"heads in the order {order.tolist()}",
                reduction=terms,
            )

    @staticmethod
    def _has_equal_heads(subject: OperatorAdapter, key: Tensor) -> bool:
        """Whether heads have no biases of their own: with the same content all weigh the same."""
        same = key[:, :1].expand_as(key).contiguous()
        query = same[:, :, -1:].contiguous()
        values = key[:, :1].expand_as(key).contiguous()
        output = subject.attend(query, same, values)
        apart = (output - output[:, :1]).abs().max()
        return bool(apart <= 1e4 * subject.eps * output.abs().max())


def _watch_calls(
    subject: Adapter, batch: int, tokens: int, rng: Rng
) -> list[tuple[attention_watch.AttentionCall, attention_watch.ObservedAttention]]:
    x = subject.draw(batch, tokens, rng)
    watched = attention_watch.observe(lambda: subject.run(x), batch, tokens)
    return [(call, watched) for call in watched.calls]


def _find_key_heads(call: attention_watch.AttentionCall, rows: list[Tensor]) -> list[tuple[int, int, int]] | None:
    """For each query head the key head that it used and the one it should; None if there are no groups.

    Heads are counted as the projections lay them out, where these were seen; else as the product has them.
    """
    if call.query is None or call.key is None:
        return None
    keys = _number_equal_heads(call.key)
    values = _number_equal_heads(call.value)
    heads, kv_heads = len(keys), max(keys) + 1
    if kv_heads == heads or heads % kv_heads or kv_heads < 2:
        return None
    queries, own = _find_source_heads(call.query, rows, heads), _find_source_heads(call.key, rows, kv_heads)
    if queries is None and not call.ordered:
        return None
    queries = list(range(heads)) if queries is None else queries
    own = keys if own is None else own
    group = heads // kv_heads
    pairs = [(query, key, query // group) for query, key in zip(queries, own, strict=True)]
    if max(values) + 1 == kv_heads:
        spot = dict(zip(values, own, strict=True))  # values go with the keys of the first head that uses them
        pairs += [(query, spot[value], query // group) for query, value in zip(queries, values, strict=True)]
    return sorted(pairs)


def _number_equal_heads(part: Tensor) -> list[int]:
    """Heads with the same content get the same number, in the order in which they come."""
    numbers: list[int] = []
    first: list[int] = []
    for head in range(part.shape[1]):
        like = next((n for n, other in enumerate(first) if torch.equal(part[:, head], part[:, other])), None)
        if like is None:
            like = len(first)
            first.append(head)
        numbers.append(like)
    return numbers


def _find_source_heads(part: Tensor, rows: list[Tensor], pieces: int) -> list[int] | None:
    """The piece of a projection that each head came from, told by its length, which rotations and factors keep."""
    lengths = part.double().norm(dim=-1).transpose(1, 2)
    dim = part.shape[-1]
    for row in reversed(rows):
        if row.shape[0] != part.shape[0] or row.shape[-1] != pieces * dim:
            continue
        raw = row.double().unflatten(-1, (-1, dim)).norm(dim=-1)
        ratio = lengths[:, :, :, None] / raw[:, :, None, :]
        steady = (ratio.amax((0, 1)) - ratio.amin((0, 1))) < 1e-4 * ratio.amax((0, 1))
        if bool((steady.sum(-1) == 1).all()):
            return steady.double().argmax(-1).tolist()
    return None
