"""L23: the shape of the output depends on the shape of the input alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.law import Case, Law, Observation, expect_true
from regard.laws.masks import key_mask, pair_mask, token_mask
from regard.laws.probes import draw_other_content
from regard.laws.variants import LONG, half_precisions, head_sizes, long_lengths

MASKS = ("same", "left", "right", "interior", "single", "row", "random")


class ShapeLaw(Law):
    id = "L23"
    slug = "shape"
    title = "Shape"
    headline = "the shape of the output depends on more than the shape of the input."
    statement = (
        "Inputs of one shape give outputs of one shape and one dtype: with every mask that fits, with and without "
        "gradients. Where outputs have tokens, there is one for each token of the input. Operators and layers return "
        "the dtype of their input."
    )
    equation = "shape(f(x, m)) = shape(f(x))"
    catches = (
        "a fast path that drops columns masked in every row, a squeeze of a batch of one, a mask that raises, half "
        "precision in and float32 out"
    )
    smallest = {"batch": 1, "tokens": 1, "queries": 1, "keys": 1, "hidden": 1}
    kinds = ("mask", "form", "gradients")
    minimum = 6

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        masks = MASKS if "mask" in subject.abilities else ()
        lengths = subject.lengths(5, 1, 2, 7) if fast else subject.lengths(5, 1, 2, 7, 17, 33, 130)
        yield {"batch": 2, "tokens": lengths[0], "mask": "none", "gradients": False}
        for name in half_precisions(subject):
            for gradients in (False, True):
                sizes = {"batch": 2, "tokens": lengths[0], "gradients": gradients, "dtype": name}
                yield {**sizes, "mask": "none"}
                for mask in ("right", "left", "random") if masks and lengths[0] > 1 else ():
                    yield {**sizes, "hidden": max(lengths[0] // 2, 1), "mask": mask}
        for tokens in long_lengths(subject, fast, LONG):
            yield {"batch": 1, "tokens": tokens, "mask": "none", "gradients": False}
            for mask in masks[:2]:
                yield {"batch": 1, "tokens": tokens, "hidden": tokens // 2, "mask": mask, "gradients": False}
        for wide in head_sizes(subject):
            yield {"batch": 2, "queries": 3, "keys": 7, "form": "none", "gradients": False, **wide}
        for gradients in (False, True):
            for batch, tokens in [(2, lengths[0]), *((1 + place % 3, length) for place, length in enumerate(lengths))]:
                yield {"batch": batch, "tokens": tokens, "mask": "none", "gradients": gradients}
                for mask in masks if tokens > 1 else ():
                    rows = max(batch, 2) if mask == "row" else batch
                    hidden = max(tokens // 2, 1)
                    sizes = {"batch": rows, "tokens": tokens, "hidden": hidden}
                    yield {**sizes, "mask": mask, "gradients": gradients}
        if isinstance(subject, OperatorAdapter):
            forms = ("none", "keys", "pairs", "heads", "shared", "empty") if masks else ("none",)
            for batch, queries, keys in ((2, 3, 7), (1, 7, 3), (3, 1, 5), (1, 1, 1), (2, 5, 1), (2, 65, 130)):
                for form in forms:
                    sizes = {"batch": batch, "queries": queries, "keys": keys}
                    yield {**sizes, "form": form, "gradients": bool(queries % 2)}

    def possible(self, case: Case) -> bool:
        if case.get("mask", "none") == "none":
            return True
        return int(case["tokens"]) > 1 and (case["mask"] != "row" or int(case["batch"]) > 1)

    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        with torch.set_grad_enabled(bool(case["gradients"])):
            if "form" in case:
                assert isinstance(subject, OperatorAdapter)
                yield from _observe_operator(subject, case, rng)
            else:
                yield from _observe_tokens(subject, case, rng)


def _observe_tokens(subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
    batch, tokens = int(case["batch"]), int(case["tokens"])
    x = subject.draw(batch, tokens, rng)
    plain = subject.run(x)
    if "aligned" in subject.abilities:
        yield _expect_shape(plain, (batch, tokens), f"an input of {batch} rows and {tokens} tokens", leading=2)
    if _keeps_precision(subject):
        kinds = f"is {plain.dtype} for an input of {x.dtype}".replace("torch.", "")
        yield expect_true(plain.dtype == x.dtype, kinds, changed=f"the precision: {x.dtype}".replace("torch.", ""))
    if case["mask"] == "none":
        other = subject.run(draw_other_content(subject, x, rng, 30.0))
        yield from _expect_same_shape_and_dtype(subject, plain, other, "the content of the input")
        return
    subject.run(
        x, torch.ones(batch, tokens, dtype=torch.bool)
    )  # raises if every mask is refused: the case is then skipped
    mask = token_mask(str(case["mask"]), batch, tokens, int(case["hidden"]), rng)
    yield from _observe_masked_call(subject, plain, lambda: subject.run(x, mask), f"a mask ({case['mask']})")


def _keeps_precision(subject: Adapter) -> bool:
    """Whether the output owes the precision of the input: of operators and layers that hold no other one.

    Models may give logits in float32.
    """
    if subject.kind == "model" or "float" not in subject.abilities:
        return False
    if not isinstance(subject.target, nn.Module):
        return True
    numbers = (*subject.target.parameters(), *subject.target.buffers())
    return all(each.dtype == subject.dtype for each in numbers if each.is_floating_point())


def _observe_operator(subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
    batch, queries, keys, form = int(case["batch"]), int(case["queries"]), int(case["keys"]), str(case["form"])
    query, key, value = subject.tensors(rng, batch, queries, keys)
    plain = subject.attend(query, key, value)
    expected = (batch, subject.heads, queries, subject.value_dim)
    yield _expect_shape(plain, expected, f"{queries} queries for {keys} keys")
    if form == "none":
        return
    if form in ("keys", "empty"):
        real = token_mask("random", batch, keys, max(keys // 2, 1), rng)
        mask = key_mask(subject, real & (form != "empty"), "keys" if form == "keys" else "pairs", queries)
    else:
        mask = pair_mask(subject, form, batch, queries, keys, rng)
    subject.attend(
        query, key, value, torch.ones_like(mask)
    )  # raises if every mask is refused: the case is then skipped
    yield from _observe_masked_call(subject, plain, lambda: subject.attend(query, key, value, mask), f"a mask ({form})")


def _observe_masked_call(
    subject: Adapter, plain: Tensor, call: Callable[[], Tensor], changed: str
) -> Iterator[Observation]:
    try:
        output = call()
    except Exception as failure:  # another mask of this shape ran, so it is the content that is refused
        words = str(failure).strip().splitlines()[:1]
        effect = f"raises with this mask, though others of its shape run: {type(failure).__name__} {' '.join(words)}"
        yield expect_true(False, effect, changed=changed)
        return
    yield from _expect_same_shape_and_dtype(subject, plain, output, changed)


def _expect_same_shape_and_dtype(
    subject: Adapter, plain: Tensor, output: Tensor, changed: str
) -> Iterator[Observation]:
    yield _expect_shape(output, tuple(plain.shape), changed)
    form = getattr(subject, "form", None)
    if form is None or not form.dtype.is_floating_point:  # a mask in another precision may bring its own
        kinds = f"is {output.dtype}, not {plain.dtype}".replace("torch.", "")
        reading = f"value.dtype == {plain.dtype}"
        yield expect_true(output.dtype == plain.dtype, kinds, of=output, reading=reading, changed=changed)


def _expect_shape(output: Tensor, shape: tuple[int, ...], changed: str, leading: int | None = None) -> Observation:
    """The sizes of an output, or the first `leading` of them."""
    found = tuple(output.shape[:leading])
    reading = f"tuple(value.shape[:{leading}]) == {shape}"
    effect = f"is {tuple(output.shape)}, not {shape}"
    return expect_true(found == shape, effect, of=output, reading=reading, changed=changed)
