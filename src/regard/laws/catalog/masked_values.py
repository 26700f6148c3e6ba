"""L5: masked keys and values may be NaN, infinite or huge."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.law import MISSING, Case, Law, Observation
from regard.laws.masks import SIDES, key_mask, pair_mask, token_mask
from regard.laws.probes import expect_same_output, is_causal
from regard.laws.variants import LONG, half_precisions, head_sizes, long_lengths

POISONS = {"nan": torch.nan, "inf": torch.inf, "1e30": 1e30, "-1e30": -1e30, "-inf": -torch.inf}
WHERE = ("both", "values", "keys")


class MaskedValuesLaw(Law):
    id = "L5"
    slug = "masked-values"
    title = "Masked values"
    headline = "a hidden key or value touched the output."
    statement = (
        "Masked keys and values may be NaN, infinite or huge: queries that do not attend to them give the same output."
    )
    equation = "a_ij hidden  =>  y_i(k_j, v_j) = y_i(anything, anything)"
    catches = "a weight of zero times NaN, a large negative number in place of -inf, cache slots that were never filled"

    def applies(self, subject: Adapter) -> str | None:
        if "float" not in subject.abilities:
            return MISSING["float"]
        if "mask" not in subject.abilities and not is_causal(subject):
            return MISSING["mask"]
        return super().applies(subject)

    smallest = {"batch": 1, "tokens": 2, "hidden": 1, "queries": 1, "keys": 2}
    kinds = ("comparison", "poison")
    minimum = 4

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        masked = "mask" in subject.abilities
        names = list(POISONS)
        turn = 0
        yield from self._one_of_each(subject, masked)
        if masked:
            for name in half_precisions(subject):
                for side in ("right", "random"):
                    tokens = subject.lengths(5)[0]
                    sizes = {"batch": 2, "tokens": tokens, "hidden": 2}
                    yield {"comparison": "tokens", **sizes, "side": side, "poison": "nan", "dtype": name}
            for tokens in long_lengths(subject, fast, LONG):
                yield {
                    "comparison": "tokens",
                    "batch": 1,
                    "tokens": tokens,
                    "hidden": 89,
                    "side": "right",
                    "poison": "nan",
                }
            for wide in head_sizes(subject):
                sizes = {"batch": 2, "queries": 3, "keys": 7, "form": "pairs", "poison": "nan", "what": "both"}
                yield {"comparison": "keys", **sizes, **wide}
        if isinstance(subject, OperatorAdapter) and masked:
            for batch, queries, keys in ((2, 5, 5), (1, 3, 7), (3, 7, 4), (2, 1, 6)):
                for form in ("keys", "pairs", "heads"):
                    for poison in names[: 2 if fast else 5]:
                        sizes = {"batch": batch, "queries": queries, "keys": keys}
                        what = WHERE[turn % 3] if turn > 3 else "both"
                        turn += 1
                        yield {"comparison": "keys", **sizes, "form": form, "poison": poison, "what": what}
                        yield {"comparison": "some", **sizes, "form": form, "poison": poison, "what": what}
        for batch, wanted, hidden in ((2, 5, 2), (1, 7, 3), (3, 7, 5)):
            tokens = subject.lengths(wanted)[0]
            for side in SIDES if masked else ():
                for poison in names[: 2 if fast else 5]:
                    sizes = {"batch": batch, "tokens": tokens, "hidden": hidden}
                    yield {"comparison": "tokens", **sizes, "side": side, "poison": poison}
        for tokens in subject.lengths(5, 17) if is_causal(subject) else ():
            for poison in names[: 2 if fast else 4]:
                yield {"comparison": "future", "batch": 2, "tokens": tokens, "hidden": tokens // 2, "poison": poison}
        for tokens in subject.lengths(37, 141, 260) if masked else ():
            for hidden in sorted({tokens // 3, min(tokens - 1, 130)}):
                for side in SIDES:
                    poison = names[turn % 5]
                    turn += 1
                    sizes = {"batch": 1, "tokens": tokens, "hidden": hidden}
                    yield {"comparison": "tokens", **sizes, "side": side, "poison": poison}

    @staticmethod
    def _one_of_each(subject: Adapter, masked: bool) -> Iterator[Case]:
        """Every kind of mask at every kind of length: small, with a tail behind blocks of 8 to 128, one query, long."""
        forms, names = ("keys", "pairs", "heads"), ("nan", "inf")
        long = subject.lengths(5, 37, 70, 141)
        for turn, (queries, keys) in enumerate(((5, 5), (37, 37), (1, 37), (3, 70), (2, 141), (1, 2))):
            poison, side = names[turn % 2], SIDES[turn % 4]
            if isinstance(subject, OperatorAdapter) and masked:
                sizes = {"batch": 1 + turn % 2, "queries": queries, "keys": keys, "form": forms[turn % 3]}
                yield {"comparison": "keys", **sizes, "poison": poison, "what": "both"}
                yield {"comparison": "some", **sizes, "poison": poison, "what": "both"}
            if turn >= len(long):
                continue
            sizes = {"batch": 1 + turn % 2, "tokens": long[turn], "hidden": max(long[turn] // 3, 1)}
            if masked:
                yield {"comparison": "tokens", **sizes, "side": side, "poison": poison}
                yield {"comparison": "tokens", **sizes, "side": "random", "poison": names[1 - turn % 2]}
            if is_causal(subject):
                yield {"comparison": "future", **sizes, "poison": poison}

    def possible(self, case: Case) -> bool:
        return "hidden" not in case or 0 < int(case["hidden"]) < int(case["tokens"])

    @torch.no_grad()
    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        if case["comparison"] in ("tokens", "future"):
            yield from _observe_tokens(subject, case, rng)
        else:
            assert isinstance(subject, OperatorAdapter)
            yield _observe_operator(subject, case, rng)


def _observe_tokens(subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
    batch, tokens, hidden = int(case["batch"]), int(case["tokens"]), int(case["hidden"])
    x = subject.draw(batch, tokens, rng)
    future = case["comparison"] == "future"
    real = token_mask("same" if future else str(case["side"]), batch, tokens, hidden, rng)
    mask = None if future else real
    before = subject.run(x, mask)
    shown = real.reshape(batch, tokens, *[1] * (x.ndim - 2))
    after = subject.run(torch.where(shown, x, POISONS[str(case["poison"])]), mask)
    yield expect_same_output(
        subject,
        before,
        after,
        tokens,
        where=real if "aligned" in subject.abilities else None,
        touched=~real,
        changed=f"hidden tokens, to {case['poison']}",
    )


def _observe_operator(subject: OperatorAdapter, case: Case, rng: Rng) -> Observation:
    """Keys hidden from every query, or one key hidden from some of them."""
    batch, queries, keys, form = int(case["batch"]), int(case["queries"]), int(case["keys"]), str(case["form"])
    query, key, value = subject.tensors(rng, batch, queries, keys)
    if case["comparison"] == "keys":
        real = token_mask("random", batch, keys, max(keys // 2, 1), rng)
        mask = key_mask(subject, real, form, queries)
        poisoned = (~real)[:, None, :, None].expand(-1, subject.kv_heads, -1, -1)  # (batch, kv_head, key, 1)
        unseen = torch.ones(batch, queries, subject.heads, dtype=torch.bool)
    else:
        mask = pair_mask(subject, {"keys": "shared"}.get(form, form), batch, queries, keys, rng)
        place = rng.integer(0, keys)
        poisoned = (torch.arange(keys) == place)[None, None, :, None].expand(batch, subject.kv_heads, -1, -1)
        unseen = ~mask[..., place].expand(batch, subject.heads, queries).transpose(1, 2)
    before = subject.attend_rows(query, key, value, mask)
    poison = POISONS[str(case["poison"])]
    after = subject.attend_rows(query, *_poison(key, value, poisoned, poison, str(case["what"])), mask)
    what = "keys and values" if case["what"] == "both" else str(case["what"])
    return expect_same_output(subject, before, after, keys, where=unseen, changed=f"hidden {what}, to {case['poison']}")


def _poison(key: Tensor, value: Tensor, where: Tensor, poison: float, what: str) -> tuple[Tensor, Tensor]:
    if what != "values":
        key = key.masked_fill(where, poison)
    if what != "keys":
        value = value.masked_fill(where, poison)
    return key, value
