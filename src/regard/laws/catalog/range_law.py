"""L17: large scores and half precision give finite and accurate outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.half_precision import (
    expect_like_float64,
    expect_like_native,
    make_nearly_equal_tokens,
    widen_to_float64,
)
from regard.laws.law import Case, Law, Observation, expect_equal, expect_finite, expect_zero
from regard.laws.masks import key_mask
from regard.laws.probes import takes_length
from regard.laws.variants import HALVES, LONG, LONGER, long_lengths

# The largest number of float16.
LARGEST = 65504.0
# Weights that sum to one but for this share are meant to sum to one.
WHOLE = 1e-4


class RangeLaw(Law):
    id = "L17"
    slug = "range"
    title = "Range law"
    headline = "large numbers or half precision gave a wrong output."
    statement = (
        "Scores of any magnitude that the dtype represents give a mean of the values: finite, within their range, "
        "unchanged by a shift of all scores and by masked entries. Half precision gives the same output, rounded."
    )
    equation = "softmax(s + c) = softmax(s),  min_j v_j <= y <= max_j v_j,  |y_half - y| <= rounding"
    catches = (
        "exp without subtracting the maximum, masks of -1e4 under larger scores or above smaller ones; and in targets "
        "that choose float16 themselves, products that overflow before scaling"
    )
    smallest = {"batch": 1, "tokens": 2, "queries": 1}
    kinds = ("kind",)
    minimum = 4

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        operator = isinstance(subject, OperatorAdapter)
        first, second = (subject.lengths(5, 19) * 2)[:2]
        plain = {"batch": 2, "tokens": first}
        # Scores, what is unseen and few digits in turn: every kind comes early.
        for turn in zip_longest(
            self._make_large_cases(subject, plain), self._make_unseen_and_half_cases(subject, plain)
        ):
            yield from (case for case in turn if case is not None)
        if not fast:
            for tokens in (second, *subject.lengths(67, 130)):
                more = {"batch": 1, "tokens": tokens}
                if operator:
                    for size in (1e2, 1e3, 1e4, 1e6):
                        yield {**more, "kind": "large", "size": size}
                    yield {**more, "kind": "negative", "size": 1e4}
                    yield {**more, "kind": "shift", "size": 1e4}
                elif "float" in subject.abilities:
                    yield {**more, "kind": "large", "size": 1e3}
                if "mask" in subject.abilities and "float" in subject.abilities and "aligned" in subject.abilities:
                    yield {**more, "kind": "hidden", "size": 1e6}
                for precision in HALVES:
                    yield {**more, "kind": "half", "precision": precision, "size": 1.0}

    def _make_large_cases(self, subject: Adapter, plain: Case) -> Iterator[Case]:
        if isinstance(subject, OperatorAdapter):
            yield from self._make_operator_cases("mask" in subject.abilities, int(plain["tokens"]))
        elif "float" in subject.abilities:
            for size in (1e3, 1e2, 1e4):
                yield {**plain, "kind": "large", "size": size}
            masked = {"mask", "aligned"} <= subject.abilities
            for tokens in subject.lengths(int(plain["tokens"]), 7, 37) if masked else ():
                for size in (1e3, 3e2):
                    yield {"batch": 5, "tokens": tokens, "kind": "large, masked", "size": size}

    @staticmethod
    def _make_unseen_and_half_cases(subject: Adapter, plain: Case) -> Iterator[Case]:
        if "float" in subject.abilities and "aligned" in subject.abilities:
            for size in (1e6, 1e5, 1e3):
                if "mask" in subject.abilities:
                    yield {**plain, "kind": "hidden", "size": size}
                yield {**plain, "kind": "later", "size": size}
        for tokens in (long := long_lengths(subject, True, LONG, LONGER)):
            for precision in HALVES if tokens == long[0] else ("bfloat16",):
                yield {"batch": 1, "tokens": tokens, "kind": "half, many keys", "precision": precision, "size": 1.0}
        for precision in HALVES:
            yield {**plain, "kind": "half", "precision": precision, "size": 1.0}
            if "mask" in subject.abilities:
                yield {**plain, "kind": "half, masked", "precision": precision, "size": 1.0}
            if isinstance(subject, OperatorAdapter):
                for size in (1e3, 1e4, 5e4):
                    yield {**plain, "kind": "half, large", "precision": precision, "size": size}
        if isinstance(subject, OperatorAdapter):
            for size in (7e4, 1.2e5):
                yield {**plain, "kind": "half, overflow", "precision": "float16", "size": size}

    @staticmethod
    def _make_operator_cases(masked: bool, tokens: int) -> Iterator[Case]:
        """Each kind with as many queries as keys, with one query, and with a tail behind whole blocks."""
        sizes = {
            "large": (1e3, 1e4, 1e2, 1e6),
            "negative": (1e4, 1e3, 1e6),
            "shift": (1e3, 1e4, 30.0),
            "large, masked": (1e3, 1e6),
            "negative, masked": (1e6, 1e5, 1e3),
        }
        long = ((1, 37, 37), (1, 3, 70), (1, 1, 141))
        for turn in range(max(map(len, sizes.values()))):
            for place, (kind, wanted) in enumerate(sizes.items()):
                if turn >= len(wanted) or (kind.endswith("masked") and not masked):
                    continue
                for batch, queries, keys in ((2, tokens, tokens), (2, 1, tokens), long[place % 3])[: 2 + (turn == 0)]:
                    case = {"batch": batch, "tokens": keys, "kind": kind, "size": wanted[turn]}
                    yield case if queries == keys else {**case, "queries": queries}

    @torch.no_grad()
    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        kind = str(case["kind"])
        if kind.startswith("half"):
            yield from self._observe_half_precision(subject, case, rng)
        elif kind in ("hidden", "later"):
            yield from self._observe_unseen(subject, case, rng)
        elif isinstance(subject, OperatorAdapter):
            observe = {
                "shift": self._observe_shift,
                "large": self._observe_large_scores,
                "negative": self._observe_large_scores,
            }.get(kind, self._observe_scores_under_mask)
            yield from observe(subject, case, rng)
        else:
            yield from (self._observe_masked_inputs if kind == "large, masked" else self._observe_large_inputs)(
                subject, case, rng
            )

    # Large scores

    def _observe_large_scores(self, subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
        batch, tokens, size = int(case["batch"]), int(case["tokens"]), _limit_score_size(subject, float(case["size"]))
        query, key, value = drawn = subject.tensors(rng, batch, int(case.get("queries", tokens)), tokens)
        if case["kind"] == "negative" and not _has_bilinear_scores(subject):
            return  # features of opposite queries and keys may rightly be too small for the precision
        large = _draw_aimed(query, key, size, negative=case["kind"] == "negative", rng=rng)
        words = {"changed": f"queries and keys: scores {'near' if case['kind'] == 'negative' else 'up to'} {size:.0e}"}
        yield from self._observe_mean(subject, subject, drawn, (*large, value), words)
        double = subject.at(torch.float64)
        if double is not None and double is not subject and _has_bilinear_scores(subject):
            inputs = (*large, value)
            output = subject.attend(*inputs)
            if output.isfinite().all():
                yield from expect_like_float64(double.attend, inputs, output, _find_coarsest_eps(subject), rng, words)  # type: ignore[attr-defined]

    def _observe_mean(
        self,
        subject: OperatorAdapter,
        view: OperatorAdapter,
        drawn: tuple[Tensor, ...],
        large: tuple[Tensor, ...],
        words: dict,
    ) -> Iterator[Observation]:
        """Finite, a mean of the values, and for constant values that constant: where it is so for ordinary scores.

        `view` is the subject, or the subject in half precision; what is ordinary is measured on the subject itself.
        """
        output = view.attend(*large)  # type: ignore[arg-type]
        yield expect_finite(_put_tokens_first(output), **words)
        if not output.isfinite().all() or drawn[1].shape[1] != drawn[0].shape[1]:
            return
        query, key, value = (tensor.to(subject.dtype) for tensor in drawn)
        largest, rough = float(value.abs().max()), _find_coarsest_eps(subject)
        coarser = max(_find_coarsest_eps(view), rough) / subject.eps
        # With a sink, or another weight that no value has, nothing is owed.
        whole = bool(((subject.attend(query, key, torch.ones_like(value)) - 1).abs() <= WHOLE).all())
        if whole and bool(
            (_measure_outside_values(subject.attend(query, key, value), value) <= 64 * rough * largest).all()
        ):
            beyond = _measure_outside_values(output, large[2])
            yield expect_zero(_put_tokens_first(beyond), largest * coarser, reduction=value.shape[2], **words)
        if bool(((subject.attend(query, key, torch.ones_like(value)) - 1).abs() <= 64 * rough).all()):
            total = view.attend(large[0], large[1], torch.ones_like(large[2]))
            words = {**words, "scale": coarser, "reduction": value.shape[2], "output": "the sum of weights"}
            yield expect_equal(torch.ones_like(total), total, **words)

    def _observe_shift(self, subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
        """The same vector added to every key."""
        batch, tokens, size = int(case["batch"]), int(case["tokens"]), _limit_score_size(subject, float(case["size"]))
        query, key, value = subject.tensors(rng, batch, int(case.get("queries", tokens)), tokens)
        direction = rng.normal(1, 1, 1, subject.dim, dtype=subject.dtype)
        direction = direction / direction.norm()
        query = query + 2 * direction  # every query has a share in it
        reach = float((query @ direction.transpose(-1, -2)).abs().max()) / math.sqrt(subject.dim)
        before = subject.attend(query, key, value)
        largest = float(value.abs().max())
        slight = subject.attend(query, key + direction, value)
        if (
            not before.isfinite().all()
            or float((slight - before).abs().max()) > 4096 * _find_finest_eps(subject) * largest
        ):
            return  # its scores are not linear in keys, or depend on positions
        if not bool(((subject.attend(query, key, torch.ones_like(value)) - 1).abs() <= WHOLE).all()):
            return  # a sink does not move with the keys
        coarser = _find_coarsest_eps(subject) / subject.eps
        for sign in (1.0, -1.0):
            after = subject.attend(query, key + sign * size / reach * direction, value)
            words: dict[str, Any] = {"changed": f"every key: all scores shifted by {sign * size:.0e}"}
            yield expect_finite(_put_tokens_first(after), **words)
            # A score of that size is rounded to so many digits, and its rounding multiplies the weight.
            yield expect_equal(
                _put_tokens_first(before),
                _put_tokens_first(after),
                scale=largest * (1 + size) * coarser,
                reduction=tokens + subject.dim,
                **words,
            )

    def _observe_scores_under_mask(self, subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
        """Visible scores far from zero: they may lie above or below the fill value of hidden ones."""
        batch, tokens, size = int(case["batch"]), int(case["tokens"]), _limit_score_size(subject, float(case["size"]))
        queries, negative = int(case.get("queries", tokens)), str(case["kind"]).startswith("negative")
        if not _has_bilinear_scores(subject):
            return
        query, key, value = subject.tensors(rng, batch, queries, tokens)
        real = torch.ones(batch, tokens, dtype=torch.bool)
        real[:, rng.permutation(tokens - 1)[: max(tokens // 2, 1)] + 1] = False  # the first is seen
        mask = key_mask(subject, real, ("keys", "pairs", "heads")[tokens % 3], queries)
        visible = real[:, None, :, None]
        other = torch.where(visible, value, 3 + 5 * rng.normal(*value.shape, dtype=value.dtype))
        low = value.masked_fill(~visible, torch.inf).amin(2, keepdim=True)
        high = value.masked_fill(~visible, -torch.inf).amax(2, keepdim=True)

        def outside(output: Tensor) -> Tensor:
            group = output.shape[1] // low.shape[1]
            return _measure_outside(output, low.repeat_interleave(group, 1), high.repeat_interleave(group, 1))

        # What is so for ordinary scores: rows that may see nothing are left out.
        before, slight = (subject.attend(query, key, each, mask) for each in (value, other))
        largest, rough = float(other.abs().max()), 64 * _find_coarsest_eps(subject)
        coarser = _find_coarsest_eps(subject) / subject.eps
        still = ((before - slight).abs() <= rough * largest).all(-1).transpose(1, 2)  # (batch, query, head)
        total = subject.attend(query, key, torch.ones_like(value), mask)
        mean = (outside(before) <= rough * largest) & ((total - 1).abs() <= WHOLE)
        mean = bool(mean.all(-1).transpose(1, 2)[still].all())
        if not still.any():
            return
        large = _draw_aimed(query, key, size, negative, rng)
        words = {"changed": f"queries and keys: visible scores {'near -' if negative else 'up to '}{size:.0e}"}
        after, moved = (subject.attend(*large, each, mask) for each in (value, other))
        yield expect_finite(_put_tokens_first(after), where=still, **words)
        about = {"scale": largest * coarser, "reduction": tokens + subject.dim}
        yield expect_equal(
            _put_tokens_first(after),
            _put_tokens_first(moved),
            where=still,
            **about,
            changed=f"hidden values, {words['changed']}",
        )
        if mean:
            beyond = torch.where(still[..., None], _put_tokens_first(outside(after)), 0.0)
            yield expect_zero(beyond, about.pop("scale"), **about, **words)

    def _observe_masked_inputs(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        """A layer whose whole input is large, with two tokens to see: often both have scores far below zero."""
        batch, tokens, size = int(case["batch"]), int(case["tokens"]), _limit_score_size(subject, float(case["size"]))
        x, other = subject.draw(batch, tokens, rng), subject.draw(batch, tokens, rng)
        real = torch.zeros(batch, tokens, dtype=torch.bool)
        for row in range(batch):
            real[row, [0, 1 + row % (tokens - 1)]] = True
        other = torch.where(real[:, :, None], x, other)
        before, slight = subject.run(x, real), subject.run(other, real)
        scale = float(before.abs().nan_to_num(0, 0, 0).max())
        still = real & ((before - slight).abs().flatten(2).amax(-1) <= 4096 * _find_finest_eps(subject) * scale)
        if not still.any():
            return
        after, moved = subject.run(x * size, real), subject.run(other * size, real)
        words = {"touched": ~real, "changed": f"hidden tokens, with an input {size:.0e} times as large"}
        if takes_length(subject, 2):
            # Where the two visible tokens alone give finite outputs, they do so behind a mask.
            pairs = torch.stack([subject.run(x[row : row + 1, real[row]] * size)[0] for row in range(batch)])
            sound = torch.zeros_like(real)
            sound[real] = pairs.flatten(2).isfinite().all(-1).flatten()
            yield expect_finite(after, where=still & sound, **words)
        grown = float(after[still].abs().max())
        if not math.isfinite(grown) or grown > 8 * size * max(scale, 1.0):
            return  # scores of its later parts may reach any size
        yield expect_equal(
            after,
            moved,
            where=still,
            scale=grown * _find_coarsest_eps(subject) / subject.eps,
            reduction=tokens + subject.channels,
            **words,
        )

    def _observe_large_inputs(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        """A layer whose whole input is large."""
        x = subject.draw(int(case["batch"]), int(case["tokens"]), rng) * _limit_score_size(subject, float(case["size"]))
        output = subject.run(x)
        yield expect_finite(output, changed=f"the input: {float(case['size']):.0e} times as large")
        double = subject.at(torch.float64)
        if double is not None and double is not subject and output.isfinite().all():
            words = {"changed": f"the input: {float(case['size']):.0e} times as large"}
            yield from expect_like_float64(double.run, (x,), output, _find_coarsest_eps(subject), rng, words)

    # Masked tokens and the future

    def _observe_unseen(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        """A hidden or later token is made large; outputs that do not depend on it stay."""
        batch, tokens, size = int(case["batch"]), int(case["tokens"]), _limit_score_size(subject, float(case["size"]))
        x = subject.draw(batch, tokens, rng)
        hidden = torch.zeros(batch, tokens, dtype=torch.bool)
        hidden[:, -1] = True
        if case["kind"] == "hidden" and tokens > 3:
            hidden[-1, -1], hidden[-1, tokens // 2] = False, True
        mask = ~hidden if case["kind"] == "hidden" else None
        place = hidden[:, :, None]
        before = subject.run(x, mask)
        slight = subject.run(torch.where(place, subject.draw(batch, tokens, rng), x), mask)
        scale = float(before.abs().nan_to_num(0, 0, 0).max())
        still = (before - slight).abs().flatten(2).amax(-1) <= 4096 * _find_finest_eps(
            subject
        ) * scale  # (batch, token)
        still &= ~hidden
        if not still.any():
            return
        for sign in (1.0, -1.0):
            after = subject.run(torch.where(place, _grow_input(subject, x, sign * size), x), mask)
            yield expect_equal(
                before,
                after,
                where=still,
                touched=hidden,
                scale=scale * _find_coarsest_eps(subject) / subject.eps,
                reduction=tokens + subject.channels,
                changed=f"a token that is {'hidden' if mask is not None else 'later'}: its scores reach {size:.0e}",
            )

    # Few digits

    def _observe_half_precision(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        precision = HALVES[str(case["precision"])]
        if subject.dtype != subject.native:
            return  # checked once, in the subject's own precision
        batch, tokens, size, kind = int(case["batch"]), int(case["tokens"]), float(case["size"]), str(case["kind"])
        view = subject.at(precision)
        if kind == "half, overflow":
            # Products beyond float16 are tested only in targets that compute in float16 by their own choice.
            double = subject.at(torch.float64)
            if not (subject.native == precision or (double is not None and double.eps == torch.finfo(precision).eps)):
                return
            view = view if subject.native == precision else subject
        if view is None:
            return  # it refuses half precision, which is its right
        words: dict[str, Any] = {"changed": f"the precision: {case['precision']}"}
        if kind == "half, many keys":
            if precision != subject.native:
                x = make_nearly_equal_tokens(subject, subject.draw(batch, tokens, rng), rng)
                yield from expect_like_native(subject, view, x, None, None, rng, words["changed"])
            return
        mask = None
        if kind == "half, masked":
            mask = torch.ones(batch, tokens, dtype=torch.bool)
            mask[:, -1] = False
        if kind in ("half, large", "half, overflow"):
            assert isinstance(view, OperatorAdapter)
            assert isinstance(subject, OperatorAdapter)
            query, key, value = drawn = view.tensors(rng, batch, tokens, tokens)
            if kind == "half, large" and precision == torch.float16 and not _has_bilinear_scores(subject):
                # Features of queries and keys sum to tokens times products, and rightly so.
                size = min(size, 0.5 * LARGEST / (tokens * max(1.0, float(value.abs().max()))))
            # `size` is that of the bare product; the score is smaller by the root of the dimension.
            large = _draw_aimed(query, key, size / math.sqrt(view.dim), negative=False, rng=rng)
            words["changed"] += f", products of query and key up to {size:.0e}"
            yield from self._observe_mean(subject, view, drawn, (*large, value), words)
            return
        try:
            x = view.draw(batch, tokens, rng)
            output = view.run(x, mask)
        except Exception:  # a refusal: a mask of -1e9 overflows float16
            return
        rows = mask if mask is not None and "aligned" in subject.abilities else None
        spoken = expect_finite(output, where=rows, **words)
        yield spoken
        if rows is not None:
            output = output[rows]
        if not output.isfinite().all():
            return
        reference = widen_to_float64(view, subject)
        if reference is None:
            return

        def run(x: Tensor) -> Tensor:
            wide = reference(x, mask)
            return wide if rows is None else wide[rows]

        yield from expect_like_float64(run, (x,), output, torch.finfo(precision).eps, rng, words, reference.view.target)


def _find_coarsest_eps(subject: Adapter) -> float:
    """The coarsest precision inside the computation, found by running it in float64."""
    double = subject.at(torch.float64) if subject.dtype == subject.native else subject
    return max(torch.finfo(subject.dtype).eps, double.eps if double is not None else 0.0)


def _find_finest_eps(subject: Adapter) -> float:
    """A precision in which "nothing moved" means something."""
    return min(_find_coarsest_eps(subject), 1e-6)


def _has_bilinear_scores(subject: OperatorAdapter) -> bool:
    """Whether scores are products of query and key: twice the one and half the other change nothing."""
    query, key, value = subject.tensors(Rng(0, "bilinear"), 2, 5, 5)
    before, after = subject.attend(query, key, value), subject.attend(2 * query, key / 2, value)
    return bool(torch.allclose(before, after, 1e-3, 1e-3))


def _limit_score_size(subject: Adapter, size: float) -> float:
    """As large as a score may be; a target that rounds to float16 inside has no larger numbers."""
    double = subject.at(torch.float64)
    coarse = double is not None and double.eps == torch.finfo(torch.float16).eps
    return min(size, 5e3) if coarse or subject.dtype == torch.float16 else size


def _draw_aimed(query: Tensor, key: Tensor, size: float, negative: bool, rng: Rng) -> tuple[Tensor, Tensor]:
    """Queries and keys whose scores q.k / sqrt(dim) reach `size`: spread evenly up to it, or all near -size."""
    dim, keys = query.shape[-1], key.shape[2]
    direction = rng.normal(1, 1, 1, dim)
    direction = direction / direction.norm()
    root = math.sqrt(size * math.sqrt(dim))
    if negative:
        towards = -torch.ones(1, 1, keys, 1)
        bare, rest = key / root, 1.0 / root
    else:
        towards = (torch.linspace(-1, 1, keys) if keys > 1 else torch.ones(1)).roll(keys // 3).view(1, 1, keys, 1)
        bare, rest = key / root, 0.0
    large = root * direction * torch.ones(*query.shape[:3], 1) + rest * query.double()
    return large.to(query.dtype), (root * towards * direction + bare.double()).to(key.dtype)


def _grow_input(subject: Adapter, x: Tensor, size: float) -> Tensor:
    """The same input, grown so that its scores with ordinary partners reach `size`; an operator's values stay."""
    if not isinstance(subject, OperatorAdapter):
        return x * size
    query, key, value = subject.parted(x)
    return subject.joined(query, key * size, value)


def _put_tokens_first(output: Tensor) -> Tensor:
    """`(batch, head, token, dim)` as `(batch, token, head, dim)`, which is how places are named."""
    return output.transpose(1, 2)


def _measure_outside_values(output: Tensor, value: Tensor) -> Tensor:
    """How far each entry is outside the range of the values in its channel."""
    return _measure_outside(output, value.amin(2, keepdim=True), value.amax(2, keepdim=True))


def _measure_outside(output: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return (low - output).clamp(min=0) + (output - high).clamp(min=0)
