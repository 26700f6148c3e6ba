"""L9: without positions, permuting the tokens permutes the outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.law import MISSING, Case, Law, Observation
from regard.laws.masks import draw_operator_mask, token_mask
from regard.laws.probes import expect_same_output
from regard.laws.variants import LONG, LONGER, head_sizes, long_lengths


class PermutationLaw(Law):
    id = "L9"
    slug = "permutation"
    title = "Permutation equivariance"
    headline = "the order of the tokens matters."
    statement = (
        "Permuting the tokens permutes the outputs. For an operator, permuting keys and values leaves the output "
        "unchanged, and permuting queries permutes its rows; a mask is permuted with them."
    )
    equation = "f(P X) = P f(X);  attn(Q, P K, P V) = attn(Q, K, V);  attn(P Q, K, V) = P attn(Q, K, V)"
    catches = "heads split by a view without a transpose, a last block left out, undeclared positions"
    smallest = {"batch": 1, "tokens": 2, "queries": 1, "keys": 2}
    kinds = ("what", "tokens", "keys")
    minimum = 4

    def applies(self, subject: Adapter) -> str | None:
        if "aligned" in subject.abilities or "lengths" in subject.abilities:
            return super().applies(subject)
        return MISSING["aligned"]

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        own = (subject.heads, subject.dim) if isinstance(subject, OperatorAdapter) else (subject.channels,)
        own = tuple(length for length in own if 1 < length <= 130)
        masks = ["none", "tokens"] if "mask" in subject.abilities else ["none"]
        short = (5, 2, 7, 3, *own) if fast else (5, 2, 7, 3, 4, *own, 6, *range(8, 18), 33, 65, 130)
        turn = 0
        if isinstance(subject, OperatorAdapter):
            pairs = ["none", "keys", "shared", "pairs", "heads"] if "mask" in subject.abilities else ["none"]
            # Tails of several keys behind whole blocks of 8, 16, 32, 64 and 128, soon.
            for queries, keys in ((5, 5), (5, 11), (1, 37), (37, 37), (3, 70), (2, 131)):
                for mask in dict.fromkeys(["none", pairs[1 + turn % 4] if len(pairs) > 1 else "none"]):
                    yield {"what": "keys", "batch": 1 + turn % 3, "queries": queries, "keys": keys, "mask": mask}
                    yield {"what": "queries", "batch": 1 + turn % 3, "queries": keys, "keys": queries, "mask": mask}
                turn += 1
            for queries, keys in ((LONG, LONG), (3, LONGER)) if "lengths" in subject.abilities else ():
                yield {"what": "keys", "batch": 1, "queries": queries, "keys": keys, "mask": pairs[-1]}
            for sizes in head_sizes(subject):
                yield {"what": "keys", "batch": 2, "queries": 5, "keys": 7, "mask": "none", **sizes}
            for keys in dict.fromkeys(short):
                for queries in dict.fromkeys([keys, max(keys - 2, 1), 1, keys + 3]):
                    mask = pairs[turn % len(pairs)]
                    yield {"what": "keys", "batch": 1 + turn % 3, "queries": queries, "keys": keys, "mask": mask}
                    yield {"what": "queries", "batch": 1 + turn % 3, "queries": keys, "keys": queries, "mask": mask}
                    turn += 1
        for tokens in dict.fromkeys([*subject.lengths(5, 19, 37, 70), *long_lengths(subject, fast, LONG)]):
            for mask in masks:
                yield {"what": "tokens", "batch": 1 + turn % 2, "tokens": tokens, "mask": mask}
            turn += 1
        for tokens in dict.fromkeys(subject.lengths(*short)):
            for batch in dict.fromkeys([1, 2, tokens if tokens < 9 else 3]):
                yield {"what": "tokens", "batch": batch, "tokens": tokens, "mask": masks[turn % len(masks)]}
                turn += 1

    def possible(self, case: Case) -> bool:
        return case["what"] != "queries" or int(case["queries"]) > 1

    @torch.no_grad()
    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        if case["what"] != "tokens":
            assert isinstance(subject, OperatorAdapter)
            yield self._observe_operator(subject, case, rng)
            return
        batch, tokens = int(case["batch"]), int(case["tokens"])
        x = subject.draw(batch, tokens, rng)
        order = rng.permutation(tokens)
        mask = token_mask("random", batch, tokens, tokens // 2, rng) if case["mask"] == "tokens" else None
        before = subject.run(x, mask)
        after = subject.run(x[:, order].contiguous(), None if mask is None else mask[:, order].contiguous())
        aligned = "aligned" in subject.abilities
        yield expect_same_output(
            subject,
            before[:, order] if aligned else before,
            after,
            tokens,
            before,
            where=mask[:, order] if mask is not None and aligned else None,
            changed="the order of tokens",
            tokens=order.tolist() if aligned else None,
        )

    @staticmethod
    def _observe_operator(subject: OperatorAdapter, case: Case, rng: Rng) -> Observation:
        batch, queries, keys, form = int(case["batch"]), int(case["queries"]), int(case["keys"]), str(case["mask"])
        query, key, value = subject.tensors(rng, batch, queries, keys)
        mask = draw_operator_mask(subject, form, batch, queries, keys, rng)
        before = subject.attend_rows(query, key, value, mask)
        order = rng.permutation(keys if case["what"] == "keys" else queries)
        if case["what"] == "keys":
            moved = None if mask is None else mask[..., order]
            after = subject.attend_rows(query, key[:, :, order], value[:, :, order], moved)
            expected, names = before, None
        else:
            moved = mask if mask is None or mask.shape[2] == 1 else mask[:, :, order]
            after = subject.attend_rows(query[:, :, order], key, value, moved)
            expected, names = before[:, order], order.tolist()
        return expect_same_output(
            subject, expected, after, keys, before, changed=f"the order of {case['what']}", tokens=names
        )
