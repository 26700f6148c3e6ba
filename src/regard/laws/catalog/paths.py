"""L11: all code paths give the same output."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.adapters.base import Adapter, Variant
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.compare import FACTOR
from regard.laws.half_precision import expect_like_native, make_nearly_equal_tokens
from regard.laws.law import Case, Law, Observation, expect_equal
from regard.laws.masks import make_right_padding
from regard.laws.textbook import Textbook, draw_pair_mask, find_textbook_formula, is_close
from regard.laws.variants import HALVES, LONG, LONGER, half_precisions, long_lengths

STRIDES = ("transposed", "sliced", "offset", "backwards", "expanded")
KINDS = ("random", "banded", "late", "early", "blocks")
SHAPES = ("(1, 1, Q, K)", "(Q, K)", "(B, 1, 1, K)", "(B, 1, Q, K)", "(1, H, Q, K)")
# Parts of a module that is compiled in a fast check as well.
SMALL = 32
# Roundings of half precision that an operator may make for one output.
HALF_ROUNDINGS = 16


class PathsLaw(Law):
    id = "L11"
    slug = "paths"
    title = "Path equivalence"
    headline = "two code paths gave different outputs."
    statement = (
        "Fused or eager, with or without returned weights, in training mode without dropout or in eval mode, from "
        "contiguous or strided memory, with a broadcast or an expanded mask, compiled or not: the outputs are the "
        "same. In half precision they agree up to rounding."
    )
    equation = "f_a(x) = f_b(x) for all paths a, b"
    catches = (
        "a fast path that drops the mask or the scale, ignored strides, a branch for long inputs, one form of mask"
    )
    smallest = {"batch": 1, "tokens": 1, "keys": 1}
    kinds = ("path", "mask", "tokens")
    minimum = 12

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        masks = ("none", "right") if "mask" in subject.abilities else ("none",)
        sizes = [(2, 5), (3, 66)] if fast else [(2, 5), (1, 17), (3, 66), (1, 1), (2, 131)]
        sizes = list(dict.fromkeys((batch, subject.lengths(tokens)[0]) for batch, tokens in sizes))
        variants = [variant for variant in _find_variants(subject) if variant != "compiled"]
        # Variants with code of their own read masks differently.
        own = {*subject.variants(), "training without dropout", "torch's plain kernel"}
        poisoned = list(subject.variants()) if {"float", "aligned"} <= subject.abilities else []
        yield from self._make_variant_cases(subject, masks, fast)
        for number, (batch, tokens) in enumerate(sizes):
            if number == 1 and isinstance(subject, OperatorAdapter) and find_textbook_formula(subject) is not None:
                yield from _make_formula_cases(subject, fast)
            for variant in variants:
                for mask in (*masks, *(("left", "holes") if variant in own and len(masks) > 1 else ())):
                    yield {"path": variant, "batch": batch, "tokens": tokens, "mask": mask}
            for variant in poisoned if tokens > 1 else ():
                yield {"path": variant, "batch": batch, "tokens": tokens, "mask": "none", "poison": True}
            if isinstance(subject, OperatorAdapter) and 1 < tokens < 100:
                yield from _make_operator_cases(subject, batch, tokens, fast)
            elif "mask" in subject.abilities and 1 < tokens < 100:
                yield {"path": "additive mask", "batch": batch, "tokens": tokens, "mask": "right"}

    @staticmethod
    def _make_variant_cases(subject: Adapter, masks: tuple[str, ...], fast: bool) -> Iterator[Case]:
        """Half precision, a compiled call, and lengths beyond the usual ones."""
        short = subject.lengths(5)[0]
        halves, long = half_precisions(subject), long_lengths(subject, fast, LONG, LONGER)
        for tokens in long:
            for name in halves if tokens == long[0] else halves[:1]:
                yield {"path": name, "batch": 1, "tokens": tokens, "mask": "none", "content": "two groups"}
        for name in halves:
            for mask in (*masks, *(("left", "holes") if len(masks) > 1 else ())) if short > 1 else ("none",):
                yield {"path": name, "batch": 2, "tokens": short, "mask": mask}
        if _is_small(subject.target) or not fast:
            for mask in ("holes",) if len(masks) > 1 and short > 2 else ("none",):
                yield {"path": "compiled", "batch": 2, "tokens": short, "mask": mask}
        # Variants with code of their own have their own branches for long inputs.
        own = [*subject.variants(), "with gradients", "torch's plain kernel"]
        for tokens in long:
            for variant in own if tokens == long[0] else own[:1]:
                yield {"path": variant, "batch": 1, "tokens": tokens, "mask": "holes" if len(masks) > 1 else "none"}

    def possible(self, case: Case) -> bool:
        return int(case["tokens"]) > 1 or case["mask"] == "none"

    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        with torch.no_grad():
            if isinstance(subject, OperatorAdapter) and "keys" in case:
                yield from _observe_operator(subject, case, rng)
                return
            batch, tokens, name = int(case["batch"]), int(case["tokens"]), str(case["path"])
            x = subject.draw(batch, tokens, rng)
            if case.get("content") == "two groups":
                x = make_nearly_equal_tokens(subject, x, rng)
            mask = None if case["mask"] == "none" else _make_token_mask(str(case["mask"]), batch, tokens)
            how: dict[str, Any] = {
                "reduction": tokens + subject.channels,
                "changed": f"computed by another path: {name}",
            }
            if mask is not None and "aligned" in subject.abilities:
                how["where"] = mask
            if name == "additive mask" and mask is not None and name not in subject.variants():
                if (adding := _with_additive_mask(subject)) is not None:
                    yield from _observe_additive_mask(subject.run(x), subject.run(x, mask), adding.run(x, mask), how)
                return
            if case.get("poison"):
                yield from _observe_nan(subject, subject.variants()[name], x, rng, name)
                return
            if name in HALVES:
                half = subject.at(HALVES[name])
                if half is not None and subject.dtype == subject.native:
                    yield from expect_like_native(
                        subject, half, x, mask, how.get("where"), rng, f"the precision: {name}"
                    )
                return
            if name in STRIDES:
                x, view = make_strided(x, name)
                plain, other = subject.run(x, mask), subject.run(view, mask)
            else:
                plain = subject.run(x, mask)
                other = _find_variants(subject)[name](x, mask)
            if other is not None:
                yield expect_equal(plain, other, **how)


# Variants of every subject


def _make_token_mask(kind: str, batch: int, tokens: int) -> Tensor:
    mask = make_right_padding(batch, tokens)
    if kind == "left":
        return mask.flip(1)
    if kind == "holes":
        mask = torch.ones(batch, tokens, dtype=torch.bool)
        mask[-1, 1::3] = tokens < 2
    return mask


def _observe_nan(subject: Adapter, variant: Variant, x: Tensor, rng: Rng, name: str) -> Iterator[Observation]:
    """A NaN that reaches the output on one code path must reach it on all.

    Outputs that do not depend on the token, and its own, are left out: zero times NaN is a matter of convention.
    """
    place, other = x.shape[1] // 2, x.clone()
    other[:, place] = subject.draw(x.shape[0], x.shape[1], rng)[:, place]
    before = subject.run(x)
    dependent = (before - subject.run(other)).abs().flatten(2).amax(-1) > 1e-6 * before.abs().max()
    dependent[:, place] = False
    other[:, place] = torch.nan
    yield expect_equal(
        subject.run(other).isnan().double(),
        variant(other, None).isnan().double(),
        where=dependent,
        changed=f"input[:, {place}] is NaN, computed by another path: {name}",
        effect="is NaN on one path and a number on the other",
    )


def _find_variants(subject: Adapter) -> dict[str, Callable[[Tensor, Tensor | None], Tensor | None]]:
    """Other code paths that compute the same, by name; one that cannot run here returns None."""
    variants: dict[str, Callable[[Tensor, Tensor | None], Tensor | None]] = {}
    variants.update(subject.variants())
    for name in STRIDES if not isinstance(subject, OperatorAdapter) else ():
        variants[name] = subject.run
    if "gradients" in subject.abilities:
        variants["with gradients"] = lambda x, mask: _run_with_gradients(subject, x, mask)
    variants["inference mode"] = lambda x, mask: _run_in_inference_mode(subject, x, mask)
    variants["torch's plain kernel"] = lambda x, mask: _run_with_math_kernel(subject, x, mask)
    if "mask" in subject.abilities:
        variants["a mask of ones"] = lambda x, mask: (
            subject.run(x, torch.ones(x.shape[:2], dtype=torch.bool)) if mask is None else None
        )
    if isinstance(subject.target, nn.Module) and _trains_as_it_runs(subject.target):
        variants["training without dropout"] = lambda x, mask: _run_in_training_mode(subject, x, mask)
    variants["compiled"] = lambda x, mask: _run_compiled(subject, x, mask)
    return variants


def make_strided(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The input, contiguous, and the same numbers in memory that is not."""
    if name == "expanded":  # every row is the first one, and takes no memory
        view = x[:1].expand_as(x)
        return view.contiguous(), view
    if name == "transposed":
        return x, x.transpose(0, 1).contiguous().transpose(0, 1)
    if name == "sliced":
        return x, torch.stack([x, x.roll(1, -1)], -1).flatten(-2)[..., ::2]
    if name == "offset":
        wider = torch.cat([x[:, :1], x, x[:, :1]], 1)
        return x, wider[:, 1:-1]
    return x, x.transpose(1, -1).contiguous().transpose(1, -1)


