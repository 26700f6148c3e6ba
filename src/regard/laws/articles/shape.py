"""L23: the shape of the output follows from the shape of the input, never from what a mask contains."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from regard.laws.hiding import key_mask, pair_mask, token_mask
from regard.laws.law import Case, Dice, Law, Observation, true
from regard.laws.subjects.base import Subject
from regard.laws.subjects.operator import Operator
from regard.laws.traits import different

MASKS = ("same", "left", "right", "interior", "single", "row", "random")


class Shape(Law):
    id = "L23"
    slug = "shape"
    title = "Shape"
    headline = "the shape of the output depends on more than the shape of the input."
    statement = (
        "Inputs of one shape give outputs of one shape and one precision: with every mask that fits, with and without "
        "gradients. Where outputs have tokens, there is one for each token of the input."
    )
    equation = "shape(f(x, m)) = shape(f(x))"
    catches = (
        "a fast path that drops the columns which every row hides, a squeeze of a batch of one, a mask that raises"
    )
    smallest = {"batch": 1, "tokens": 1, "queries": 1, "keys": 1, "hidden": 1}

    def cases(self, subject: Subject, fast: bool) -> Iterator[Case]:
        masks = MASKS if "mask" in subject.abilities else ()
        lengths = subject.lengths(5, 1, 2, 7) if fast else subject.lengths(5, 1, 2, 7, 17, 33, 130)
        for gradients in (False, True):
            for batch, tokens in [(2, lengths[0]), *((1 + place % 3, length) for place, length in enumerate(lengths))]:
                yield {"batch": batch, "tokens": tokens, "mask": "none", "gradients": gradients}
                for mask in masks if tokens > 1 else ():
                    rows = max(batch, 2) if mask == "row" else batch
                    hidden = max(tokens // 2, 1)
                    sizes = {"batch": rows, "tokens": tokens, "hidden": hidden}
                    yield {**sizes, "mask": mask, "gradients": gradients}
        if isinstance(subject, Operator):
            forms = ("none", "keys", "pairs", "heads", "shared", "empty") if masks else ("none",)
            for batch, queries, keys in ((2, 3, 7), (1, 7, 3), (3, 1, 5), (1, 1, 1), (2, 5, 1), (2, 65, 130)):
                for form in forms:
                    sizes = {"batch": batch, "queries": queries, "keys": keys}
                    yield {**sizes, "form": form, "gradients": bool(queries % 2)}

    def possible(self, case: Case) -> bool:
        if case.get("mask", "none") == "none":
            return True
        return int(case["tokens"]) > 1 and (case["mask"] != "row" or int(case["batch"]) > 1)

    def observe(self, subject: Subject, case: Case, dice: Dice) -> Iterator[Observation]:
        with torch.set_grad_enabled(bool(case["gradients"])):
            if "form" in case:
                assert isinstance(subject, Operator)
                yield from _operator(subject, case, dice)
            else:
                yield from _tokens(subject, case, dice)


def _tokens(subject: Subject, case: Case, dice: Dice) -> Iterator[Observation]:
    batch, tokens = int(case["batch"]), int(case["tokens"])
    x = subject.draw(batch, tokens, dice)
    plain = subject.run(x)
    if "aligned" in subject.abilities:
        yield _has(plain, (batch, tokens), f"an input of {batch} rows and {tokens} tokens", leading=2)
    if case["mask"] == "none":
        other = subject.run(different(subject, x, dice, 30.0))
        yield from _alike(subject, plain, other, "the content of the input")
        return
    subject.run(x, torch.ones(batch, tokens, dtype=torch.bool))  # what refuses every mask is not judged by one
    mask = token_mask(str(case["mask"]), batch, tokens, int(case["hidden"]), dice)
    yield from _masked(subject, plain, lambda: subject.run(x, mask), f"a mask ({case['mask']})")


def _operator(subject: Operator, case: Case, dice: Dice) -> Iterator[Observation]:
    batch, queries, keys, form = int(case["batch"]), int(case["queries"]), int(case["keys"]), str(case["form"])
    query, key, value = subject.tensors(dice, batch, queries, keys)
    plain = subject.attend(query, key, value)
    expected = (batch, subject.heads, queries, subject.value_dim)
    yield _has(plain, expected, f"{queries} queries for {keys} keys")
    if form == "none":
        return
    if form in ("keys", "empty"):
        real = token_mask("random", batch, keys, max(keys // 2, 1), dice)
        mask = key_mask(subject, real & (form != "empty"), "keys" if form == "keys" else "pairs", queries)
    else:
        mask = pair_mask(subject, form, batch, queries, keys, dice)
    subject.attend(query, key, value, torch.ones_like(mask))  # what refuses every mask is not judged by one
    yield from _masked(subject, plain, lambda: subject.attend(query, key, value, mask), f"a mask ({form})")


def _masked(subject: Subject, plain: Tensor, call: Callable[[], Tensor], changed: str) -> Iterator[Observation]:
    try:
        output = call()
    except Exception as failure:  # another mask of this shape ran, so it is the content that is refused
        words = str(failure).strip().splitlines()[:1]
        effect = f"is none with this mask, though others of its shape run: {type(failure).__name__} {' '.join(words)}"
        yield true(False, effect, changed=changed)
        return
    yield from _alike(subject, plain, output, changed)


def _alike(subject: Subject, plain: Tensor, output: Tensor, changed: str) -> Iterator[Observation]:
    yield _has(output, tuple(plain.shape), changed)
    form = getattr(subject, "form", None)
    if form is None or not form.dtype.is_floating_point:  # a mask in another precision may bring its own
        kinds = f"is {output.dtype}, not {plain.dtype}".replace("torch.", "")
        yield true(output.dtype == plain.dtype, kinds, changed=changed)


def _has(output: Tensor, shape: tuple[int, ...], changed: str, leading: int | None = None) -> Observation:
    """The sizes of an output, or the first `leading` of them."""
    found = tuple(output.shape[:leading])
    return true(found == shape, f"is {tuple(output.shape)}, not {shape}", changed=changed)
