"""L18: a reordered or cropped cache is the cache of the reordered or cropped sequence."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from regard.adapters.base import Adapter
from regard.adapters.rng import Rng
from regard.laws.cached_runs import find_cached, measure_coarseness, split_into
from regard.laws.law import Case, Law, Observation, expect_equal
from regard.laws.variants import long_lengths

# Rows to take, of a batch of three: an order, one twice, fewer, a turn, one alone.
ORDERS = {"turn": (1, 2, 0), "swap": (0, 2, 1), "twice": (0, 0, 2), "fewer": (2, 0), "one": (1,), "more": (2, 1, 0, 1)}


class CacheAlgebraLaw(Law):
    id = "L18"
    slug = "cache-algebra"
    title = "Cache algebra"
    headline = "a changed cache is not the cache of the changed text."
    statement = (
        "A cache with reordered rows continues as the reordered batch; a cache cropped to n tokens continues as one "
        "built from n tokens."
    )
    equation = "reorder(cache(x), pi) = cache(x_pi);  crop(cache(x_{1:m}), n) = cache(x_{1:n})"
    catches = (
        "a crop that does nothing, a reorder that misses a layer, the masks or the positions, stale slots after a crop"
    )
    needs = ("cache", "aligned", "lengths")
    smallest = {"tokens": 2, "kept": 1}
    kinds = ("order", "kept")
    minimum = 4

    def applies(self, subject: Adapter) -> str | None:
        reason = super().applies(subject)
        if reason is not None:
            return reason
        can = [self._supports_operation(subject, operation) for operation in ("reorder", "crop")]
        return None if any(can) else "its cache can neither be reordered nor cropped"

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        lengths = subject.lengths(6) if fast else subject.lengths(6, 13, 40, 70)
        crops, reorders = self._supports_operation(subject, "crop"), self._supports_operation(subject, "reorder")
        for tokens in long_lengths(subject, fast, 301):
            if crops and tokens > 270:
                yield {"tokens": tokens, "kept": 270, "split": "prefill", "order": "none", "batch": 1}
            if reorders:
                yield {"tokens": tokens, "kept": 0, "split": "prefill", "order": "turn", "batch": 3}
        for tokens in lengths:
            for split in ("whole", "halves", "ones") if tokens < 40 else ("prefill",):
                if reorders:
                    for order in ORDERS if tokens == lengths[0] else ("turn", "twice"):
                        yield {"tokens": tokens, "kept": 0, "split": split, "order": order, "batch": 3}
                if crops:
                    for kept in sorted({1, 2, tokens // 2, tokens - 1, tokens}):
                        if 0 < kept <= tokens:
                            yield {
                                "tokens": tokens,
                                "kept": kept,
                                "split": split,
                                "order": "none",
                                "batch": 1 + kept % 2,
                            }
                if crops and reorders:
                    yield {"tokens": tokens, "kept": max(1, tokens // 2), "split": split, "order": "turn", "batch": 3}

    def possible(self, case: Case) -> bool:
        kept = int(case["kept"])
        return kept <= int(case["tokens"]) and (kept > 0 or case["order"] != "none")

    @torch.no_grad()
    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        caching = find_cached(subject)
        batch, tokens, kept = int(case["batch"]), int(case["tokens"]), int(case["kept"])
        if subject.max_length is not None:  # what follows has to fit too
            tokens = min(tokens, subject.max_length - 3)
            kept = min(kept, tokens)
        x = subject.draw(batch, tokens, rng)
        pieces = [tokens] if case["split"] == "whole" else split_into(str(case["split"]), tokens, rng)
        state = caching.start(batch, tokens + 3)
        for piece in x.split(pieces, 1):
            _, state = caching.step(state, piece)
        state = copy.deepcopy(state)
        changes = []
        if kept:
            state = caching.crop(state, kept)
            x = x[:, :kept]
            changes.append(f"cache cropped from {tokens} tokens to {kept}")
        if state is not None and case["order"] != "none":
            index = torch.tensor(ORDERS[str(case["order"])])
            state = caching.reorder(state, index)
            x = x[index]
            changes.append(f"cache reordered by {index.tolist()}")
        if state is None:
            return
        more = subject.draw(x.shape[0], 3, rng)
        found = []
        for piece in more.split([1, 2], 1):
            row, state = caching.step(state, piece)
            found.append(row)
        expected = self._decode_after_cache_of(subject, x, more)
        yield expect_equal(
            expected,
            torch.cat(found, 1),
            changed=", ".join(changes),
            tokens=range(x.shape[1], x.shape[1] + 3),
            reduction=tokens + subject.channels,
            scale=float(expected.abs().nan_to_num(0, 0, 0).max()) * measure_coarseness(subject, caching),
        )

    @staticmethod
    def _decode_after_cache_of(subject: Adapter, x: Tensor, more: Tensor) -> Tensor:
        """The rows of `more` after a cache that was built from `x` and from nothing else."""
        caching = find_cached(subject)
        _, state = caching.step(caching.start(x.shape[0], x.shape[1] + 3), x)
        rows = []
        for piece in more.split([1, 2], 1):
            row, state = caching.step(state, piece)
            rows.append(row)
        return torch.cat(rows, 1)

    @staticmethod
    @torch.no_grad()
    def _supports_operation(subject: Adapter, operation: str) -> bool:
        """Whether the subject offers the operation at all."""
        caching = find_cached(subject)
        try:
            x = subject.draw(2, subject.lengths(4)[0], Rng(0, "algebra"))
            _, state = caching.step(caching.start(2, x.shape[1]), x)
            if operation == "crop":
                return caching.crop(copy.deepcopy(state), max(1, x.shape[1] - 2)) is not None
            return caching.reorder(copy.deepcopy(state), torch.tensor([1, 0])) is not None
        except NotImplementedError:  # it says so itself
            return False
        except Exception:  # it is offered and fails: the cases will meet it
            return True
