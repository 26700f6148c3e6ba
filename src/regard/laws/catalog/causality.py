"""L1: later tokens do not change earlier outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from regard.adapters.base import Adapter, run_variant, variant_names
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.law import Case, Law, Observation, expect_equal
from regard.laws.masks import pair_mask, token_mask
from regard.laws.variants import LONG, LONGER, half_precisions, head_sizes, long_lengths


class CausalityLaw(Law):
    id = "L1"
    slug = "causality"
    title = "Causality"
    headline = "a later token changed an earlier output."
    statement = "Replacing the tokens after t leaves the outputs up to t unchanged, bit for bit, for every t."
    equation = "x'_{<=t} = x_{<=t}  =>  y_{<=t}(x') = y_{<=t}(x)"
    catches = "a mask that is inverted, built only with a cache, dropped by a fast path, or off by one inside a block"
    needs = ("aligned", "lengths")
    smallest = {"batch": 1, "tokens": 2, "kept": 1}
    kinds = ("kept",)
    minimum = 6

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        def case(tokens: int, kept: int, batch: int = 1, content: str = "other", mask: str = "none") -> dict:
            return {"batch": batch, "tokens": tokens, "kept": kept, "content": content, "mask": mask}

        masks = ["none"]
        if "mask" in subject.abilities:
            masks += ["ones", "right", *(["pairs"] if isinstance(subject, OperatorAdapter) else [])]
            # Hidden first tokens see nothing; what they yield may reach later layers, by convention.
            masks += ["left", "random"] if subject.conventions.left is not False else []
        contents = ["large", "blank", "repeated", *(["huge values"] if isinstance(subject, OperatorAdapter) else [])]
        (short,) = subject.lengths(7)
        for kept in range(1, short):
            yield case(short, kept, 1 + kept % 2)
        # Half precision, wide heads, long sequences and large batches often have code of their own.
        for name in half_precisions(subject):
            for kept in sorted({1, short // 2, short - 1} - {0, short}):
                for mask in dict.fromkeys(["none", masks[-1]]):
                    yield case(short, kept, 2, mask=mask) | {"dtype": name}
        for sizes in head_sizes(subject):
            for tokens, kept in ((short, short // 2), (37, 35)):
                yield case(tokens, kept, mask=masks[-1 if tokens == 37 else 0]) | sizes
        for tokens in long_lengths(subject, fast, LONG, LONGER):
            for kept in sorted({tokens // 2, min(514, tokens - 2), tokens - 4}):
                yield case(tokens, kept)
            for name in half_precisions(subject)[:1]:
                yield case(tokens, tokens // 2) | {"dtype": name}
        if short > 1:
            yield case(short, short // 2, 9)
        # Inside the ragged tail of blocks of 8, 16, 32, 64 and 128, and across their edges.
        for tokens in subject.lengths(37, 141):
            for kept in (tokens - 2, tokens - 4, tokens // 2):
                if 0 < kept < tokens:
                    yield case(tokens, kept)
        for number, (mask, content) in enumerate(
            [(mask, "other") for mask in masks[1:]] + [("none", c) for c in contents]
        ):
            for kept in {1, short // 2, short - 1} - {0, short}:
                yield case(short, kept, 1 + number % 2, content, mask)
        for variant in variant_names(subject):
            for tokens in subject.lengths(5, 37)[: 1 if fast else 2]:
                for kept in {1, tokens // 2, tokens - 1} - {0, tokens}:
                    for mask in masks[:2]:
                        yield case(tokens, kept, mask=mask) | {"path": variant}
        # Every place of short sequences, then places around the edges of blocks.
        for tokens in subject.lengths(17) if fast else subject.lengths(2, 17, 29):
            for kept in range(1, tokens):
                mask = masks[kept % len(masks)]
                yield case(tokens, kept, 1 + kept % 3, mask=mask)
        for tokens in subject.lengths(70, 135) if fast else subject.lengths(33, 66, 131, 260):
            for kept in sorted({1, 3, 15, 16, 31, 32, 63, 64, 65, 127, 128, 129, 255, tokens - 1, tokens // 2}):
                if kept < tokens:
                    mask, content = masks[kept % len(masks)], "other" if kept % 2 else "large"
                    yield case(tokens, kept, 1, content, mask)

    def possible(self, case: Case) -> bool:
        return 0 < int(case["kept"]) < int(case["tokens"])

    @torch.no_grad()
    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        batch, tokens, kept = int(case["batch"]), int(case["tokens"]), int(case["kept"])
        x = subject.draw(batch, tokens, rng)
        if case["content"] in ("blank", "repeated"):
            # What a subject may take for padding, or for a sign of its own.
            x[:, kept:] = x[:, kept - 1 : kept] if case["content"] == "repeated" else make_blank(subject, x)
        real, run = _make_masked_run(subject, str(case["mask"]), batch, tokens, rng)
        if "path" in case:
            variant = run_variant(subject, str(case["path"]))
            run = lambda x: variant(x, None if case["mask"] == "none" else real).detach()  # noqa: E731
        other = x.clone()
        other[:, kept:] = subject.scaled(x, 30.0 if case["content"] == "large" else 1.0, rng)[:, kept:]
        before, after = run(x), run(other)
        early = torch.arange(tokens).expand(batch, tokens) < kept
        how = {
            "where": early & real,
            "touched": ~early,
            "changed": f"input[:, {kept}:]" if kept < tokens - 1 else f"input[:, {kept}]",
            "reduction": tokens + subject.channels,
            "scale": float(before.abs().nan_to_num(0, 0, 0).max()),
        }
        yield expect_equal(before, after, **how)
        if (
            case["content"] == "huge values"
            and isinstance(subject, OperatorAdapter)
            and _agree_in_every_bit(before, after, early)
        ):
            # A weight that is not quite zero shows when its value is large. Only of those whose sums leave the future
            # out altogether: a convolution by Fourier transform is causal up to rounding.
            query, key, value = subject.parted(other)
            value[:, :, kept:] *= 1e25
            yield expect_equal(before, run(subject.joined(query, key, value)), **how)


def _make_masked_run(
    subject: Adapter, kind: str, batch: int, tokens: int, rng: Rng
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Which tokens are real, and how to run the subject with that mask."""
    real = torch.ones(batch, tokens, dtype=torch.bool)
    if kind == "pairs":
        assert isinstance(subject, OperatorAdapter)
        pairs = pair_mask(subject, "pairs", batch, tokens, tokens, rng)
        return real, lambda x: subject.attend_rows(*subject.parted(x), pairs)
    if kind == "none":
        return real, subject.run
    if kind != "ones":
        real = token_mask(kind, batch, tokens, max(tokens // 3, 1), rng)
    return real, lambda x: subject.run(x, real)


def make_blank(subject: Adapter, x: Tensor) -> Tensor | float:
    """Blank content: zeros, or the lowest id."""
    return 0.0 if x.is_floating_point() else subject.draw(1, subject.lengths(64)[0], Rng(0, "blank")).min()


def _agree_in_every_bit(before: Tensor, after: Tensor, where: Tensor) -> bool:
    return torch.equal(before[where].nan_to_num(), after[where].nan_to_num())
