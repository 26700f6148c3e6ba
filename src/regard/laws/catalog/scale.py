"""L14: scores are scale times the products of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from regard.adapters import attention_watch
from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.law import Case, Law, Observation, expect_equal
from regard.laws.probes import find_visible_lengths
from regard.laws.score_reading import is_kernelised, read_own_scores, read_scores_of_few_queries

DIMS = (4, 8, 16, 32, 64)
# Attributes with the head dim of a module, for which it may have fixed its scale.
HEAD_DIM_ATTRIBUTES = ("head_dim", "dim_head", "d_head", "d_k", "dim", "head_size")


class ScaleLaw(Law):
    id = "L14"
    slug = "scale"
    title = "Scale"
    headline = "the scores are not scale times the products of queries and keys."
    statement = (
        "Logits are scale times the products of queries and keys; scale is the declared one, or 1 / sqrt(head dim)."
    )
    equation = "A_ij = softmax_j(scale q_i . k_j + b_ij),  scale = d^-1/2"
    catches = (
        "a scale that is missing, applied twice, or computed from the model width, another head dim or the value dim"
    )
    smallest = {"batch": 1, "queries": 1, "tokens": 2}
    kinds = ("tokens", "dim", "factor")
    minimum = 4

    def applies(self, subject: Adapter) -> str | None:
        if isinstance(subject, OperatorAdapter):
            return "its weights are not exponential in scores: it sums features" if is_kernelised(subject) else None
        if "lengths" not in subject.abilities:
            return "its tokens cannot be named from outside"
        for tokens in find_visible_lengths(subject)[:1]:
            if find_scales(subject.at(torch.float64) or subject, 2, tokens, Rng(0, "scale")) is not None:
                return None
        return "its queries, keys and scores cannot be observed"

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        if not isinstance(subject, OperatorAdapter):
            for place, tokens in enumerate(find_visible_lengths(subject)[: 2 if fast else 3]):
                for batch in ((2, 1), (2,))[place] if fast else (2, 1, 3):
                    yield {"batch": batch, "tokens": tokens}
            return
        yield from self._make_shape_cases(subject, fast)
        for factor in (1.0, 4.0, 0.1):
            for dim in list_head_dims(subject):
                yield {"batch": 2, "tokens": 2, "dim": dim, "factor": factor}
                yield {"batch": 1, "tokens": 5, "dim": dim, "factor": factor}
        for tokens in (17,) if fast else (3, 9, 17, 66, 131):
            yield {"batch": 1, "tokens": tokens, "dim": list_head_dims(subject)[0], "factor": 1.0}

    @staticmethod
    def _make_shape_cases(subject: OperatorAdapter, fast: bool) -> Iterator[Case]:
        """Few queries, many keys, values of another size, fewer key heads: scale is the same for all of them."""
        dim = list_head_dims(subject)[0]
        base: Case = {"batch": 1, "tokens": 5, "dim": dim, "factor": 1.0}
        yield base
        for value_dim in (3, dim + 5):
            yield {**base, "value_dim": value_dim}
        yield {**base, "tokens": 67}
        for queries, tokens in ((1, 7), (3, 41)) if fast else ((1, 7), (3, 41), (1, 41), (2, 5), (37, 67), (1, 131)):
            yield {**base, "tokens": tokens, "queries": queries}
        yield {**base, "tokens": 7, "queries": 1, "value_dim": 3}
        if "head-groups" in subject.context:
            for heads, kv_heads in ((4, 2), (6, 2), (3, 1)):
                sizes = {"heads": heads, "kv_heads": kv_heads}
                yield {**base, **sizes}
                yield {**base, **sizes, "tokens": 41}
                yield {**base, **sizes, "tokens": 7, "queries": 1}

    def possible(self, case: Case) -> bool:
        if "queries" not in case:
            return True
        return int(case["queries"]) <= int(case["tokens"]) and int(case["tokens"]) % 2 == 1 and int(case["tokens"]) > 1

    @torch.no_grad()
    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        batch, tokens = int(case["batch"]), int(case["tokens"])
        if not isinstance(subject, OperatorAdapter):
            fair = attention_watch.fair_lengths(subject, batch, tokens)
            found = find_scales(subject, batch, tokens, rng) if fair else None
            for scale, dim in found or []:
                declared = subject.conventions.scale or dim**-0.5
                effect = f"has scale {scale:.6g}; {declared:.6g} was declared for heads of {dim}"
                yield expect_equal(
                    torch.tensor([declared]).double(),
                    torch.tensor([scale]).double(),
                    output="attention",
                    effect=effect,
                    reduction=tokens * dim,
                )
            return
        dim = int(case["dim"])
        scale = subject.conventions.scale or dim**-0.5
        sizes = {name: int(case[name]) for name in ("heads", "kv_heads", "value_dim") if name in case}
        if "queries" in case:
            read = read_scores_of_few_queries(
                subject, rng, batch, int(case["queries"]), tokens, dim, float(case["factor"]), **sizes
            )
        else:
            read = [read_own_scores(subject, rng, batch, tokens, dim, float(case["factor"]), **sizes)]
        found = [(*self._read_scores(scale, *one), one) for one in read if bool(one[3].any())]
        if not found or not bool(read[0][3].any()):
            return
        # How unequal lengths are aligned was not declared: either end will do.
        expected, actual, (query, key, score, clear) = min(found, key=lambda one: float((one[0] - one[1]).abs().max()))
        products = (query * key).sum(-1)
        share = (score * products)[clear].sum() / (products[clear] ** 2).sum()
        yield expect_equal(
            expected.transpose(1, 2),
            actual.transpose(1, 2),
            output="scores",
            changed="the query, from zero",
            effect=f"has scale {float(share):.6g}; {scale:.6g} was declared for heads of {dim}",
            reduction=dim + tokens,
            scale=float(1 + expected.abs().max()),
        )

    @staticmethod
    def _read_scores(scale: float, query: Tensor, key: Tensor, score: Tensor, clear: Tensor) -> tuple[Tensor, Tensor]:
        """Expected and found scores, where they can be read off."""
        return torch.where(clear, scale * (query * key).sum(-1), 0.0), torch.where(clear, score, 0.0)


def list_head_dims(subject: OperatorAdapter) -> list[int]:
    """Head sizes to try: the subject's own first; only those that a module names, since it may have fixed its scale."""
    if isinstance(subject.target, nn.Module):
        sizes = [getattr(subject.target, name, None) for name in HEAD_DIM_ATTRIBUTES]
        own = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool)]
        return own[:1] or [subject.dim]
    return list(dict.fromkeys([subject.dim, *DIMS]))


