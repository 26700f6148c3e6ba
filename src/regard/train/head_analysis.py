"""Statistical tests of head positions: do widths grow, do centres leave the query, do the heads form a grid?

A question of the ETH exercise (Cordonnier, Loukas and Jaggi 2020, section 4) about a trained spatial transformer. Every
answer is a number with an interval, a p-value and a verdict:

    no          the 95 % interval excludes an effect as large as that of `MARGINS`
    yes         it does not, and p < 0.05, adjusted for the number of layers where there is an answer for each
    undecided   neither; or there are too few heads for any p-value below 0.05

Heads without a position (`HeadProfile.degenerate`) are left out. Position and width of a head are those of its
parameters, `centre` and `sqrt(trace(Sigma) / 2)`, which the border of a small image does not cut off; where there are
none, those of its weights. The same runs give the same answers: all draws are seeded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from regard.layers.profiles import HeadProfile

LEVEL = 0.05
DRAWS = 10_000  # permutations and resamples
EXACT = 14  # up to as many heads, all 2^n signs are tried
ALL_LAYERS = "all"

# The distance of a uniform random point from the nearest integer point: (sqrt 2 + asinh 1) / 6, and its deviation,
# sqrt(1/6 - mean^2). The largest is sqrt(1/2).
CHANCE_DISTANCE = (math.sqrt(2) + math.asinh(1)) / 6
CHANCE_DEVIATION = math.sqrt(1 / 6 - CHANCE_DISTANCE**2)
SMALLEST_GRID = 4  # heads: 2 x 2

DEPTH, TRAINING, CENTRES, GRID = (
    "Do widths grow with depth?",
    "Do widths grow in training?",
    "Do centres leave the query?",
    "Do the heads form a grid?",
)
MEANINGS = {
    DEPTH: "mean width of the last layer / of the first; p of Spearman's correlation with depth, by permutation",
    TRAINING: "geometric mean of width / initial width; p by flipping the signs of the logarithms",
    CENTRES: "mean distance from the query, minus the initial distance, in tokens; p by flipping signs",
    GRID: f"mean distance to the nearest integer shift, {CHANCE_DISTANCE:.4f} by chance; p of a mean as small",
}
# An effect below this is none: a tenth of the width, a quarter of a token, and half the distance of chance.
MARGINS = {DEPTH: 1.1, TRAINING: 1.1, CENTRES: 0.25, GRID: CHANCE_DISTANCE / 2}


@dataclass(frozen=True)
class Answer:
    """The answer to one question about the heads of a layer, or of all layers.

    Attributes:
        question: one of `MEANINGS`, which says what `value` is.
        layer: the layer's name, or "all".
        verdict: "yes", "no" or "undecided".
        value: the statistic; nan if there are no heads.
        low, high: its 95 % interval.
        p: of the effect in the direction of the question; adjusted (Holm) for the number of layers.
        heads: how many were tried, without degenerate ones.
        reason: what the verdict rests on, in words.
        details: further numbers: correlation, widths, distances, distinct shifts.
    """

    question: str
    layer: str
    verdict: str
    value: float
    low: float
    high: float
    p: float
    heads: int
    reason: str
    details: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """The answer as JSON types; what is not finite is null."""
        content = asdict(self)
        for name in ("value", "low", "high", "p"):
            content[name] = content[name] if math.isfinite(content[name]) else None
        return content


@dataclass(frozen=True)
class _Heads:
    """The heads of a layer that have a position, before and after training, in float64."""

    width: Tensor
    centre: Tensor
    first_width: Tensor
    first_centre: Tensor


def analyze_heads(initial: Mapping[str, HeadProfile], final: Mapping[str, HeadProfile]) -> list[Answer]:
    """Answer the four questions for a trained model, from its head profiles by layer before and after training.

    >>> from regard import Quadratic
    >>> from regard.layers import head_profile
    >>> shifts = [[row, column] for row in (-1, 0, 1) for column in (-1, 0, 1)]
    >>> conv = {"layer": head_profile(Quadratic(9, grid=(9, 11), centre=shifts, alpha=0.5))}
    >>> {answer.question: answer.verdict for answer in analyze_heads(conv, conv) if answer.layer == "all"}
    {'Do widths grow with depth?': 'undecided', ... 'Do the heads form a grid?': 'yes'}
    """
    layers = {name: _select_heads(initial[name], profile) for name, profile in final.items()}
    answers = [_compare_depths(layers)]
    for question, test in ((TRAINING, _test_widths), (CENTRES, _test_centres), (GRID, _test_grid)):
        single = _adjust([test(name, heads) for name, heads in layers.items()])
        pooled = test(ALL_LAYERS, _concatenate(list(layers.values()))) if question != GRID else _join_grids(single)
        answers += [pooled, *single]
    return answers


def _select_heads(first: HeadProfile, last: HeadProfile) -> _Heads:
    chosen = ~(first.degenerate() | last.degenerate())
    widths = [_measure_widths(each, chosen) for each in (first, last)]
    centres = [(each.mean if each.centre is None else each.centre)[chosen].double() for each in (first, last)]
    return _Heads(widths[1], centres[1], widths[0], centres[0])


def _measure_widths(profile: HeadProfile, chosen: Tensor) -> Tensor:
    if profile.precision is None:
        return profile.width[chosen].double()
    covariance = torch.linalg.inv(profile.precision[chosen].double())
    return (covariance.diagonal(dim1=1, dim2=2).sum(-1) / 2).sqrt()


def _concatenate(layers: list[_Heads]) -> _Heads:
    fields = ("width", "centre", "first_width", "first_centre")
    return _Heads(*(torch.cat([getattr(each, field) for each in layers]) for field in fields))


# The questions


def _compare_depths(layers: Mapping[str, _Heads]) -> Answer:
    """Spearman's rank correlation of width and layer, against permutations of the heads among the layers."""
    present = [heads.width for heads in layers.values() if len(heads.width)]
    widths = torch.cat(present) if present else torch.zeros(0).double()
    depth = torch.cat(
        [torch.full((len(each),), float(number)).double() for number, each in enumerate(present)] or [widths]
    )
    means = [each.mean().item() for each in present]
    details = {f"width of layer {number}": mean for number, mean in enumerate(means)}
    if len(present) < 2:
        return _make_undecided(DEPTH, ALL_LAYERS, len(widths), "one layer has no depth", details)
    # As many ways to assign the heads to the layers; the observed one alone has this p-value.
    ways = math.exp(math.lgamma(len(widths) + 1) - sum(math.lgamma(len(each) + 1) for each in present))
    if 1 / ways > LEVEL:
        return _make_undecided(DEPTH, ALL_LAYERS, len(widths), _say_too_few(len(widths), 1 / ways), details)
    generator = torch.Generator().manual_seed(0)
    ranks, depths = _rank(widths), _rank(depth)
    observed = _correlate(ranks, depths)
    shuffled = ranks[torch.rand(DRAWS, len(ranks), generator=generator).argsort(-1)]
    p = _count_at_least(_correlate(shuffled, depths), observed)
    ends = [_resample_means(each, generator) for each in (present[0], present[-1])]
    low, high = _find_interval(ends[1] / ends[0])
    details["Spearman's correlation"] = observed.item()
    return _judge(DEPTH, ALL_LAYERS, means[-1] / means[0], low, high, p, len(widths), details)


