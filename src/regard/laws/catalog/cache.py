"""L3: decoding in chunks with a KV cache gives the outputs of one pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.cached_runs import decode_in_pieces, describe_pieces, find_cached, measure_coarseness, split_into
from regard.laws.law import Case, Law, Observation, expect_equal
from regard.laws.variants import LONG, head_sizes, long_lengths

SPLITS = ("ones", "halves", "first", "last", "twos", "prefill", "threes", "random")


class CacheLaw(Law):
    id = "L3"
    slug = "cache"
    title = "Cache consistency"
    headline = "reading in pieces gave something else than reading at once."
    statement = (
        "However a sequence is split into chunks, the outputs with a KV cache are those of one pass over the whole "
        "sequence."
    )
    equation = "f(x_{1:a}, {}), f(x_{a+1:b}, cache_a), ... = f(x_{1:n})"
    catches = (
        "positions that restart at each chunk, a mask for whole sequences only, empty slots attended to, a window cut "
        "too short"
    )
    needs = ("cache", "aligned", "lengths")
    smallest = {"batch": 1, "tokens": 2}
    kinds = ("split",)
    minimum = 4

    def applies(self, subject: Adapter) -> str | None:
        return None if isinstance(subject, OperatorAdapter) else super().applies(subject)

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        masked = "mask" in subject.abilities and subject.conventions.left is not False
        for tokens in subject.lengths(5, 12):
            for split in SPLITS:
                yield _make_case(1 if split in ("ones", "last") else 3, tokens, split)
        if masked:
            for split in ("prefill", "ones", "halves", "random"):
                yield _make_case(3, subject.lengths(11)[0], split, mask="left")
            yield _make_case(1, subject.lengths(11)[0], "prefill", mask="ones")
        yield _make_case(2, subject.lengths(7)[0], "prefill", used=True)
        # Beyond 128, 256 and 512 cached tokens, and across 256 token by token.
        for tokens, split in ((141, "prefill"), (301, "prefill"), (275, "from 250"), (LONG, "prefill")):
            for fitting in long_lengths(subject, fast, tokens):
                if fitting == tokens or subject.step_of_lengths > 1:
                    yield _make_case(1, fitting, split)
        for sizes in head_sizes(subject):
            yield _make_case(2, 7, "prefill") | sizes
        for tokens in subject.lengths(33, 70) if fast else subject.lengths(33, 70, 140):
            for split in ("prefill", "halves", "random") if fast else ("prefill", "halves", "random", "threes", "ones"):
                yield _make_case(1 if tokens > 70 else 2, tokens, split)
        for more in range(0 if fast else 12):
            tokens = subject.lengths(*((9, 17, 25, 40)[: 1 + more % 4]))[-1]
            yield {**_make_case(1 + more % 3, tokens, "random"), "try": more}
            if masked:
                yield {**_make_case(2, tokens, "random", mask="left"), "try": more}

    @torch.no_grad()
    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        batch, tokens = int(case["batch"]), int(case["tokens"])
        caching = find_cached(subject)
        x = subject.draw(batch, tokens, rng)
        pieces = split_into(str(case["split"]), tokens, rng)
        mask = None if case["mask"] == "none" else torch.ones(batch, tokens, dtype=torch.bool)
        if mask is not None and case["mask"] == "left":
            for row in range(batch):
                mask[row, : (tokens - 1) * (row + 1) // (batch + 1)] = False
            if not _ignores_hidden_tokens(subject, x, mask, rng):
                return  # it does not hide what is padded on the left even in one run; `padding` covers that
        if case["used"]:
            decode_in_pieces(caching, subject.draw(batch, tokens, rng), pieces)
        whole = subject.run(x, mask)
        found = decode_in_pieces(caching, x, pieces, mask)
        yield expect_equal(
            whole,
            found,
            where=mask,
            changed=f"read in pieces of {describe_pieces(pieces)}",
            reduction=tokens + subject.channels,
            scale=float(whole.abs().nan_to_num(0, 0, 0).max()) * measure_coarseness(subject, caching),
        )


def _make_case(batch: int, tokens: int, split: str, mask: str = "none", used: bool = False) -> dict:
    return {"batch": batch, "tokens": tokens, "split": split, "mask": mask, "used": used}


def _ignores_hidden_tokens(subject: Adapter, x: Tensor, mask: Tensor, rng: Rng) -> bool:
    """Whether the output of one run does not depend on what the mask hides."""
    other = x.clone()
    other[~mask] = subject.draw(x.shape[0], x.shape[1], rng)[~mask]
    one, two = subject.run(x, mask)[mask], subject.run(other, mask)[mask]
    scale = float(one.abs().nan_to_num(0, 0, 0).max()) + 1e-30
    return bool(((one - two).abs() <= 1e-3 * scale).all() or one.isnan().all())
