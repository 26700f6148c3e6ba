"""L13: the gradient is the derivative."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import Tensor, nn

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.difference_quotients import CheckedGradient, run_backward
from regard.laws.law import Case, Law, Observation, discard, expect_equal, expect_finite, expect_true, expect_zero
from regard.laws.variants import LONG, long_lengths

PARTS = ("query", "key", "value")


class GradientsLaw(Law):
    id = "L13"
    slug = "gradients"
    title = "Gradient law"
    headline = "the gradient is not the derivative."
    statement = (
        "Along every direction the gradient is the limit of difference quotients; masked inputs have zero gradient."
    )
    equation = "<grad L(x), u> = (L(x + hu) - L(x - hu)) / 2h,  grad of masked inputs = 0"
    catches = (
        "a backward that omits a factor, the tail of a block or a mask, or works only if all inputs require gradients"
    )
    needs = ("gradients",)
    smallest = {"batch": 1, "tokens": 1, "keys": 1}
    kinds = ("kind", "mask")
    minimum = 3

    def applies(self, subject: Adapter) -> str | None:
        if "float" not in subject.abilities and not _find_parameters(subject):
            return "its inputs are whole numbers and it has no parameters"
        return super().applies(subject)

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        operator = isinstance(subject, OperatorAdapter)
        masked = "mask" in subject.abilities
        lengths = subject.lengths(5, 67) if fast else subject.lengths(5, 17, 67, 1, 130, 2, 64, 33)
        first = lengths[0]
        plain = {"batch": 2, "tokens": first, "keys": first, "mask": "none", "kind": "all"}
        yield plain
        if masked:
            yield {**plain, "mask": "padding"}
        if operator:
            yield {**plain, "kind": "each"}
            yield {**plain, "mask": "random" if masked else "none", "batch": 1, "kind": "strided"}
            if masked:
                yield {**plain, "kind": "bias"}
                yield {**plain, "kind": "bias", "batch": 1, "tokens": 3, "keys": 7}
        else:
            yield {**plain, "kind": "strided"}
        for place, tokens in enumerate(lengths[1:]):
            sizes = {"batch": 1 + place % 2, "tokens": tokens, "keys": tokens}
            yield {**plain, **sizes}
            if masked:
                yield {**plain, **sizes, "mask": "padding"}
            if operator:
                yield {**plain, **sizes, "mask": "random" if masked else "none", "kind": "each"}
        if operator:
            unequal = [(3, 11), (1, 9), (5, 70)] if fast else [(3, 11), (1, 9), (5, 70), (66, 131), (7, 3), (131, 66)]
            for queries, keys in unequal:
                yield {**plain, "tokens": queries, "keys": keys}
                if masked and queries <= keys:
                    yield {**plain, "tokens": queries, "keys": keys, "mask": "random", "batch": 1}
            for kind in ("one key head", "half the key heads"):
                yield {**plain, "kind": kind}
        yield {**plain, "kind": "constant"}
        for tokens in long_lengths(subject, fast, 131 if fast else LONG):  # a failing slope is dear
            yield {**plain, "batch": 1, "tokens": tokens, "keys": tokens}

    def possible(self, case: Case) -> bool:
        if case["mask"] == "random" or case["kind"] == "bias":
            return int(case["keys"]) >= int(case["tokens"])
        return case["mask"] == "none" or int(case["tokens"]) > 2

    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        made: list[CheckedGradient] = []
        if isinstance(subject, OperatorAdapter):
            if case["kind"] == "bias":
                yield from self._observe_bias(subject, case, rng, made)
            else:
                yield from self._observe_operator(subject, case, rng, made)
        else:
            yield from self._observe_tokens(subject, case, rng, made)
        if any(each.skipped and not each.compared for each in made):
            discard("a kink or a jump within the smallest step of every direction")

    # Operators

    def _observe_operator(
        self, subject: OperatorAdapter, case: Case, rng: Rng, made: list[CheckedGradient]
    ) -> Iterator[Observation]:
        batch, queries, keys, kind = int(case["batch"]), int(case["tokens"]), int(case["keys"]), case["kind"]
        sizes = {}
        if kind in ("one key head", "half the key heads"):
            heads = subject.heads if kind == "one key head" else 4
            sizes = {"heads": heads, "kv_heads": heads // 2 if heads == 4 and kind != "one key head" else 1}
        inputs = list(subject.tensors(rng, batch, queries, keys, **sizes))
        mask = _draw_mask(str(case["mask"]), batch, queries, keys, rng)

        def call(view: OperatorAdapter, *parts: Tensor) -> Tensor:
            return view.attend(*cast(tuple[Tensor, Tensor, Tensor], parts), mask)

        if kind == "strided":
            inputs = [tensor.transpose(1, 2).contiguous() for tensor in inputs]

            def call(view: OperatorAdapter, *parts: Tensor) -> Tensor:
                query, key, value = (part.transpose(1, 2) for part in parts)
                return view.attend(query, key, value, mask)

        try:
            with torch.no_grad():
                output = call(subject, *inputs)
        except Exception:
            if sizes:
                return  # fewer key heads are an offer, not a duty
            raise
        if mask is None and queries <= keys:
            yield expect_finite(output, changed="nothing but random input")
        if not _has_no_empty_row(output):
            return  # a query without visible keys, or what may be one, is checked by `empty-rows`
        weight = _draw_output_weight(output, kind, rng)
        names, reduction = list(PARTS), keys + subject.dim
        wanted = CheckedGradient(subject, call, inputs, weight, reduction)
        made.append(wanted)
        yield from wanted.observe(rng, names)
        if mask is not None:
            hidden = ~mask.expand(batch, 1, queries, keys).any(2)[:, 0]
            for name, gradient in zip(names[1:], wanted.gradients[1:], strict=True):
                gradient = gradient if kind == "strided" else gradient.transpose(1, 2)
                rows = gradient * hidden[:, :, None, None]
                words = {"output": f"the gradient of the {name}", "changed": f"a {name} that no query may see"}
                yield expect_zero(rows, wanted.largest, reduction=reduction, touched=hidden, **words)
        if kind == "each":
            for index, name in enumerate(names):
                yield from wanted.alone(index, name)
            yield from wanted.again()

    def _observe_bias(
        self, subject: OperatorAdapter, case: Case, rng: Rng, made: list[CheckedGradient]
    ) -> Iterator[Observation]:
        """An additive mask is an input too, and may be the only one that requires a gradient."""
        batch, queries, keys = int(case["batch"]), int(case["tokens"]), int(case["keys"])
        inputs = subject.tensors(rng, batch, queries, keys)
        bias = rng.normal(batch, subject.heads, queries, keys, dtype=subject.dtype)
        if not _adds_mask_to_scores(subject, inputs, bias):
            return
        assert subject.form is not None
        name = subject.form.name

        def call(view: OperatorAdapter, bias: Tensor) -> Tensor:
            return view.attend(*(part.to(bias.dtype) for part in inputs), **{name: bias})

        with torch.no_grad():
            output = call(subject, bias)
        weight = rng.normal(*output.shape).to(output.dtype)
        together = [tensor.clone().requires_grad_() for tensor in (*inputs, bias)]
        with_others = subject.attend(*cast(tuple[Tensor, Tensor, Tensor], together[:3]), **{name: together[3]})
        run_backward(subject, with_others, weight)
        if together[3].grad is None:
            return  # its mask is not differentiable: the gradient is None
        try:
            wanted = CheckedGradient(subject, call, [bias], weight, keys + subject.dim)
        except Exception as failure:
            words = f"cannot be computed if only the mask requires one: {type(failure).__name__}"
            yield expect_true(
                False, words, output="the gradient", changed="an additive mask that alone requires a gradient"
            )
            return
        made.append(wanted)
        yield from wanted.observe(rng, ["additive mask"])
        yield expect_equal(
            together[3].grad,
            wanted.gradients[0],
            reduction=keys + subject.dim,
            scale=wanted.largest,
            output="the gradient of the mask",
            changed="whether queries, keys and values require gradients too",
        )

    # Layers and models

    def _observe_tokens(
        self, subject: Adapter, case: Case, rng: Rng, made: list[CheckedGradient]
    ) -> Iterator[Observation]:
        batch, tokens, kind = int(case["batch"]), int(case["tokens"]), case["kind"]
        x = subject.draw(batch, tokens, rng)
        mask = _draw_token_mask(batch, tokens, rng) if case["mask"] == "padding" else None
        kept = mask if mask is not None and "aligned" in subject.abilities else None

        def rows(output: Tensor) -> Tensor:
            return output if kept is None else output[kept]

        with torch.no_grad():
            output = subject.run(x, mask)
        if mask is None:
            yield expect_finite(output, changed="nothing but random input")
        if not output.isfinite().all():
            return
        output = rows(output)
        weight = _draw_output_weight(output, kind, rng)
        reduction = tokens + subject.channels
        if x.is_floating_point():
            strided = kind == "strided" and x.ndim == 3

            def call(view: Adapter, x: Tensor) -> Tensor:
                return rows(view.run(x.transpose(0, 1) if strided else x, mask))

            content = x.transpose(0, 1).contiguous() if strided else x
            wanted = CheckedGradient(subject, call, [content], weight, reduction)
            made.append(wanted)
            yield from wanted.observe(rng, ["input"], token_axis=0 if strided else 1)
            if mask is not None and not strided:
                hidden = (~mask).reshape(*mask.shape, *(1,) * (x.ndim - 2))
                words = {"output": "the gradient of the input", "changed": "a token that is padding"}
                yield expect_zero(
                    wanted.gradients[0] * hidden, wanted.largest, reduction=reduction, touched=~mask, **words
                )
            yield from wanted.again()
        if _find_parameters(subject) and kind == "all":
            yield from self._observe_parameters(subject, x, mask, rows, weight, reduction, rng, made)

    def _observe_parameters(
        self,
        subject: Adapter,
        x: Tensor,
        mask: Tensor | None,
        rows: Callable[[Tensor], Tensor],
        weight: Tensor,
        reduction: int,
        rng: Rng,
        made: list[CheckedGradient],
    ) -> Iterator[Observation]:
        others = {view.dtype: view.copy_unused() for view in (subject, subject.at(torch.float64)) if view is not None}

        def call(view: Adapter, *numbers: Tensor) -> Tensor:
            other = others[numbers[0].dtype]
            state = {f"module.{name}": number for name, number in zip(_find_parameters(other), numbers, strict=True)}
            content = x.to(other.dtype) if x.is_floating_point() else x
            return rows(torch.func.functional_call(_SubjectModule(other), state, (content, mask)))

        inputs = [parameter.detach().clone() for parameter in _find_parameters(subject).values()]
        if len({number.dtype for number in inputs}) > 1:
            return  # mixed precisions: there is no one step that suits all of them
        wanted = CheckedGradient(subject, call, inputs, weight, reduction)
        made.append(wanted)
        yield from wanted.observe(rng, ["parameters"], together=True)


class _SubjectModule(nn.Module):
    """A subject as a module, so that it runs with other numbers in place of its parameters."""

    def __init__(self, subject: Adapter) -> None:
        super().__init__()
        self.module, self.subject = subject.target, subject
        self.train(subject.target.training)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.subject.run(x, mask)


def _find_parameters(subject: Adapter) -> dict[str, Tensor]:
    if not isinstance(subject.target, nn.Module):
        return {}
    # Parameters without requires_grad, such as sinusoidal tables, have none.
    return {name: p for name, p in subject.target.named_parameters() if p.is_floating_point() and p.requires_grad}


def _draw_output_weight(output: Tensor, kind: object, rng: Rng) -> Tensor:
    """What outputs are weighted with; a backward has to read it whatever its strides are."""
    if kind == "constant":
        return torch.ones((), dtype=output.dtype).expand(output.shape)
    weight = rng.normal(*output.shape).to(output.dtype)
    if kind == "strided" and output.ndim > 2:
        return weight.transpose(1, 2).contiguous().transpose(1, 2)
    return weight


def _has_no_empty_row(output: Tensor) -> bool:
    """Whether every row is finite and none is zero, as that of a query which sees nothing may be."""
    return bool(output.isfinite().all()) and bool((output != 0).flatten(0, 2).any(-1).all())


def _draw_token_mask(batch: int, tokens: int, rng: Rng) -> Tensor:
    """Which tokens are real: single ones inside are not, nor is the last of the first row."""
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    for row in range(batch):
        start = rng.integer(1, 3)
        mask[row, start::3] = False
    if tokens > 2:
        mask[0, -1], mask[0, -2] = False, True
    mask[:, 0] = True
    return mask


def _draw_mask(kind: str, batch: int, queries: int, keys: int, rng: Rng) -> Tensor | None:
    """Pairs that may interact; no query is left without a key, whatever window it has beside."""
    if kind == "none":
        return None
    if kind == "padding":
        mask = _draw_token_mask(batch, keys, rng)
        if keys > 8:  # a whole stretch at the end, as the shorter of two sequences has
            mask[-1, keys - keys // 2 :] = False
        return mask[:, None, None, :]
    mask = rng.integers(0, 2, batch, 1, queries, keys).bool()
    row, column = torch.arange(queries)[:, None], torch.arange(keys)
    for offset in (0, keys - queries):
        mask |= (column - row - offset == 0) | (column - row - offset == -1)
    mask[..., 0] = True
    if keys > 2:
        mask[..., keys // 2] = False
    return mask


def _adds_mask_to_scores(subject: OperatorAdapter, inputs: tuple[Tensor, Tensor, Tensor], bias: Tensor) -> bool:
    """Whether a mask of numbers is added to the scores: zeros change nothing, -inf hides as a boolean mask does."""
    assert subject.form is not None
    name, (batch, heads, queries, keys) = subject.form.name, bias.shape
    hidden = torch.zeros(batch, heads, queries, keys, dtype=torch.bool)
    hidden[..., -1, 0] = keys > 1
    zeros = torch.zeros_like(bias)
    try:
        with torch.no_grad():
            pairs = [
                (subject.attend(*inputs), subject.attend(*inputs, **{name: zeros})),
                (
                    subject.attend(*inputs, ~hidden),
                    subject.attend(*inputs, **{name: zeros.masked_fill(hidden, -math.inf)}),
                ),
            ]
            moved = subject.attend(*inputs, **{name: bias})
    except Exception:  # it takes no mask of numbers
        return False
    near = 1e-4 if subject.dtype != torch.float64 else 1e-9
    same = all(a.shape == b.shape and torch.allclose(a, b, near, near) for a, b in pairs)
    return same and bool(moved.isfinite().all()) and (keys == 1 or not torch.allclose(moved, pairs[0][0], 1e-2, 1e-2))
