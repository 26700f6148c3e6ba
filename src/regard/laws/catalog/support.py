"""L8: weights are positive exactly where pattern and mask allow."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.adapters import attention_watch
from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.law import Case, Law, Observation, expect_equal
from regard.laws.masks import BROADCAST_MASKS, draw_broadcast_mask, make_padding
from regard.laws.variants import LONG, head_sizes, long_lengths
from regard.patterns import Causal, Pattern

# Queries, far enough apart that no weight of a visible pair underflows.
MODERATE = 0.5


class SupportLaw(Law):
    id = "L8"
    slug = "support"
    title = "Support exactness"
    headline = "the pairs that interact are not those declared."
    statement = "A weight is positive exactly where the declared pattern and the mask allow the pair, at every length."
    equation = "{(i, j): A_ij > 0} = pattern & mask"
    catches = "a window that is one too wide, an inverted or ignored mask, a pattern applied to the wrong layers"
    smallest = {"batch": 1, "queries": 1, "keys": 1, "tokens": 2}
    kinds = ("mask", "tokens", "keys")
    minimum = 5

    def applies(self, subject: Adapter) -> str | None:
        if isinstance(subject, OperatorAdapter):
            return None
        if "aligned" not in subject.abilities:
            return "its output has no row for each token"
        if (
            find_declared_pattern(subject) is None
            and not _claims_causality(subject)
            and "mask" not in subject.abilities
        ):
            return "it declares no pattern and takes no mask"
        return None

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        masked = "mask" in subject.abilities
        width = self._find_row_width(subject)
        if isinstance(subject, OperatorAdapter):
            masks = BROADCAST_MASKS if masked else BROADCAST_MASKS[:1]
            if "lengths" not in subject.abilities:  # a grid has one size
                for mask in masks:
                    yield {"batch": 2, "queries": subject.min_length, "keys": subject.min_length, "mask": mask}
                return
            around = sorted({7, max(width - 1, 1), width, width + 1, width + 2, 2 * width + 1})
            short = [size for size in around if size <= (40 if fast else 300)]
            for mask in masks:
                yield {"batch": 2, "queries": 7, "keys": 7, "mask": mask}
            if "head-groups" in subject.context:
                yield from self._make_group_cases(masks, fast)
            yield {"batch": 1, "queries": 2, "keys": LONG, "mask": "none"}
            for wide in head_sizes(subject):
                yield {"batch": 1, "queries": 7, "keys": 7, "mask": masks[-1], **wide}
            for size in short:
                yield {"batch": 1, "queries": size, "keys": size, "mask": "none"}
            lengths = [(3, 11), (1, 9), (33, 33), (9, 4)] + ([] if fast else [(66, 66), (131, 131), (17, 130), (1, 65)])
            for place, (queries, keys) in enumerate(lengths):
                for mask in ("none", masks[(place + 2) % len(masks)]):
                    yield {"batch": 1 + place % 2, "queries": queries, "keys": keys, "mask": mask}
            if not fast:
                for mask in masks[1:]:
                    yield {"batch": 3, "queries": 5, "keys": width + 4, "mask": mask}
            return
        masks = ("none", "right", "left") if masked else ("none",)
        around = [7, 13, max(width - 1, 2), width, width + 1, 2 * width + 1, 34] + ([] if fast else [67, 131])
        for tokens in long_lengths(subject, fast, LONG):
            yield {"batch": 1, "tokens": tokens, "mask": "none"}
        for tokens in dict.fromkeys(subject.lengths(*[size for size in around if size >= 2])):
            for mask in masks if tokens <= 40 else masks[:1]:
                yield {"batch": 2, "tokens": tokens, "mask": mask}

    @staticmethod
    def _make_group_cases(masks: tuple[str, ...], fast: bool) -> Iterator[Case]:
        """Fewer key heads than query heads: each query head keeps its own mask."""
        lengths = ((5, 5), (1, 41)) if fast else ((5, 5), (1, 41), (3, 11), (37, 37))
        for queries, keys in lengths:
            for mask in reversed(masks) if queries == 5 or not fast else masks[-1:]:
                for heads, kv_heads in ((4, 2), (6, 3), (6, 2)) if mask == masks[-1] else ((6, 2),):
                    sizes = {"heads": heads, "kv_heads": kv_heads}
                    yield {"batch": 2, "queries": queries, "keys": keys, "mask": mask, **sizes}

    @staticmethod
    def _find_row_width(subject: Adapter) -> int:
        """How many keys the longest row of the declared pattern sees, where it has an end."""
        pattern = find_declared_pattern(subject)
        if pattern is None or "lengths" not in subject.abilities:
            return 7
        rows = [int(make_allowed_pairs(pattern, tokens, tokens, subject)[0].sum(-1).max()) for tokens in (300, 301)]
        return rows[0] if rows[0] == rows[1] else 7

    @torch.no_grad()
    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        if isinstance(subject, OperatorAdapter):
            yield from self._observe_operator(subject, case, rng)
        else:
            yield from self._observe_layer(subject, case, rng)

    def _observe_operator(self, subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
        batch, queries, keys = int(case["batch"]), int(case["queries"]), int(case["keys"])
        heads, kv_heads = int(case.get("heads", subject.heads)), int(case.get("kv_heads", subject.kv_heads))
        query, key, _ = subject.tensors(rng, batch, queries, keys, heads=heads, kv_heads=kv_heads)
        query = query * MODERATE
        free = subject.matrix(query, key)
        pattern = find_declared_pattern(subject)
        known = torch.ones_like(free, dtype=torch.bool)
        if pattern is not None:
            expected = make_allowed_pairs(pattern, queries, keys, subject, batch)[:, None].expand_as(free)
        elif _claims_causality(subject):
            expected, past = find_band(exceeds_rounding(free, subject), queries, keys, subject)
            known = expected | ~past
        else:  # whatever it is, each row of the batch has the same, and masks only take away
            expected = exceeds_rounding(free, subject)[:1].expand_as(free)
            known = (expected | (free == 0))[:1].expand_as(free)
        yield from expect_same_pairs(expected, free, known, subject, "no mask")
        if case["mask"] != "none":
            mask = draw_broadcast_mask(str(case["mask"]), rng, batch, heads, queries, keys)
            weights = subject.matrix(query, key, mask)
            yield from expect_same_pairs(expected & mask, weights, known | ~mask, subject, f"a mask of {case['mask']}")

    def _observe_layer(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        batch, tokens = int(case["batch"]), int(case["tokens"])
        x = subject.draw(batch, tokens, rng)
        mask = make_padding(str(case["mask"]), batch, tokens)
        places = _choose_places(tokens)
        apart = measure_dependency(subject, x, mask, places, rng)  # (batch, token, place)
        free = apart if mask is None else measure_dependency(subject, x, None, places, rng)
        pattern = find_declared_pattern(subject)
        compared = torch.arange(tokens)[:, None] != torch.tensor(places)[None, :]  # its own place is no news
        compared = compared.expand_as(apart)
        if pattern is not None:
            expected = make_allowed_pairs(pattern, tokens, tokens, subject, batch)[..., places]
        elif _claims_causality(subject):
            expected, past = _find_expected_past(exceeds_rounding(free, subject), places)
            compared = compared & (expected | ~past)
        else:
            expected = exceeds_rounding(free, subject)
            full = bool((expected | ~compared).all())
            compared = compared & (torch.tensor(full) | ~expected if mask is None else ~mask[:, None, places] | full)
        if mask is not None:
            expected = expected & mask[:, None, places]
            compared = compared & mask[..., None]  # outputs at padded tokens do not matter
        # What fades with distance is not cut off: a column that becomes tiny before it ends excuses its end.
        fading = torch.where(apart > 0, apart, torch.inf).amin(1, keepdim=True) < 1e-9
        wide = subject.eps < 1e-12 or subject.at(torch.float64) is None
        missing = (apart == 0) & ~fading if wide else torch.zeros_like(compared)
        moved = torch.where(expected, ~missing, exceeds_rounding(apart, subject))
        yield expect_equal(
            (expected & compared).double(),
            (moved & compared).double(),
            exact=True,
            changed="one token at a time",
            effect=_describe_wrong_pair(expected & compared, moved & compared, places, "other "),
        )
        if pattern is not None and case["mask"] == "none":
            yield from self._observe_weights(subject, pattern, x)

    @staticmethod
    def _observe_weights(subject: Adapter, pattern: Pattern, x: Tensor) -> Iterator[Observation]:
        """The weights of a single attention show its own places too."""
        batch, tokens = x.shape[:2]
        maps = subject.weights(x) if tokens in attention_watch.fair_lengths(subject, batch, tokens) else []
        if len(maps) == 1 and maps[0].shape[0] == batch and maps[0].shape[-2:] == (tokens, tokens):
            expected = make_allowed_pairs(pattern, tokens, tokens, subject, batch)[:, None].expand_as(maps[0])
            yield from expect_same_pairs(expected, maps[0], torch.ones_like(expected), subject, "no mask")

    def measure(self, subject: Adapter) -> str | None:
        try:
            with torch.no_grad():
                return _name_pattern(*_measure_pairs(subject))
        except Exception:  # what refuses to run shows no pattern
            return None


def find_declared_pattern(subject: Adapter) -> Pattern | None:
    """The pattern that the subject declares."""
    return subject.conventions.pattern


def _claims_causality(subject: Adapter) -> bool:
    return "causality" in subject.context


def make_allowed_pairs(pattern: Pattern, queries: int, keys: int, subject: Adapter, batch: int = 1) -> Tensor:
    """The declared pairs `(batch, query, key)`, with unequal lengths aligned as the subject declares."""
    if subject.conventions.align == "start":
        most = max(queries, keys)
        pairs = pattern.matrix(most, most)[..., :queries, :keys]
    else:
        pairs = pattern.matrix(queries, keys)
    return pairs.expand(batch, queries, keys) if pairs.ndim == 2 else pairs[:batch]


def find_band(found: Tensor, queries: int, keys: int, subject: Adapter) -> tuple[Tensor, Tensor]:
    """What is seen of the past, the same distances for each query and its own place among them; and the past.

    A target that claims causality and declares no pattern may have a window, but not a hole at its own position.
    """
    past = make_allowed_pairs(Causal(), queries, keys, subject)[0]
    offset = 0 if subject.conventions.align == "start" else keys - queries
    distance = torch.arange(queries)[:, None] + offset - torch.arange(keys)[None, :]
    expected = torch.empty_like(found)
    for head in range(found.shape[1]):
        visible = torch.zeros(max(queries, keys) + 1, dtype=torch.bool)
        visible[distance[past & found[:, head].any(0)]] = True
        visible[0] = True
        expected[:, head] = past & visible[distance.clamp(min=0)]
    return expected, past


def exceeds_rounding(numbers: Tensor, subject: Adapter) -> Tensor:
    """What is there, and not by rounding."""
    sizes = numbers.abs().nan_to_num(1.0, 1.0, 1.0)
    return sizes > 64 * subject.eps * sizes.max().clamp(max=1.0)


def expect_same_pairs(
    expected: Tensor, weights: Tensor, known: Tensor, subject: Adapter, changed: str
) -> Iterator[Observation]:
    """Weights are positive exactly where expected, in rows that may see anything."""
    expected = expected.expand_as(weights)
    compared = expected.any(-1, keepdim=True) & known
    # A row whose weights fade until they underflow is not cut off.
    fading = torch.where(weights > 0, weights, torch.inf).amin(-1, keepdim=True) < 1e-25
    found = torch.where(expected, (weights != 0) | fading, exceeds_rounding(weights, subject)) & compared
    wanted = expected & compared
    yield expect_equal(
        wanted.double().transpose(1, 2),
        found.double().transpose(1, 2),
        exact=True,
        output="weights",
        changed=changed,
        effect=_describe_wrong_pair(wanted.flatten(0, 1), found.flatten(0, 1), range(weights.shape[-1])),
    )


def _describe_wrong_pair(expected: Tensor, found: Tensor, places: range | list[int], but: str = "") -> str:
    """The first pair that is wrong, in words; tensors are (any, query, key)."""
    wrong = (expected != found).nonzero()
    if not len(wrong):
        return ""
    row, query, place = (int(i) for i in wrong[0])
    word = "does not see" if bool(expected[row, query, place]) else "sees"
    count, right = int(found[row, query].sum()), int(expected[row, query].sum())
    keys = f"{but}key" if count == 1 else f"{but}keys"
    return f"{word} key {places[place]} at query {query}; it sees {count} {keys}, {right} declared"


def _choose_places(tokens: int) -> list[int]:
    if tokens <= 13:
        return list(range(tokens))
    edges = {15, 16, 31, 32, 63, 64, 127, 128, tokens // 2, tokens // 3, tokens - 2, tokens - 1}
    return sorted({0, 1} | {edge for edge in edges if edge < tokens})


def measure_dependency(subject: Adapter, x: Tensor, mask: Tensor | None, places: list[int], rng: Rng) -> Tensor:
    """By how much outputs `(batch, token, place)` move, beside their size, when the token at a place is another one."""
    before = subject.run(x, mask)
    other = subject.draw(x.shape[0], x.shape[1], rng)
    if not x.is_floating_point():
        span = int(max(x.max(), other.max())) + 1
        other = torch.where(other == x, (x + 1) % max(span, 2), other)
    columns = []
    for place in places:
        changed = x.clone()
        changed[:, place] = other[:, place]
        apart = (subject.run(changed, mask) - before).abs().nan_to_num(torch.inf, torch.inf, torch.inf)
        columns.append(apart.flatten(2).amax(-1))
    scale = float(before.abs().nan_to_num(0, 0, 0).max())
    return torch.stack(columns, -1) / (scale or 1.0)


def _find_expected_past(moved: Tensor, places: list[int]) -> tuple[Tensor, Tensor]:
    """What a causal layer without a declared pattern must affect: all later tokens, or those within one distance."""
    distance = torch.arange(moved.shape[1])[:, None] - torch.tensor(places)[None, :]
    past = distance >= 0
    reach = distance[moved.any(0) & past]
    farthest = int(reach.max()) if reach.numel() else 0
    return (past & (distance <= farthest)).expand_as(moved), past.expand_as(moved)


def _measure_pairs(subject: Adapter) -> tuple[Tensor, list[int]]:
    """Which pairs interact, `(token, token)`, without any mask."""
    rng = Rng(0, "support")
    if isinstance(subject, OperatorAdapter):
        tokens = 257
        query, key, _ = subject.tensors(rng, 1, tokens, tokens)
        return (subject.matrix(query * MODERATE, key) != 0)[0].any(0), list(range(tokens))
    tokens = subject.lengths(257, 131, 33)[0]
    view = subject.at(torch.float64) or subject
    places = sorted({0, tokens // 2, tokens - 1})
    return exceeds_rounding(measure_dependency(view, view.draw(1, tokens, rng), None, places, rng), view)[0], places


def _name_pattern(pairs: Tensor, places: list[int]) -> str:
    """A name for the measured pairs, read off the queries that see one key in the middle."""
    tokens = pairs.shape[0]
    middle = places[len(places) // 2]
    seers = pairs[:, len(places) // 2].nonzero().flatten() - middle
    back, ahead = int(max(seers.max(), 0)) if len(seers) else 0, int(max(-seers.min(), 0)) if len(seers) else 0
    far, near = tokens - 1 - middle, middle
    if back == far and ahead == near:
        return "full"
    if back == far and ahead == 0:
        return "causal"
    if ahead == 0:
        return f"window: {back} keys back"
    return f"window: {back} keys back, {ahead} ahead" if back < far and ahead < near else "a pattern of its own"
