"""L3: a text read in pieces gives the same as a text read at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from regard.adapters.base import Adapter, Cached
from regard.adapters.operator import OperatorAdapter
from regard.adapters.precision import find_coarsest_dtype
from regard.adapters.rng import Rng
from regard.laws.compare import FACTOR
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


def find_cached(subject: Adapter) -> Cached:
    """How the subject runs piece by piece."""
    if subject.caching is None and isinstance(subject, OperatorAdapter):
        return KeysAndValues(subject)
    assert subject.caching is not None
    return subject.caching


class KeysAndValues:
    """The KV cache of an operator: new queries attend to all keys and values so far."""

    def __init__(self, subject: OperatorAdapter) -> None:
        self.subject = subject

    def start(self, batch: int, tokens: int) -> Any:
        return None

    def step(self, state: Any, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        past = x if state is None else torch.cat([state, x], 1)
        query, (_, key, value) = self.subject.parted(x)[0], self.subject.parted(past)
        output = self.subject.attend(query, key, value, None if mask is None else mask[:, None, None, :])
        return self.subject.rows(output), past

    def reorder(self, state: Any, index: Tensor) -> Any | None:
        return None

    def crop(self, state: Any, tokens: int) -> Any | None:
        return None


def decode_in_pieces(caching: Cached, x: Tensor, pieces: list[int], mask: Tensor | None = None) -> Tensor:
    """The output rows of a text read in pieces."""
    state: Any = caching.start(x.shape[0], x.shape[1])
    rows, read = [], 0
    for piece in x.split(pieces, 1):
        read += piece.shape[1]
        row, state = caching.step(state, piece, None if mask is None else mask[:, :read])
        rows.append(row)
    return torch.cat(rows, 1)


def split_into(split: str, tokens: int, rng: Rng) -> list[int]:
    """The sizes of the pieces, none of them empty."""
    each = {"ones": 1, "twos": 2, "threes": 3}.get(split)
    first = {"halves": -(-tokens // 2), "first": 1, "last": tokens - 1}.get(split, tokens)
    if each is not None:
        sizes = [each] * (tokens // each) + [tokens % each]
    elif split == "prefill":
        begin = max(1, tokens - 4)
        sizes = [begin] + [1] * (tokens - begin)
    elif split.startswith("from "):
        begin = max(1, min(int(split.removeprefix("from ")), tokens - 1))
        sizes = [begin] + [1] * min(12, tokens - begin) + [max(tokens - begin - 12, 0)]
    elif split == "random":
        sizes = []
        while sum(sizes) < tokens:
            largest = (2, 4, tokens)[rng.integer(0, 3)]
            sizes.append(min(rng.integer(1, largest + 1), tokens - sum(sizes)))
    else:
        sizes = [first, tokens - first]
    return [size for size in sizes if size]


def describe_pieces(pieces: list[int]) -> str:
    """Sizes of pieces, short."""
    if len(pieces) > 6:
        return ", ".join(map(str, pieces[:4])) + f" ... {pieces[-1]}"
    return ", ".join(map(str, pieces))


def measure_coarseness(subject: Adapter, caching: Cached) -> float:
    """How much coarser the numbers in a cache are than those of a run, in bounds; it may have its own precision."""
    if subject.dtype != torch.float64:
        return 1.0
    if (known := vars(subject).get("_coarseness")) is None:
        tokens = subject.lengths(3)[0]
        x = subject.draw(1, tokens, Rng(0, "coarseness"))
        eps = torch.finfo(find_coarsest_dtype(lambda: decode_in_pieces(caching, x, [1] * tokens))).eps
        factor = FACTOR[torch.float32] / FACTOR[torch.float64]
        known = 1.0 if eps <= subject.eps else max(1.0, eps / subject.eps * factor)
        vars(subject)["_coarseness"] = known
    return known


def _ignores_hidden_tokens(subject: Adapter, x: Tensor, mask: Tensor, rng: Rng) -> bool:
    """Whether the output of one run does not depend on what the mask hides."""
    other = x.clone()
    other[~mask] = subject.draw(x.shape[0], x.shape[1], rng)[~mask]
    one, two = subject.run(x, mask)[mask], subject.run(other, mask)[mask]
    scale = float(one.abs().nan_to_num(0, 0, 0).max()) + 1e-30
    return bool(((one - two).abs() <= 1e-3 * scale).all() or one.isnan().all())
