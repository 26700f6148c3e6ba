"""L2: the outputs of the last queries alone are the last rows of all outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.law import Case, Law, Observation
from regard.laws.masks import draw_operator_mask
from regard.laws.probes import expect_same_output
from regard.laws.variants import LONG, LONGER, head_sizes

MASKS = ("none", "keys", "causal", "shared", "pairs", "heads")


class AlignmentLaw(Law):
    id = "L2"
    slug = "alignment"
    title = "Alignment of unequal lengths"
    headline = "the last queries alone give other outputs than among all queries."
    statement = (
        "The outputs of the last m queries alone are the last m rows of the outputs of all queries, for every m, also "
        "with more queries than keys. With alignment at the start, the same holds for the first m."
    )
    equation = "attn(Q[-m:], K, V) = attn(Q, K, V)[-m:]"
    catches = "a causal mask that starts at the upper left, so that one query with a cache sees the first key only"
    needs = ("operator",)
    smallest = {"batch": 1, "keys": 1, "queries": 1, "last_queries": 1}
    kinds = ("queries", "keys")
    minimum = 6

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        masks = MASKS if "mask" in subject.abilities else ("none",)
        turn = 0
        # One size of each sort first: small, unequal, with a tail behind blocks of 8, 16, 32, 64 and 128, and longer.
        for queries, keys, count in (
            (5, 5, 1), (2, 3, 1), (37, 37, 1), (37, 37, 5), (3, 37, 1), (70, 43, 37), (141, 141, 43), (2, 1, 1),
            (43, 70, 6), (37, 1, 3), (141, 37, 1), (3, 141, 2), (LONG, LONG, 3), (3, LONGER, 1),
        ):  # fmt: skip
            for mask in dict.fromkeys(("none", masks[(turn + 1) % len(masks)])):
                yield self._make_case(1 + turn % 2, queries, keys, count, mask)
            turn += 1
        for wide in head_sizes(subject):
            for queries, keys in ((5, 5), (3, 7)):
                yield {**self._make_case(2, queries, keys, 1, "none"), **wide}
        sizes = [(5, 5), (4, 7), (7, 4), (2, 3), (3, 2), (9, 9), (1, 6), (6, 1), (8, 3)]
        if not fast:
            sizes += [(n, n) for n in (2, 3, 4, 6, 7, 8)] + [(9, 5), (5, 9)]
        for queries, keys in sizes:
            for count in dict.fromkeys([1, queries - 1, *range(2, queries)]):
                if 0 < count < queries:
                    for mask in ("none", masks[turn % len(masks)]) if masks[turn % len(masks)] != "none" else ("none",):
                        yield self._make_case(1 + turn % 2, queries, keys, count, mask)
                    turn += 1
        for queries, keys in [(37, 37), (70, 70), (141, 141), (70, 141), (141, 70), (17, 37), (33, 33), (65, 65)]:
            for count in (2, 16, 32, 64, queries - 1) if fast else (1, 2, 5, 16, 32, 63, 64, queries - 1):
                if count < queries:
                    turn += 1
                    yield self._make_case(1 + turn % 2, queries, keys, count, "none")
                    if masks[turn % len(masks)] != "none":
                        yield self._make_case(1 + turn % 2, queries, keys, count, masks[turn % len(masks)])

    @staticmethod
    def _make_case(batch: int, queries: int, keys: int, count: int, mask: str) -> Case:
        return {"batch": batch, "queries": queries, "keys": keys, "last_queries": count, "mask": mask}

    def possible(self, case: Case) -> bool:
        return 0 < int(case["last_queries"]) <= int(case["queries"])

    @torch.no_grad()
    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        assert isinstance(subject, OperatorAdapter)
        batch, queries, keys = int(case["batch"]), int(case["queries"]), int(case["keys"])
        count, form = int(case["last_queries"]), str(case["mask"])
        query, key, value = subject.tensors(rng, batch, queries, keys)
        end = subject.conventions.align == "end"
        if form == "causal":
            mask = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries if end else 0)
        else:
            mask = draw_operator_mask(subject, form, batch, queries, keys, rng)
        rows = slice(queries - count, queries) if end else slice(0, count)
        part = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows]
        everything = subject.attend_rows(query, key, value, mask)
        alone = subject.attend_rows(query[:, :, rows], key, value, part)
        yield expect_same_output(
            subject,
            everything[:, rows],
            alone,
            keys,
            everything,
            changed=f"queries[{'-' if end else ':'}{count}{':' if end else ''}] of {queries} given alone",
            tokens=range(queries)[rows],
        )