def _test_widths(layer: str, heads: _Heads) -> Answer:
    """The change of the logarithm of the width, head by head."""
    if not len(heads.width):
        return _make_undecided(TRAINING, layer, 0, "every head is degenerate", {})
    change = (heads.width / heads.first_width).log()
    details = {"width": heads.width.mean().item(), "initial width": heads.first_width.mean().item()}
    value, low, high, p = _test_change(change)
    return _judge(TRAINING, layer, math.exp(value), math.exp(low), math.exp(high), p, len(change), details)


def _test_centres(layer: str, heads: _Heads) -> Answer:
    """The change of the distance from the query, head by head."""
    if not len(heads.centre):
        return _make_undecided(CENTRES, layer, 0, "every head is degenerate", {})
    now, before = heads.centre.norm(dim=-1), heads.first_centre.norm(dim=-1)
    details = {
        "distance": now.mean().item(),
        "initial distance": before.mean().item(),
        "displacement": (heads.centre - heads.first_centre).norm(dim=-1).mean().item(),
    }
    value, low, high, p = _test_change(now - before)
    return _judge(CENTRES, layer, value, low, high, p, len(now), details)


def _test_grid(layer: str, heads: _Heads) -> Answer:
    """Distances to the nearest integer shifts, against centres anywhere between them; and are the shifts distinct?"""
    count = len(heads.centre)
    if count < SMALLEST_GRID:
        reason = f"a grid has {SMALLEST_GRID} heads at least, and {count} {'has' if count == 1 else 'have'} a position"
        return _make_undecided(GRID, layer, count, reason, {})
    shifts = heads.centre.round()
    distances = (heads.centre - shifts).norm(dim=-1)
    distinct = len(torch.unique(shifts, dim=0))
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(DRAWS, count, 2, generator=generator, dtype=torch.float64) - 0.5
    p = _count_at_least(-points.norm(dim=-1).mean(-1), -distances.mean())
    value, error = distances.mean().item(), 1.96 * CHANCE_DEVIATION / math.sqrt(count)
    details = {"distinct shifts": float(distinct), "heads": float(count)}
    return _judge(GRID, layer, value, value - error, value + error, p, count, details)


