"""L1: what comes later changes nothing that came before."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from regard.laws.law import Case, Dice, Law, Observation, equal
from regard.laws.subjects.base import Subject, every_way, take_way


class Causality(Law):
    id = "L1"
    slug = "causality"
    title = "Causality"
    headline = "a later token changed an earlier output."
    statement = "Replacing the tokens after t leaves the outputs up to t as they were, bit by bit, for every t."
    equation = "x'_{<=t} = x_{<=t}  =>  y_{<=t}(x') = y_{<=t}(x)"
    catches = "a mask that is inverted, built only with a cache, dropped by a fast path, or off by one inside a block"
    needs = ("aligned", "lengths")
    smallest = {"batch": 1, "tokens": 2, "kept": 1}

    def cases(self, subject: Subject, fast: bool) -> Iterator[Case]:
        masks = ["none", "ones"] if "mask" in subject.abilities else ["none"]
        # Every place of short sequences, then places around the edges of blocks of 16, 32, 64 and 128.
        for tokens in subject.lengths(7) if fast else subject.lengths(2, 7, 17):
            for mask in masks:
                for kept in range(1, tokens):
                    yield {"batch": 1 + (kept % 2), "tokens": tokens, "kept": kept, "content": "other", "mask": mask}
        for way in every_way(subject):
            for tokens in subject.lengths(5, 37)[: 1 if fast else 2]:
                for kept in {1, tokens // 2, tokens - 1} - {0, tokens}:
                    for mask in masks:
                        case = {"batch": 1, "tokens": tokens, "kept": kept, "content": "other", "mask": mask}
                        yield case | {"way": way}
        for tokens in subject.lengths(33, 130) if fast else subject.lengths(33, 66, 131, 260):
            for mask in masks:
                for kept in sorted({1, 3, 15, 16, 31, 32, 63, 64, 65, 127, 128, 129, 255, tokens - 1, tokens // 2}):
                    if kept < tokens:
                        content = "other" if kept % 2 else "large"
                        yield {"batch": 1, "tokens": tokens, "kept": kept, "content": content, "mask": mask}

    def possible(self, case: Case) -> bool:
        return 0 < int(case["kept"]) < int(case["tokens"])

    @torch.no_grad()
    def observe(self, subject: Subject, case: Case, dice: Dice) -> Iterator[Observation]:
        batch, tokens, kept = int(case["batch"]), int(case["tokens"]), int(case["kept"])
        x = subject.draw(batch, tokens, dice)
        mask = torch.ones(batch, tokens, dtype=torch.bool) if case["mask"] == "ones" else None
        other = x.clone()
        other[:, kept:] = subject.scaled(x, 30.0 if case["content"] == "large" else 1.0, dice)[:, kept:]
        run = subject.run if "way" not in case else take_way(subject, str(case["way"]))
        before, after = run(x, mask).detach(), run(other, mask).detach()
        early = torch.arange(tokens).expand(batch, tokens) < kept
        yield equal(
            before,
            after,
            where=early,
            touched=~early,
            changed=f"input[:, {kept}:]" if kept < tokens - 1 else f"input[:, {kept}]",
            reduction=tokens + subject.channels,
            scale=float(before.abs().nan_to_num(0, 0, 0).max()),
        )