def _run_with_gradients(subject: Adapter, x: Tensor, mask: Tensor | None) -> Tensor:
    with torch.enable_grad():
        x = x.clone()
        return subject.run(x.requires_grad_() if x.is_floating_point() else x, mask).detach()


def _run_in_inference_mode(subject: Adapter, x: Tensor, mask: Tensor | None) -> Tensor:
    other = subject.copy_unused()  # tables made in this mode cannot be used outside it
    with torch.inference_mode():
        output = other.run(x, mask)
    return output.clone()


def _run_with_math_kernel(subject: Adapter, x: Tensor, mask: Tensor | None) -> Tensor:
    """With torch's fused kernels and its fast path for encoders switched off."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH):
            return subject.run(x, mask)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _trains_as_it_runs(module: nn.Module) -> bool:
    """Whether training mode should compute the same once dropout is off: nothing is learnt from the batch itself."""
    for part in module.modules():
        named = type(part).__name__.lower()
        if isinstance(part, nn.modules.batchnorm._NormBase | nn.RReLU) or "batchnorm" in named:
            return False
        if any("running_" in name or name.endswith("_u") for name, _ in part.named_buffers(recurse=False)):
            return False
    return True


def _run_in_training_mode(subject: Adapter, x: Tensor, mask: Tensor | None) -> Tensor | None:
    other = subject.copy_unused()
    for part in other.target.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd) or "drop" in type(part).__name__.lower():
            part.p = 0.0  # type: ignore[assignment]
        for name, value in list(vars(part).items()):
            if "drop" in name.lower() and isinstance(value, float) and 0 <= value < 1:
                setattr(part, name, 0.0)
    other.target.train()
    state = torch.get_rng_state()
    one, two = other.run(x, mask), other.run(x, mask)
    torch.set_rng_state(state)
    if one.shape != two.shape or not torch.equal(one.nan_to_num(), two.nan_to_num()):
        return None  # something random is left that cannot be switched off from outside
    return one if one.shape == subject.run(x, mask).shape else None


def _run_compiled(subject: Adapter, x: Tensor, mask: Tensor | None) -> Tensor | None:
    if subject.dtype != subject.native:
        return None  # once is enough
    other = subject.copy_unused()
    try:
        # The graph as dynamo traces it, run as it is: what differs is the subject's own code, not a compiler's.
        other.target = torch.compile(other.target, backend="eager")
        return other.run(x, mask)
    except Exception:  # what cannot be compiled is not silent
        return None
    finally:
        torch._dynamo.reset()


def _is_small(target: Any) -> bool:
    """Whether tracing takes a fraction of a second."""
    return not isinstance(target, nn.Module) or sum(1 for _ in target.modules()) <= SMALL


@dataclass(frozen=True)
class _Additive:
    """A mask as scores to add: 0 for visible, -inf for hidden."""

    name: str
    numbers: torch.dtype

    def give(self, mask: Tensor) -> Tensor:
        return torch.zeros(mask.shape, dtype=self.numbers).masked_fill(~mask, float("-inf"))


def _with_additive_mask(subject: Any) -> Any | None:
    """The subject with additive masks; None if it has no boolean ones."""
    form = getattr(subject, "form", None)
    if form is None or form.dtype != torch.bool:
        return None
    other = copy.copy(subject)
    other.form = _Additive(form.name, subject.dtype)
    return other


def _observe_additive_mask(
    unmasked: Tensor, masked: Tensor, output: Tensor, how: dict[str, Any]
) -> Iterator[Observation]:
    """An additive mask is applied, rejected or means something else; it is not silently ignored."""
    where = how.get("where", torch.ones(masked.shape[:2], dtype=torch.bool))
    if output.shape != masked.shape or is_close(unmasked[where], masked[where]) or not is_close(unmasked, output, 1e-6):
        return
    yield expect_equal(masked, output, **{**how, "effect": "is as if there were no mask: the additive one was ignored"})


# Variants of operators


def _make_operator_cases(subject: OperatorAdapter, batch: int, tokens: int, fast: bool) -> Iterator[Case]:
    sizes = {"batch": batch, "tokens": tokens}
    for keys in dict.fromkeys((tokens, tokens + 4)):
        for layout in ("tokens first", "one projection", "expanded heads", "expanded rows", "padded memory"):
            yield {"path": layout, **sizes, "keys": keys, "mask": "none"}
        if "mask" in subject.abilities:
            yield {"path": "tokens first", **sizes, "keys": keys, "mask": "random"}
            for shape in SHAPES:
                if batch > 1 and tokens not in (1, batch):
                    for kind in ("random",) if fast else ("random", "banded"):
                        yield {"path": f"mask of {shape}", **sizes, "keys": keys, "mask": kind}
            yield {"path": "strided mask", **sizes, "keys": keys, "mask": "random"}
            if tokens > 1:
                yield {"path": "additive mask", **sizes, "keys": keys, "mask": "random"}


def _make_formula_cases(subject: OperatorAdapter, fast: bool) -> Iterator[Case]:
    formula = find_textbook_formula(subject)
    assert formula is not None
    masks = ("none", *KINDS) if formula.masks else ("none",)
    pairs = [(1, 1), (7, 7), (65, 65), (130, 130), (1, 9), (5, 130), (300, 300), (2, 300), (17, 16), (129, 64)]
    pairs += [(LONG, LONG), (3, LONGER)]
    pairs += (
        [] if fast else [(2, 2), (16, 16), (64, 64), (128, 128), (127, 257), (31, 33), (66, 3), (257, 257), (1, 520)]
    )
    pairs = [
        (queries, keys)
        for queries, keys in pairs
        if queries == keys or not (formula.align is None or (formula.causal and queries > keys))
    ]
    # One mask for each size first, then what else may change, then the other masks.
    telling = [masks[0], masks[-1]]
    for queries, keys in pairs:
        for mask in dict.fromkeys(telling if min(queries, keys) > 1 else masks[:2]):
            yield _make_formula_case(queries, keys, mask)
    small = {"batch": 2, "tokens": 5, "keys": 5, "mask": "none"}
    for change in (
        "one head",
        "five heads",
        "wide values",
        "narrow values",
        "larger",
        "80 channels",
        "128 channels",
        "more rows",
        "bfloat16",
        "float16",
    ):
        yield {"path": f"the formula: {change}", **small}
        yield {
            "path": f"the formula: {change}",
            **small,
            "tokens": 70,
            "keys": 70,
            "mask": masks[-1 if formula.masks else 0],
        }
    for tokens in (6, 70):
        yield {"path": "the formula: no number in a query", **small, "tokens": tokens, "keys": tokens}
    for queries, keys in pairs:
        for mask in masks if queries > 1 and 1 < keys < LONG else ():
            if mask not in telling:
                yield _make_formula_case(queries, keys, mask)


def _make_formula_case(queries: int, keys: int, mask: str) -> dict:
    batch = 1 + (queries + keys) % 2 if keys < LONG else 1
    return {"path": "the formula", "batch": batch, "tokens": queries, "keys": keys, "mask": mask}


def _observe_operator(subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
    batch, queries, keys, variant = int(case["batch"]), int(case["tokens"]), int(case["keys"]), str(case["path"])
    how: dict[str, Any] = {"reduction": keys + subject.dim, "changed": f"computed by another path: {variant}"}
    kind = str(case["mask"])
    if variant.startswith("the formula"):
        yield from _observe_formula(
            subject, batch, queries, keys, kind, variant.removeprefix("the formula: "), rng, how
        )
        return
    tensors = subject.tensors(rng, batch, queries, keys)
    mask = None if kind == "none" else draw_pair_mask(kind, batch, subject.heads, queries, keys, rng)
    if variant.startswith("mask of"):
        assert mask is not None
        mask = {
            "(1, 1, Q, K)": mask[:1, :1],
            "(Q, K)": mask[0, 0],
            "(B, 1, 1, K)": _make_key_mask(mask),
            "(B, 1, Q, K)": mask[:, :1],
            "(1, H, Q, K)": mask[:1],
        }[variant.removeprefix("mask of ")]
        plain = subject.attend(*tensors, mask.expand(batch, subject.heads, queries, keys).contiguous())
        yield expect_equal(subject.rows(plain), subject.attend_rows(*tensors, mask), **how)
    elif variant == "strided mask":
        assert mask is not None
        view = mask.mT.contiguous().mT
        plain = subject.attend(*tensors, mask)
        yield expect_equal(subject.rows(plain), subject.attend_rows(*tensors, view), **how)
    elif variant == "additive mask":
        if mask is not None and (adding := _with_additive_mask(subject)) is not None:
            plain, hidden = subject.attend_rows(*tensors), subject.attend_rows(*tensors, mask)
            yield from _observe_additive_mask(plain, hidden, subject.rows(adding.attend(*tensors, mask)), how)
    else:
        plain, views = zip(*(_lay_out_in_memory(tensor, variant) for tensor in tensors), strict=True)
        expected = subject.attend(plain[0], plain[1], plain[2], mask)
        yield expect_equal(subject.rows(expected), subject.attend_rows(views[0], views[1], views[2], mask), **how)


def _make_key_mask(mask: Tensor) -> Tensor:
    """A mask of keys alone, for which every query sees at least the last half of the keys, and the first."""
    columns = mask[:, :1, :1].clone()
    columns[..., columns.shape[-1] // 2 :] = True
    columns[..., 0] = True
    return columns


def _lay_out_in_memory(tensor: Tensor, variant: str) -> tuple[Tensor, Tensor]:
    """A tensor of an operator, contiguous, and the same numbers as other code would hand them over."""
    if variant == "tokens first":
        return tensor, tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if variant == "one projection":  # a slice of queries, keys and values that were computed together
        return tensor, torch.stack([-tensor, tensor, 2 * tensor], 3).transpose(1, 2).contiguous().transpose(1, 2)[
            :, :, :, 1
        ]
    if variant == "expanded heads":
        view = tensor[:, :1].expand_as(tensor)
        return view.contiguous(), view
    if variant == "expanded rows":
        view = tensor[:1].expand_as(tensor)
        return view.contiguous(), view
    wider = torch.full((*tensor.shape[:2], tensor.shape[2] + 3, tensor.shape[3] + 2), 1e3, dtype=tensor.dtype)
    wider[:, :, 1:-2, 1:-1] = tensor
    return tensor, wider[:, :, 1:-2, 1:-1]


def _observe_formula(
    subject: OperatorAdapter, batch: int, queries: int, keys: int, kind: str, change: str, rng: Rng, how: dict[str, Any]
) -> Iterator[Observation]:
    """The operator against the formula that it was found to compute on a few tokens."""
    formula = find_textbook_formula(subject)
    if formula is None:
        return
    heads, dim = subject.heads, subject.dim
    sizes = {
        "one head": {"heads": 1, "dim": dim},
        "five heads": {"heads": 5, "dim": dim},
        "wide values": {"heads": heads, "dim": dim, "value_dim": dim + 5},
        "narrow values": {"heads": heads, "dim": dim, "value_dim": 3},
        "larger": {"heads": heads, "dim": 2 * dim},
        "80 channels": {"heads": 2, "dim": 80},
        "128 channels": {"heads": 2, "dim": 128},
    }.get(change, {})
    batch = 7 if change == "more rows" else batch
    tensors = subject.tensors(rng, batch, queries, keys, **sizes)
    mask = None if kind == "none" else draw_pair_mask(kind, batch, tensors[0].shape[1], queries, keys, rng)
    if mask is not None and formula.causal and formula.align == "start":
        mask[..., 0] = True  # else a query might see nothing
    if change == "no number in a query":
        place = queries // 2
        tensors[0][:, :, place] = torch.nan
        how["where"] = (torch.arange(queries) != place).expand(batch, queries)
    if change in ("bfloat16", "float16"):
        native = subject.at(subject.native)
        half = None if native is None else native.at(torch.bfloat16 if change == "bfloat16" else torch.float16)
        if half is None or subject.dtype != torch.float64:
            return
        query, key, value = (tensor.to(half.dtype) for tensor in tensors)
        found = half.attend(query, key, value, mask).float()  # type: ignore[attr-defined]
        numbers = (query.float(), key.float(), value.float())
        expected = formula(*numbers, mask)
        allowed = HALF_ROUNDINGS * torch.finfo(half.dtype).eps * float(value.float().abs().max())
        factor = FACTOR[torch.float64] if subject.eps < 1e-12 else FACTOR[torch.float32]
        how |= {"reduction": 1, "scale": allowed / (factor * subject.eps)}
    else:
        numbers = tensors
        found, expected = subject.attend(*tensors, mask), formula(*tensors, mask)
        how["scale"] = float(tensors[2].abs().max())
    if not is_close(expected, found) and (pattern := _find_own_pattern(subject, formula, *tensors[:2])) is not None:
        # A window is wider than a few tokens; within it the formula holds.
        expected = formula(*numbers, pattern if mask is None else mask & pattern)
    yield expect_equal(subject.rows(expected), subject.rows(found), **how)


def _find_own_pattern(subject: OperatorAdapter, formula: Textbook, query: Tensor, key: Tensor) -> Tensor | None:
    """The pairs that interact without a mask; None where a query does not see its own place: no pattern does that."""
    visible = subject.matrix(query, key) != 0
    queries, keys = visible.shape[-2:]
    place = torch.arange(queries) + (keys - queries if formula.align != "start" else 0)
    real = (place >= 0) & (place < keys)
    return visible if bool(visible[:, :, torch.arange(queries)[real], place[real]].all()) else None