def _join_grids(layers: list[Answer]) -> Answer:
    """Whether some layer has a grid: two layers that share their shifts are two grids, not one with doubles."""
    verdicts = [answer.verdict for answer in layers]
    heads = sum(answer.heads for answer in layers)
    verdict = "yes" if "yes" in verdicts else "no" if verdicts and set(verdicts) == {"no"} else "undecided"
    reason = f"yes in {verdicts.count('yes')}, no in {verdicts.count('no')} of {len(verdicts)} layers"
    known = [answer for answer in layers if math.isfinite(answer.value)]
    total = sum(answer.heads for answer in known)
    value = sum(answer.value * answer.heads for answer in known) / total if total else math.nan
    error = 1.96 * CHANCE_DEVIATION / math.sqrt(total) if total else math.nan
    p = min((answer.p for answer in layers if math.isfinite(answer.p)), default=math.nan)
    return Answer(GRID, ALL_LAYERS, verdict, value, value - error, value + error, p, heads, reason, {})


# Verdicts


def _judge(
    question: str, layer: str, value: float, low: float, high: float, p: float, heads: int, details: dict[str, float]
) -> Answer:
    """The verdict on a statistic; for the grid a small value is the effect, for the others a large one."""
    margin = MARGINS[question]
    if question == GRID:
        distinct = int(details["distinct shifts"])
        if p < LEVEL and distinct < heads:
            verdict, reason = "no", f"near integer shifts, but {heads} heads have {distinct} distinct ones"
        elif p < LEVEL:
            verdict, reason = "yes", f"{heads} distinct shifts, nearer to integers than by chance"
        elif low > margin:
            verdict, reason = "no", f"the interval excludes {margin:.2f}, half the distance of chance"
        else:
            verdict, reason = "undecided", f"not nearer than by chance, but the interval includes {margin:.2f}"
        return Answer(question, layer, verdict, value, low, high, p, heads, reason, details)
    fewest = _smallest_p(heads) if question != DEPTH else 0.0
    if fewest > LEVEL:
        return _make_undecided(question, layer, heads, _say_too_few(heads, fewest), details, (value, low, high, p))
    shown = f"{margin:g}"
    if high < margin:  # even with a small p-value: a tenth of a percent is no growth
        verdict, reason = "no", f"the interval excludes {shown}"
    elif p < LEVEL:
        verdict, reason = "yes", f"p < {LEVEL}"
    else:
        verdict, reason = "undecided", f"p >= {LEVEL}, and the interval includes {shown}"
    return Answer(question, layer, verdict, value, low, high, p, heads, reason, details)


