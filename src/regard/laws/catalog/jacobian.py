"""L21: the Jacobian of the weights is that of a softmax."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.law import Case, Law, Observation, expect_equal, expect_true, expect_zero
from regard.laws.masks import draw_broadcast_mask
from regard.laws.score_reading import is_kernelised


class JacobianLaw(Law):
    id = "L21"
    slug = "jacobian"
    title = "Jacobian"
    headline = "the weights do not respond to their logits as a softmax does."
    statement = (
        "The derivative of the weights by the logits is diag(p) - p p^T: symmetric, positive semidefinite, with rows "
        "that sum to zero."
    )
    equation = "dp / dq = scale (diag(p) - p p^T) K"
    catches = "a denominator without gradient, a wrong custom backward, a normaliser that does not normalise"
    smallest = {"batch": 1, "queries": 1, "keys": 2}
    kinds = ("keys",)
    minimum = 4

    def applies(self, subject: Adapter) -> str | None:
        if not isinstance(subject, OperatorAdapter):
            return "it is not an operator on queries, keys and values"
        if "gradients" not in subject.abilities:
            return "it has no gradients"
        return None

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        assert isinstance(subject, OperatorAdapter)
        sizes = sorted({2, 3, 5, subject.dim})
        for place, keys in enumerate(reversed([size for size in sizes if size <= subject.dim])):
            for queries in dict.fromkeys((keys, 1)):
                yield {"batch": 1, "queries": queries, "keys": keys, "length": 1.0, "mask": "none"}
            if place == 0:
                masks = ("none", "pairs") if "mask" in subject.abilities else ("none",)
                if len(masks) > 1:
                    yield {"batch": 2, "queries": keys, "keys": keys, "length": 1.0, "mask": "pairs"}
                for mask in masks:  # more keys than a block has, and no multiple of one
                    yield {"batch": 1, "queries": 5, "keys": 41, "length": 1.0, "mask": mask}
        yield {"batch": 1, "queries": 37, "keys": 37, "length": 1.0, "mask": "none"}
        if not fast:
            for length in (0.3, 3.0):
                yield {"batch": 2, "queries": subject.dim, "keys": subject.dim, "length": length, "mask": "none"}
            for queries, keys in ((1, 37), (66, 67), (5, 131)):
                for mask in ("none", "pairs") if "mask" in subject.abilities else ("none",):
                    yield {"batch": 1, "queries": queries, "keys": keys, "length": 1.0, "mask": mask}

    def possible(self, case: Case) -> bool:
        return int(case["queries"]) <= int(case["keys"])

    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        assert isinstance(subject, OperatorAdapter)
        batch, queries, keys = int(case["batch"]), int(case["queries"]), int(case["keys"])
        query, key, _ = subject.tensors(rng, batch, queries, keys)
        long = keys > subject.dim
        # Keys of length one: unit vectors while there are enough of them, else any directions.
        units = key / key.norm(dim=-1, keepdim=True) if long else torch.eye(keys, subject.dim, dtype=key.dtype)
        key = units.expand_as(key).contiguous() * float(case["length"])
        mask = None
        if case["mask"] != "none" and long:
            mask = draw_broadcast_mask("pairs", rng, batch, subject.heads, queries, keys)
        elif case["mask"] != "none":
            mask = torch.ones(queries, keys, dtype=torch.bool)
            mask[:, 1] = torch.arange(queries) == 1 + queries - keys
        places = sorted({*range(0, keys, max(keys // 8, 1)), keys - 1})
        weights, found, total = find_derivative(subject, query, key, mask, places)
        size = float(found.abs().max()) + 1e-3
        named = {"output": "jacobian", "changed": "the query", "reduction": keys + subject.dim}
        yield expect_zero(total.transpose(1, 2), size, effect="does not sum to zero over the keys", **named)
        map_of_logits = self._find_logit_map(subject, query, key, mask, weights)
        if map_of_logits is None:
            yield expect_true(
                is_kernelised(subject),
                "its logits do not grow in proportion to the query",
                output="weights",
                changed="the query",
            )
            return
        slope = torch.diag_embed(weights) - weights[..., :, None] * weights[..., None, :]
        yield expect_equal(
            (slope[..., places, :] @ map_of_logits).transpose(1, 2),
            found.transpose(1, 2),
            effect="is not that of a softmax",
            scale=float(map_of_logits.abs().max()) + size,
            **named,
        )

    @staticmethod
    @torch.no_grad()
    def _find_logit_map(
        subject: OperatorAdapter, query: Tensor, key: Tensor, mask: Tensor | None, weights: Tensor
    ) -> Tensor | None:
        """The linear map `(batch, head, query, key, dim)` from a query to its logits; None if there is none.

        A zero query gives the biases; unit queries give the columns of the map. Logits are known up to a constant for
        each query, which the Jacobian of a softmax does not see.
        """

        width = query.shape[-1]
        units = [torch.zeros_like(query) for _ in range(width)]
        for axis, unit in enumerate(units):
            unit[..., axis] = 1.0
        contents = [torch.zeros_like(query), *units, query, 3 * query]
        found = torch.stack([subject.matrix(content, key, mask) for content in contents])
        # What comes near the smallest of numbers has lost its digits, and weighs nothing.
        positive = (weights > 0) & (found > 1e6 * torch.finfo(found.dtype).tiny).all(0)
        count = positive.sum(-1, keepdim=True).clamp(min=1)
        logits = torch.where(positive, found.clamp(min=torch.finfo(found.dtype).tiny).log(), 0.0)
        logits = torch.where(positive, logits - logits.sum(-1, keepdim=True) / count, 0.0)
        grown = logits[1:] - logits[0]
        linear = torch.stack(tuple(grown[:width]), -1)
        for content, growth in zip(contents[-2:], grown[-2:], strict=True):
            expected = (linear @ content[..., None]).squeeze(-1)
            apart = (growth - expected).abs().max()
            if float(apart) > 1e-3 * (float(expected.abs().max()) + 1e-3):
                return None
        return linear


def find_derivative(
    subject: OperatorAdapter, query: Tensor, key: Tensor, mask: Tensor | None, places: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights `(batch, head, query, key)`, and how those of some places, and their sum, change with the query."""
    query = query.clone().requires_grad_()
    with torch.enable_grad():
        weights = subject.matrix(query, key, mask)
        rows = []
        for part in [weights[..., place] for place in places] + [weights]:
            (slope,) = torch.autograd.grad(part.sum(), query, retain_graph=True)
            rows.append(slope)
    return weights.detach(), torch.stack(rows[:-1], -2), rows[-1]
