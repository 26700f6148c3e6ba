"""Equality with a reference: values, not laws.

Wrong numbers can keep every law: ALiBi slopes of another series, rotary angles scaled twice, relative-position buckets
with one edge moved. A second implementation shows them. `Reference` is a law like any other, made for one reference:
same search, same precision rules, same smallest counterexample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from regard.adapters import Adapter, adapt
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.errors import InputError
from regard.laws.law import Case, Law, Observation, expect_equal
from regard.laws.masks import draw_operator_mask, token_mask
from regard.laws.probes import find_magnitude

PAIRS = ("keys", "shared", "pairs", "heads")
# Powers of two and other numbers: slopes of linear biases are two series.
HEADS = (1, 2, 3, 4, 6, 8, 12)


class ReferenceLaw(Law):
    id = "REF"
    slug = "reference"
    title = "Equality with the reference"
    headline = "the values are not those of the reference."
    statement = (
        "Equal inputs give the outputs of the reference, and its gradients where both have some: with and without a "
        "mask, at every length, in float64 and in the target's own precision."
    )
    equation = "f(x, m) = g(x, m);  d f / d x = d g / d x"
    catches = "numbers that are wrong and keep every law: slopes of linear biases, rotary scaling, position buckets"
    smallest: ClassVar[Mapping[str, int]] = {"batch": 1, "tokens": 1, "queries": 1, "keys": 1, "heads": 1, "hidden": 1}
    kinds = ("compare", "mask", "tokens", "keys")
    minimum = 5

    def __init__(self, subject: Adapter) -> None:
        self.subject = subject

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        masked = "mask" in subject.abilities and "mask" in self.subject.abilities
        lengths = subject.lengths(5, 2, 37, 1, 141) if fast else subject.lengths(5, 2, 37, 1, 141, 67, 17, 300, 600)
        if isinstance(subject, OperatorAdapter) and isinstance(self.subject, OperatorAdapter):
            yield from self._make_operator_cases(subject, lengths, masked, fast)
            return
        sides = ("none", "right", "left", "random") if masked else ("none",)
        for place, tokens in enumerate(lengths):
            for mask in sides if tokens > 1 else sides[:1]:
                case = {"batch": 1 + place % 3, "tokens": tokens, "mask": mask, "compare": "outputs"}
                yield case if mask == "none" else {**case, "hidden": max(tokens // 3, 1)}
            if tokens < 100 and "float" in subject.abilities:
                yield {"batch": 2, "tokens": tokens, "mask": "none", "compare": "gradients"}

    @staticmethod
    def _make_operator_cases(subject: OperatorAdapter, lengths: list[int], masked: bool, fast: bool) -> Iterator[Case]:
        plain = {"batch": 2, "mask": "none", "compare": "outputs"}
        masks = ("none", *PAIRS) if masked else ("none",)
        for place, tokens in enumerate(lengths):
            for mask in masks:
                yield {**plain, "batch": 1 + place % 2, "queries": tokens, "keys": tokens, "mask": mask}
            if tokens < 100:
                for mask in dict.fromkeys(("none", masks[-1])):
                    yield {**plain, "queries": tokens, "keys": tokens, "mask": mask, "compare": "gradients"}
        if subject.kv_heads == subject.heads:
            for heads in HEADS:
                yield {**plain, "queries": 7, "keys": 7, "heads": heads}
        if "lengths" in subject.abilities:
            for queries, keys in ((1, 9), (5, 37), (3, 141)) if fast else ((1, 9), (5, 37), (3, 141), (37, 300)):
                for mask in masks:
                    yield {**plain, "queries": queries, "keys": keys, "mask": mask}

    def possible(self, case: Case) -> bool:
        return case["mask"] not in ("right", "left", "random") or 0 < int(case["hidden"]) < int(case["tokens"])

    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        other = self.subject.at(subject.dtype)
        if other is None:
            return  # the reference does not run in this precision
        gradients = case["compare"] == "gradients"
        if gradients and not ("gradients" in subject.abilities and "gradients" in other.abilities):
            return
        if isinstance(subject, OperatorAdapter) and isinstance(other, OperatorAdapter):
            inputs, mask, where, runs = self._prepare_operators(subject, other, case, rng)
        else:
            inputs, mask, where, runs = self._prepare_tokens(subject, other, case, rng)
        words: dict[str, Any] = {"changed": "the target for the reference", "reduction": inputs[-1].shape[-2] * 4}
        with torch.set_grad_enabled(gradients):
            given = [[tensor.clone().requires_grad_(gradients) for tensor in inputs] for _ in runs]
            try:
                found, expected = (run(*tensors, mask) for run, tensors in zip(runs, given, strict=True))
            except Exception:
                if "heads" in case:
                    return  # its heads are fixed
                raise
            words["scale"] = find_magnitude(expected)
            words["reduction"] = subject.channels + (expected.shape[1] if expected.ndim > 1 else 1)
            if not gradients:
                yield expect_equal(expected, found, where=where, **words)
                return
            if found.shape != expected.shape or not (found.requires_grad and expected.requires_grad):
                return
            weight = rng.normal(*expected.shape).to(expected.dtype)
            if where is not None:
                weight = weight * where.reshape(where.shape + (1,) * (weight.ndim - where.ndim))
            actual, wanted = (
                torch.autograd.grad((output * weight).sum(), tensors, allow_unused=True)
                for output, tensors in zip((found, expected), given, strict=True)
            )
        names = ("query", "key", "value") if len(inputs) == 3 else ("input",)
        largest = max((find_magnitude(gradient) for gradient in wanted if gradient is not None), default=1.0)
        for name, x, one, two in zip(names, inputs, wanted, actual, strict=True):
            if one is None and two is None:
                continue
            one, two = (torch.zeros_like(x) if gradient is None else gradient for gradient in (one, two))
            yield expect_equal(one, two, **{**words, "scale": largest, "output": f"gradient of {name}"})

    @staticmethod
    def _prepare_operators(subject: OperatorAdapter, other: OperatorAdapter, case: Case, rng: Rng) -> tuple:
        batch, queries, keys = int(case["batch"]), int(case["queries"]), int(case["keys"])
        sizes = {"heads": int(case["heads"])} if "heads" in case else {}
        inputs = list(subject.tensors(rng, batch, queries, keys, **sizes))
        mask = draw_operator_mask(subject, str(case["mask"]), batch, queries, keys, rng)

        def run(view: OperatorAdapter) -> Any:
            return lambda query, key, value, mask: view.attend_rows(query, key, value, mask)

        return inputs, mask, None, (run(subject), run(other))

    @staticmethod
    def _prepare_tokens(subject: Adapter, other: Adapter, case: Case, rng: Rng) -> tuple:
        batch, tokens = int(case["batch"]), int(case["tokens"])
        x = subject.draw(batch, tokens, rng)
        mask = None
        if case["mask"] != "none":
            mask = token_mask(str(case["mask"]), batch, tokens, int(case["hidden"]), rng)
        where = mask if mask is not None and "aligned" in subject.abilities else None
        return [x], mask, where, (subject.run, other.run)


def read_reference(reference: Any, subject: Adapter, kind: str | None, options: dict[str, Any]) -> ReferenceLaw:
    """The reference as the target is read: of the same kind, with the same conventions and sizes."""
    if isinstance(reference, Adapter):
        return ReferenceLaw(reference)
    sizes = {name: value for name, value in options.items() if name not in ("cache", "weights", "gradients")}
    if isinstance(subject, OperatorAdapter):
        own = {"heads": subject.heads, "kv_heads": subject.kv_heads, "dim": subject.dim, "value_dim": subject.value_dim}
        sizes = {**own, **sizes}
    elif isinstance(subject.target, nn.Module) != isinstance(reference, nn.Module) and subject.kind == "layer":
        sizes.setdefault("channels", subject.channels)
    try:
        other = adapt(reference, kind or subject.kind, None, **sizes)
    except InputError as failure:
        try:
            other = adapt(reference, kind or subject.kind)  # the adapter of a recognised class reads its sizes
        except InputError:
            raise failure from None
    if other.kind != subject.kind:
        raise InputError(
            f"the reference is no {subject.kind}.",
            asked=f"reference={other.name}",
            found=f"the target is read as {subject.kind}, the reference as {other.kind}",
            because="both are called with the same inputs",
            instead=f'kind="{subject.kind}", or a function that calls the reference as the target is called',
        )
    return ReferenceLaw(other)


def copy_parameters(target: Any, reference: Any) -> bool:
    """Give the reference the parameters of the target, where both are modules with the same names and shapes.

    Buffers are left alone: tables of slopes and angles are what the comparison is about. True if they were copied.
    """
    if not (isinstance(target, nn.Module) and isinstance(reference, nn.Module)):
        return False
    own, other = dict(target.named_parameters()), dict(reference.named_parameters())
    if not own or {name: each.shape for name, each in own.items()} != {
        name: each.shape for name, each in other.items()
    }:
        return False
    with torch.no_grad():
        for name, parameter in other.items():
            parameter.copy_(own[name])
    return True


__all__ = ["ReferenceLaw", "copy_parameters", "read_reference"]
