"""L4: masked tokens do not change the outputs of real ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import Tensor

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.law import Case, Law, Observation, expect_equal, expect_finite, expect_true, expect_zero
from regard.laws.masks import SIDES, pair_mask, token_mask
from regard.laws.probes import (
    agree_up_to_rounding,
    draw_other_content,
    expect_same_output,
    find_magnitude,
    ignores_order,
    make_generating_permutations,
    owes_left_padding,
    table_coarseness,
    takes_length,
)
from regard.laws.variants import LONG, LONGER, half_precisions, head_sizes, in_native_precision, is_half, long_lengths

CONTENTS = ("other", "large", "zeros")


class PaddingLaw(Law):
    id = "L4"
    slug = "padding"
    title = "Padding invariance"
    headline = "a token that the mask hides changed the output of a real one."
    statement = (
        "Outputs of real tokens do not depend on the content of masked tokens, and are the same when these are "
        "removed: on the right for every target, on the left if it is causal or has no absolute positions, in between "
        "if it has no positions. No gradient flows to masked tokens. A mask that hides nothing equals no mask."
    )
    equation = "y_real(x, m) = y(x_real);  d y_real / d x_hidden = 0;  y(x, 1) = y(x)"
    catches = (
        "a mask applied to values only, after the softmax, inverted, transposed, dropped in one code path; positions "
        "counted from the padding; masked keys left in a normaliser"
    )
    needs = ("mask",)
    smallest = {"batch": 1, "tokens": 2, "hidden": 1, "queries": 1, "keys": 2}
    kinds = ("comparison", "side", "tokens")
    minimum = 12

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        # Every sort of question comes early: a few of each in turn.
        streams = [
            self._make_small_cases(subject, fast),
            self._make_variant_cases(subject, fast),
            self._make_long_cases(subject, fast),
        ]
        if isinstance(subject, OperatorAdapter):
            streams.insert(0, self._make_pair_cases(fast))
        for turn in zip_longest(*streams):
            yield from (case for case in turn if case is not None)

    @staticmethod
    def _make_pair_cases(fast: bool) -> Iterator[Case]:
        forms = ("keys", "pairs", "heads", "shared")
        for form in forms:
            yield {"comparison": "ones", "batch": 2, "queries": 5, "keys": 5, "form": form}
        # The smallest, one query, tails of several keys behind whole blocks of 8 to 128.
        sizes = ((2, 5, 5), (2, 37, 37), (2, 1, 37), (1, 3, 70), (1, 3, 7), (2, 2, 141), (3, 7, 4), (1, 1, 2))
        for place, (batch, queries, keys) in enumerate(sizes):
            for form in forms[1:] if keys < 10 or not fast else (forms[1 + place % 3],):
                yield {"comparison": "pairs", "batch": batch, "queries": queries, "keys": keys, "form": form}
            if keys > 10:
                yield {"comparison": "ones", "batch": batch, "queries": queries, "keys": keys, "form": forms[place % 4]}

    @staticmethod
    def _make_small_cases(subject: Adapter, fast: bool) -> Iterator[Case]:
        small = [(2, 5, 2), (1, 7, 3), (3, 7, 4)] if fast else [(2, 5, 2), (1, 7, 3), (3, 7, 5), (5, 5, 3), (4, 3, 1)]
        for batch, wanted, hidden in small:
            tokens = subject.lengths(wanted)[0]
            yield {"comparison": "ones", "batch": batch, "tokens": tokens}
            for side in ("right", "left", "interior", "random", "row", "same"):
                for comparison in ("content", "removal", "gradient"):
                    if comparison != "gradient" or "float" in subject.abilities:
                        yield {
                            "comparison": comparison,
                            "batch": batch,
                            "tokens": tokens,
                            "hidden": hidden,
                            "side": side,
                        }

    @staticmethod
    def _make_variant_cases(subject: Adapter, fast: bool) -> Iterator[Case]:
        """Half precision, wide heads, long sequences and a large batch, which often have code of their own."""
        tokens = subject.lengths(5)[0]
        sides = ("right", *(("left",) if subject.conventions.left is not False else ()), "random")
        for name in half_precisions(subject) if tokens > 1 else ():
            for side in sides:
                for comparison in ("content", "removal"):
                    case = {"comparison": comparison, "batch": 2, "tokens": tokens, "hidden": 2, "side": side}
                    yield {**case, "dtype": name}
            yield {"comparison": "ones", "batch": 2, "tokens": tokens, "dtype": name}
        for place, sizes in enumerate(head_sizes(subject)):
            yield {
                "comparison": "pairs",
                "batch": 2,
                "queries": 5,
                "keys": 7,
                "form": ("pairs", "heads")[place % 2],
                **sizes,
            }
            yield {"comparison": "removal", "batch": 2, "tokens": 37, "hidden": 12, "side": "right", **sizes}
        for tokens in long_lengths(subject, fast, LONG, LONGER):
            for side in sides[: 2 if tokens == LONG else 1]:
                yield {"comparison": "removal", "batch": 1, "tokens": tokens, "hidden": 89, "side": side}
            yield {"comparison": "content", "batch": 1, "tokens": tokens, "hidden": 89, "side": "random"}
        if isinstance(subject, OperatorAdapter):
            for queries, keys in ((LONG, LONG), (3, LONGER)):
                yield {"comparison": "pairs", "batch": 1, "queries": queries, "keys": keys, "form": "shared"}
        tokens = subject.lengths(7)[0]
        if tokens > 1:
            yield {"comparison": "removal", "batch": 9, "tokens": tokens, "hidden": 3, "side": "right"}

    @staticmethod
    def _make_long_cases(subject: Adapter, fast: bool) -> Iterator[Case]:
        # A piece of a tail, whole blocks of 16, 64 and 128 keys are hidden, and all but one token.
        wanted = {37: (12, 36, 3), 70: (66, 3), 141: (130, 64, 47)}
        if not fast:
            more = (43, 17, 33, 130, 260, 16, 64, 128)
            wanted |= {tokens: (tokens // 3, tokens - 1, 128, 64) for tokens in more}
            wanted |= {tokens: (*hidden, tokens - 1, 64) for tokens, hidden in wanted.items()}
        for length, numbers in wanted.items():
            tokens = subject.lengths(length)[0]
            for hidden in dict.fromkeys(min(hidden, tokens - 1) for hidden in numbers):
                for side in SIDES:
                    batch = 1 + hidden % 2
                    yield {"comparison": "removal", "batch": batch, "tokens": tokens, "hidden": hidden, "side": side}
                yield {"comparison": "content", "batch": 2, "tokens": tokens, "hidden": hidden, "side": "random"}

    def possible(self, case: Case) -> bool:
        if case.get("side") == "row" and int(case["batch"]) < 2:
            return False
        return "hidden" not in case or 0 < int(case["hidden"]) < int(case["tokens"])

    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        if not self.possible(case):
            return
        comparison = case["comparison"]
        if comparison == "gradient":
            yield from _observe_gradient(subject, case, rng)
            return
        with torch.no_grad():
            if comparison == "ones":
                yield from _observe_mask_of_ones(subject, case, rng)
            elif comparison == "pairs":
                assert isinstance(subject, OperatorAdapter)
                yield from _observe_pairs(subject, case, rng)
            else:
                yield from (_observe_content if comparison == "content" else _observe_removal)(subject, case, rng)


def _draw_padded(subject: Adapter, case: Case, rng: Rng) -> tuple[Tensor, Tensor]:
    batch, tokens, hidden = int(case["batch"]), int(case["tokens"]), int(case["hidden"])
    x = subject.draw(batch, tokens, rng)
    return x, token_mask(str(case["side"]), batch, tokens, hidden, rng)


def _broadcast_mask(mask: Tensor, x: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *[1] * (x.ndim - 2))


def _find_real_outputs(subject: Adapter, mask: Tensor) -> Tensor | None:
    """The outputs that the law compares: those of real tokens; of rows with any, where outputs have no tokens."""
    if "aligned" in subject.abilities:
        return mask
    return None if mask.any(1).all() else mask.any(1)


def _observe_content(subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
    """Hidden tokens may contain anything."""
    x, mask = _draw_padded(subject, case, rng)
    before = subject.run(x, mask)
    where = _find_real_outputs(subject, mask)
    about = {
        "where": where,
        "touched": ~mask,
        "reduction": x.shape[1] + subject.channels,
        "scale": find_magnitude(before),
    }
    contents = [content for content in CONTENTS if content != "large" or not is_half(subject)]  # it overflows there
    for content in contents if x.is_floating_point() and x.shape[1] < LONG else contents[:1]:
        other = draw_other_content(subject, x, rng, 100.0 if content == "large" else 1.0)
        other = torch.zeros_like(other) if content == "zeros" else other
        changed = torch.where(_broadcast_mask(mask, x), x, other)
        yield expect_equal(before, subject.run(changed, mask), changed=f"hidden tokens ({content} content)", **about)
    if "aligned" in subject.abilities and _owes_finite_outputs(subject, x, mask):
        # A token attends at least to itself, so there is always something to compare.
        shown = torch.where(_broadcast_mask(mask, before), before, torch.zeros_like(before))
        yield expect_finite(shown, changed=f"tokens hidden ({case['side']})", touched=~mask)
    if x.shape[0] > 1 and case["side"] != "row":
        # The same row among rows with other masks.
        mixed = mask.roll(1, 0).clone()
        mixed[0] = mask[0]
        keep = torch.zeros(x.shape[0], dtype=torch.bool)
        keep[0] = True
        chosen = mask & keep[:, None] if "aligned" in subject.abilities else keep
        yield expect_equal(
            before, subject.run(x, mixed), **{**about, "where": chosen, "touched": None}, changed="masks of other rows"
        )


def _owes_finite_outputs(subject: Adapter, x: Tensor, mask: Tensor) -> bool:
    """Whether finite outputs are owed: a token alone has one, and half precision where the wider one has them."""
    if is_half(subject):
        native = in_native_precision(subject)
        wide = native.run(x.to(native.dtype) if x.is_floating_point() else x, mask)
        if not wide[mask].isfinite().all():
            return False
    return bool(subject.run(x[:, : subject.lengths(1)[0]]).isfinite().all())


def _observe_removal(subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
    """Hidden tokens may be taken away, where that moves nothing that matters."""
    x, mask = _draw_padded(subject, case, rng)
    tokens = x.shape[1]
    before = subject.run(x, mask)
    # Decided in the subject's own precision; half precision is too coarse.
    clear = in_native_precision(subject) if is_half(subject) else subject
    shown = x.to(clear.dtype) if x.is_floating_point() else x
    for row in range(x.shape[0]):
        places = mask[row].nonzero().flatten()
        hidden = tokens - len(places)
        if not hidden or not takes_length(subject, len(places)):
            continue
        if case["side"] == "left" and not owes_left_padding(clear, shown[row : row + 1], hidden):
            continue
        if case["side"] in ("interior", "random") and not ignores_order(clear, shown[row : row + 1]):
            continue
        alone = subject.run(x[row : row + 1, places])
        padded = before[row : row + 1]
        yield expect_equal(
            alone,
            padded[:, places] if "aligned" in subject.abilities else padded,
            changed=f"{hidden} of {tokens} tokens hidden ({case['side']}), against none there",
            tokens=places.tolist() if "aligned" in subject.abilities else None,
            row=row,
            reduction=tokens + subject.channels,
            scale=find_magnitude(alone) * (table_coarseness(subject) if case["side"] == "left" else 1.0),
        )


def _observe_mask_of_ones(subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
    """A mask that hides nothing is no mask."""
    if "form" in case:
        assert isinstance(subject, OperatorAdapter)
        batch, queries, keys = int(case["batch"]), int(case["queries"]), int(case["keys"])
        tensors = subject.tensors(rng, batch, queries, keys)
        sizes = {"keys": (batch, 1, 1), "pairs": (batch, 1, queries), "shared": (1, 1, queries)}
        sizes["heads"] = (batch, subject.heads, queries)
        ones = torch.ones(*sizes[str(case["form"])], keys, dtype=torch.bool)
        expected, actual = (subject.attend_rows(*tensors, mask) for mask in (None, ones))
    else:
        x = subject.draw(int(case["batch"]), int(case["tokens"]), rng)
        keys = x.shape[1]
        expected, actual = subject.run(x), subject.run(x, torch.ones(x.shape[0], keys, dtype=torch.bool))
    yield expect_same_output(subject, expected, actual, keys, changed="no mask, against a mask that hides nothing")


def _observe_gradient(subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
    """No gradient flows from real outputs to hidden tokens; and the outputs are those of a call without gradients."""
    x, mask = _draw_padded(subject, case, rng)
    where = _find_real_outputs(subject, mask)
    with torch.no_grad():
        quiet = subject.run(x, mask)
    x.requires_grad_()
    output = subject.run(x, mask)
    about = {"reduction": x.shape[1] + subject.channels, "scale": find_magnitude(quiet)}
    yield expect_equal(quiet, output, where=where, changed="a call with gradients, against one without", **about)
    if not output.requires_grad or not output.isfinite().all():
        return  # NaN at padded positions is covered by `masked-values`
    chosen = output if where is None else output[where]
    weight = rng.normal(*chosen.shape, dtype=output.dtype)
    (gradient,) = torch.autograd.grad((chosen * weight).sum(), x, allow_unused=True)
    if gradient is None:
        return
    yield expect_zero(
        torch.where(_broadcast_mask(mask, x), torch.zeros_like(gradient), gradient),
        find_magnitude(gradient),
        changed="real outputs",
        output="gradient of input",
        touched=~mask,
        reduction=x.shape[1] + subject.channels,
    )


def _observe_pairs(subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
    """A mask of pairs: each query may be computed without the keys that are hidden from it."""
    batch, queries, keys = int(case["batch"]), int(case["queries"]), int(case["keys"])
    query, key, value = subject.tensors(rng, batch, queries, keys)
    mask = pair_mask(subject, str(case["form"]), batch, queries, keys, rng)
    before = subject.attend(query, key, value, mask)
    full = mask.expand(batch, subject.heads, queries, keys)
    group = subject.heads // subject.kv_heads
    plain = subject.attend(query, key, value)
    free = all(
        agree_up_to_rounding(subject, plain, subject.attend(query, key[:, :, order], value[:, :, order]))
        for order in make_generating_permutations(keys)
    )
    # Queries before the first key see nothing, if the subject is causal; what they yield is covered by `empty-rows`.
    first = max(queries - keys, 0)
    for index in sorted({first, (first + queries) // 2, queries - 1}):
        one = slice(index, index + 1)
        visible = full[:, :, index]  # (batch, head, key)
        hidden = ~visible.unflatten(1, (subject.kv_heads, group)).any(2)[..., None]
        _, other, fresh = subject.tensors(rng, batch, queries, keys)
        after = subject.attend(query, torch.where(hidden, other, key), torch.where(hidden, fresh * 30, value), mask)
        about = {"tokens": [index], "reduction": keys + subject.channels, "scale": find_magnitude(before)}
        yield expect_equal(
            subject.rows(before)[:, one],
            subject.rows(after)[:, one],
            changed=f"keys and values hidden from query {index}",
            **about,
        )
        if free and agree_up_to_rounding(subject, plain[:, :, one], subject.attend(query[:, :, one], key, value)):
            # Neither the order of keys nor the place of the query matters, so what remains can be given alone.
            places = visible[0, 0].nonzero().flatten()
            rows = (visible == visible[:1, :1]).all(-1)  # (batch, head) that see the same keys
            alone = subject.attend(query[:, :, one], key[:, :, places], value[:, :, places])
            yield expect_equal(
                subject.rows(alone),
                subject.rows(before)[:, one],
                where=rows[:, None, :],
                changed=f"all but the keys that query {index} sees hidden, against none there",
                **about,
            )
    yield expect_true(
        before.shape == plain.shape,
        f"is {tuple(before.shape)} with a mask, {tuple(plain.shape)} without",
        of=before,
        reading=f"value.shape == {tuple(plain.shape)}",
    )