def _make_undecided(
    question: str,
    layer: str,
    heads: int,
    reason: str,
    details: dict[str, float],
    numbers: tuple[float, float, float, float] = (math.nan, math.nan, math.nan, math.nan),
) -> Answer:
    return Answer(question, layer, "undecided", *numbers, heads, reason, details)


def _say_too_few(heads: int, smallest: float) -> str:
    return f"too few: no p-value of {heads} head{'' if heads == 1 else 's'} is below {smallest:.2g}"


def _adjust(answers: list[Answer]) -> list[Answer]:
    """The answers of single layers with p-values adjusted for their number (Holm 1979), and judged anew."""
    order = sorted((each for each in answers if math.isfinite(each.p)), key=lambda each: each.p)
    adjusted, largest = {}, 0.0
    for rank, answer in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * answer.p))
        adjusted[answer.layer] = largest
    return [
        _judge(
            each.question, each.layer, each.value, each.low, each.high, adjusted[each.layer], each.heads, each.details
        )
        if each.layer in adjusted
        else each
        for each in answers
    ]


# Statistics


def _test_change(change: Tensor) -> tuple[float, float, float, float]:
    """The mean of paired differences, its bootstrap interval, and p of one as large under random signs."""
    generator = torch.Generator().manual_seed(0)
    low, high = _find_interval(_resample_means(change, generator))
    if len(change) <= EXACT:
        numbers = torch.arange(2 ** len(change))[:, None]
        signs = 1 - 2 * ((numbers >> torch.arange(len(change))) & 1).double()
        p = ((signs * change).mean(-1) >= change.mean() - _rounding(change)).double().mean().item()
    else:
        signs = 2 * torch.randint(0, 2, (DRAWS, len(change)), generator=generator).double() - 1
        p = _count_at_least((signs * change).mean(-1), change.mean())
    return change.mean().item(), low, high, p


def _smallest_p(heads: int) -> float:
    """The smallest p-value that random signs can have."""
    return 2.0**-heads


def _resample_means(values: Tensor, generator: torch.Generator) -> Tensor:
    chosen = torch.randint(0, len(values), (DRAWS, len(values)), generator=generator)
    return values[chosen].mean(-1)


def _find_interval(draws: Tensor) -> tuple[float, float]:
    low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
    return low, high


def _count_at_least(draws: Tensor, observed: Tensor) -> float:
    """The share of draws, the observed one among them, that are at least as large."""
    return (1 + int((draws >= observed - _rounding(draws)).sum())) / (1 + len(draws))


def _rounding(values: Tensor) -> float:
    """What sums in another order may differ by."""
    return 1e-12 * (1 + float(values.abs().max()))


def _rank(values: Tensor) -> Tensor:
    """Ranks from 0; equal values share the mean of theirs. Widths that differ by rounding alone are equal."""
    rounded = (values / values.abs().max().clamp(min=1e-300) * 1e6).round()
    _, inverse, counts = torch.unique(rounded, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts.double() + 1) / 2)[inverse]


def _correlate(ranks: Tensor, depths: Tensor) -> Tensor:
    """Pearson's correlation along the last axis; 0 where all are equal."""
    first, second = (each - each.mean(-1, keepdim=True) for each in (ranks, depths))
    scale = first.norm(dim=-1) * second.norm(dim=-1)
    return torch.where(scale > 0, (first * second).sum(-1) / scale.clamp(min=1e-300), 0.0)