@torch.no_grad()
def find_scales(subject: Adapter, batch: int, tokens: int, rng: Rng) -> list[tuple[float, int]] | None:
    """Beta and head size of each attention of a layer, from its recorded operations; None if they do not determine it.

    The factor between logits and the product of their operands comes from two runs, whose difference has no bias. What
    was multiplied into the operands before comes from their lengths beside those of projected rows, which rotations
    keep.
    """
    runs = []
    for _ in range(2):
        x = subject.draw(batch, tokens, rng)
        runs.append(attention_watch.observe(lambda x=x: subject.run(x), batch, tokens))
    found = []
    for first, second in zip(runs[0].calls, runs[1].calls, strict=False):
        factor = _fit_factor(first, second)
        if factor is None or first.query is None or first.key is None:
            continue
        before = [_find_prior_scale(part, runs[0].rows) for part in (first.query, first.key)]
        if before[0] is None or before[1] is None:
            continue
        found.append((factor * before[0] * before[1], first.query.shape[-1]))
    return found or None


def _fit_factor(first: attention_watch.AttentionCall, second: attention_watch.AttentionCall) -> float | None:
    """How much the logarithms of weights grow with the product of query and key."""
    if first.query is None or first.key is None or second.query is None or second.key is None:
        return None
    positive = (first.weights > 0) & (second.weights > 0)
    logits = first.weights.double().log() - second.weights.double().log()
    products = [
        call.query.double() @ call.key.double().mT
        for call in (first, second)
        if call.query is not None and call.key is not None
    ]
    growth = products[0] - products[1]
    count = positive.sum(-1, keepdim=True).clamp(min=1)
    sides = []
    for side in (logits, growth):
        side = torch.where(positive, side, 0.0)
        sides.append(torch.where(positive, side - side.sum(-1, keepdim=True) / count, 0.0))
    logits, growth = sides
    size = float((growth**2).sum())
    if size == 0:
        return None
    factor = float((logits * growth).sum()) / size
    rest = float(((logits - factor * growth) ** 2).sum())
    return factor if rest < 1e-6 * float((logits**2).sum()) else None


def _find_prior_scale(part: Tensor, rows: list[Tensor]) -> float | None:
    """By how much an operand `(batch, head, token, dim)` is longer than the projected rows it came from."""
    lengths = part.double().norm(dim=-1).transpose(1, 2)  # (batch, token, head)
    heads, dim = part.shape[1], part.shape[-1]
    for row in reversed(rows):
        if row.shape[0] != part.shape[0] or row.shape[-1] % dim:
            continue
        raw = row.double().unflatten(-1, (-1, dim)).norm(dim=-1)  # (batch, token, piece)
        ratio = lengths[:, :, :, None] / raw[:, :, None, :]  # of each head to each piece
        steady = (ratio.amax((0, 1)) - ratio.amin((0, 1))) < 1e-4 * ratio.amax((0, 1))
        if bool(steady.any(-1).all()):
            each = torch.stack([ratio[0, 0, head][steady[head]][0] for head in range(heads)])
            if float(each.max() - each.min()) < 1e-4 * float(each.max()):
                return float(each.mean())
    return None
