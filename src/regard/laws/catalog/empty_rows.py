"""L6: a query that sees no key still has a documented output."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from regard.adapters.base import Adapter
from regard.adapters.operator import OperatorAdapter
from regard.adapters.rng import Rng
from regard.laws.law import Case, Law, Observation, expect_equal, expect_finite, expect_true
from regard.laws.masks import pair_mask, token_mask
from regard.laws.probes import agree_up_to_rounding, expect_same_output, find_magnitude, is_causal
from regard.laws.variants import LONG, half_precisions, head_sizes, long_lengths


class EmptyRowsLaw(Law):
    id = "L6"
    slug = "empty-rows"
    title = "Totality on empty rows"
    headline = "a query without visible keys has a wrong output or gradient."
    statement = (
        "A query with no visible key gives one documented output, zeros unless declared otherwise, on every code "
        "path. Its gradients are finite, and other outputs are unaffected. For a layer, the output is finite."
    )
    equation = "sum_j m_ij = 0  =>  y_i = 0"
    catches = "a softmax of a row of -inf, a whole block of masked keys in an online softmax, NaN in gradients only"
    smallest = {"batch": 1, "tokens": 1, "hidden": 1, "queries": 1, "keys": 1}
    kinds = ("comparison", "form", "side")
    minimum = 4

    def applies(self, subject: Adapter) -> str | None:
        if "mask" in subject.abilities or (isinstance(subject, OperatorAdapter) and is_causal(subject)):
            return None
        return "nothing can be hidden from a query: it takes no mask"

    def cases(self, subject: Adapter, fast: bool) -> Iterator[Case]:
        masked, causal = "mask" in subject.abilities, is_causal(subject)
        if not isinstance(subject, OperatorAdapter):
            tokens = subject.lengths(5)[0]
            for case in ({"batch": 2, "tokens": tokens, "dtype": name} for name in half_precisions(subject)):
                yield {"comparison": "layer", **case, "hidden": tokens, "side": "row"}
                if causal and tokens > 1:
                    yield {"comparison": "layer", **case, "hidden": tokens // 2, "side": "left"}
            for tokens in long_lengths(subject, fast, LONG):
                yield {"comparison": "layer", "batch": 2, "tokens": tokens, "hidden": tokens, "side": "row"}
            for batch, wanted in ((2, 5), (1, 3), (3, 7), (2, 1), (2, 33), (2, 130)):
                for tokens in subject.lengths(wanted):
                    yield {"comparison": "layer", "batch": batch, "tokens": tokens, "hidden": tokens, "side": "row"}
                    if causal and tokens > 1:
                        yield {
                            "comparison": "layer",
                            "batch": batch,
                            "tokens": tokens,
                            "hidden": tokens // 2,
                            "side": "left",
                        }
            return
        for batch, queries, keys in ((2, 5, 5), (1, 3, 7), (3, 7, 4), (1, 1, 1), (2, 1, 6)):
            for form in ("shared", "pairs", "heads", "row", "head", "all") if masked else ():
                if form != "head" or subject.heads > 1:
                    yield {"comparison": "rows", "batch": batch, "queries": queries, "keys": keys, "form": form}
        if masked:
            for name in half_precisions(subject):
                yield {"comparison": "rows", "batch": 2, "queries": 5, "keys": 5, "form": "pairs", "dtype": name}
                yield {"comparison": "rows", "batch": 2, "queries": 5, "keys": 5, "form": "row", "dtype": name}
            for wide in head_sizes(subject):
                yield {"comparison": "rows", "batch": 2, "queries": 5, "keys": 5, "form": "pairs", **wide}
            yield {"comparison": "rows", "batch": 1, "queries": 3, "keys": LONG, "form": "pairs"}
        for queries, keys in ((5, 3), (7, 2), (3, 1), (70, 6), (130, 129)) if causal else ():
            yield {"comparison": "longer", "batch": 2, "queries": queries, "keys": keys}
        for tokens in (5, 7, 33, 130) if causal and masked else ():
            yield {"comparison": "left", "batch": 2, "tokens": tokens, "hidden": tokens // 2}
        for tokens in (5, 33, 130) if masked else ():
            yield {"comparison": "paths", "batch": 2, "tokens": tokens}
        for keys in ((200,) if fast else (40, 70, 140, 200, 300, 130, 65)) if masked else ():
            for form in ("band", "late", "early"):
                yield {"comparison": "blocks", "batch": 1, "queries": min(keys, 200), "keys": keys, "form": form}
            yield {"comparison": "rows", "batch": 2, "queries": keys, "keys": keys, "form": "pairs"}
            yield {"comparison": "rows", "batch": 2, "queries": keys, "keys": keys, "form": "row"}

    def possible(self, case: Case) -> bool:
        if case["comparison"] == "longer":
            return int(case["queries"]) > int(case["keys"])
        if case.get("side") == "left" or case["comparison"] == "left":
            return 0 < int(case["hidden"]) < int(case["tokens"])
        return True

    def observe(self, subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
        if case["comparison"] == "layer":
            yield from _observe_layer(subject, case, rng)
            return
        assert isinstance(subject, OperatorAdapter)
        observe = {
            "rows": _observe_masked_rows,
            "longer": _observe_more_queries_than_keys,
            "left": _observe_left_padding,
            "paths": _observe_paths,
            "blocks": _observe_hidden_blocks,
        }
        yield from observe[str(case["comparison"])](subject, case, rng)


def _observe_empty_rows(
    subject: OperatorAdapter, output: Tensor, value: Tensor, empty: Tensor, changed: str
) -> Iterator[Observation]:
    """Check empty rows. `output` is (batch, query, head, dim), `empty` (batch, query, head)."""
    meaning = subject.conventions.empty
    if meaning == "nan":
        rows = output[empty]
        words = {"of": rows, "reading": "bool(value.isnan().all())", "changed": changed}
        yield expect_true(bool(rows.isnan().all()), "is a number for a query that sees nothing", **words)
        return
    yield expect_finite(output, changed=changed)
    if meaning == "zeros":
        effect = "is not zero for a query that sees nothing"
        yield expect_equal(torch.zeros_like(output), output, where=empty, exact=True, changed=changed, effect=effect)
    elif meaning == "mean":
        mean = value.mean(2, keepdim=True).repeat_interleave(subject.heads // subject.kv_heads, 1)
        mean = subject.rows(mean).expand_as(output)
        yield expect_equal(mean, output, where=empty, reduction=value.shape[2] + subject.channels, changed=changed)


def _observe_gradients(
    subject: OperatorAdapter, tensors: tuple[Tensor, ...], mask: Tensor | None, empty: Tensor, rng: Rng
) -> Iterator[Observation]:
    """Gradients are finite; empty rows send none where they are zeros."""
    if subject.conventions.empty == "nan":
        return
    query, key, value = tensors = tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)
    output = subject.attend_rows(query, key, value, mask)
    if not output.requires_grad:
        return
    weight = rng.normal(*output.shape, dtype=output.dtype)
    gradients = torch.autograd.grad((output * weight).sum(), tensors, retain_graph=True, allow_unused=True)
    for name, gradient in zip(("query", "key", "value"), gradients, strict=True):
        if gradient is not None:
            yield expect_finite(subject.rows(gradient), changed="a mask with empty rows", output=f"gradient of {name}")
    if subject.conventions.empty != "zeros":
        return
    weight = weight.masked_fill(empty[..., None], 0.0)
    others = torch.autograd.grad((output * weight).sum(), tensors, allow_unused=True)
    scale = max((find_magnitude(gradient) for gradient in gradients if gradient is not None), default=1.0)
    for name, gradient, other in zip(("query", "key", "value"), gradients, others, strict=True):
        if gradient is not None and other is not None:
            yield expect_equal(
                subject.rows(other),
                subject.rows(gradient),
                reduction=output.shape[1] + subject.channels,
                scale=scale,
                changed="outputs of queries that see nothing",
                output=f"gradient of {name}",
            )


def _observe_masked_rows(subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
    batch, queries, keys, form = int(case["batch"]), int(case["queries"]), int(case["keys"]), str(case["form"])
    tensors = subject.tensors(rng, batch, queries, keys)
    mask = pair_mask(subject, form if form in ("shared", "pairs") else "heads", batch, queries, keys, rng)
    empty = torch.zeros(mask.shape[:3], dtype=torch.bool)  # (batch, head, query)
    if form == "row":
        real = token_mask("row", batch, keys, max(keys // 3, 1), rng) if keys > 1 else torch.zeros(batch, 1).bool()
        mask = real[:, None, None, :]
        empty = ~real.any(1)[:, None, None].expand(-1, 1, queries)
    elif form == "all":
        mask, empty = torch.zeros_like(mask), torch.ones_like(empty)
    elif form == "head":
        empty[:, subject.heads // 2] = True
    else:
        empty[..., sorted({0, queries // 2})] = True
        empty[0] &= rng.integers(0, 3, *empty.shape[1:]) > 0
        empty[..., -1 if case["batch"] == 1 else 0] = True
    mask = mask & ~empty[..., None] if mask.shape[2] == queries else mask
    changed = f"everything hidden from {'some queries' if form in ('shared', 'pairs', 'heads') else f'one {form}'}"
    changed = "everything hidden" if form == "all" else changed
    shown = empty.expand(batch, subject.heads, queries).transpose(1, 2)
    with torch.no_grad():
        output = subject.attend_rows(*tensors, mask)
        yield from _observe_empty_rows(subject, output, tensors[2], shown, changed)
        if not shown.all():
            filled = mask | empty[..., None] if mask.shape[2] == queries else mask | ~mask.any(-1, keepdim=True)
            without = subject.attend_rows(*tensors, filled)
            reduction = keys + subject.channels
            yield expect_equal(
                without, output, where=~shown, reduction=reduction, changed=changed, scale=find_magnitude(without)
            )
    yield from _observe_gradients(subject, tensors, mask, shown, rng)


def _observe_more_queries_than_keys(subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
    """A causal operator with more queries than keys: the first queries come before the first key."""
    batch, queries, keys = int(case["batch"]), int(case["queries"]), int(case["keys"])
    if not _aligns_at_end(subject):
        return
    tensors = subject.tensors(rng, batch, queries, keys)
    empty = (torch.arange(queries) < queries - keys)[None, :, None].expand(batch, -1, subject.heads)
    with torch.no_grad():
        output = subject.attend_rows(*tensors)
    yield from _observe_empty_rows(subject, output, tensors[2], empty, f"{queries} queries for {keys} keys")
    yield from _observe_gradients(subject, tensors, None, empty, rng)


@torch.no_grad()
def _aligns_at_end(subject: OperatorAdapter) -> bool:
    """Whether a causal operator puts the last query on the last key: only that query sees it."""
    if subject.conventions.align != "end":
        return False
    query, key, value = subject.tensors(Rng(0, "end"), 1, 5, 3)
    try:
        before = subject.attend(query, key, value)
        key, value = key.clone(), value.clone()
        key[:, :, -1], value[:, :, -1] = -key[:, :, -1], value[:, :, -1] + 3
        after = subject.attend(query, key, value)
    except Exception:  # it takes equal lengths only, and then no query comes before the first key
        return False
    return agree_up_to_rounding(subject, before[:, :, 3], after[:, :, 3]) and not agree_up_to_rounding(
        subject, before[:, :, 4], after[:, :, 4]
    )


def _observe_left_padding(subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
    """A causal operator with padding on the left: padded queries see nothing."""
    batch, tokens, hidden = int(case["batch"]), int(case["tokens"]), int(case["hidden"])
    tensors = subject.tensors(rng, batch, tokens, tokens)
    real = torch.arange(tokens).expand(batch, -1) >= hidden
    empty = ~real[..., None].expand(-1, -1, subject.heads)
    mask = real[:, None, None, :]
    with torch.no_grad():
        output = subject.attend_rows(*tensors, mask)
    yield from _observe_empty_rows(subject, output, tensors[2], empty, f"the first {hidden} keys hidden")
    yield from _observe_gradients(subject, tensors, mask, empty, rng)


@torch.no_grad()
def _observe_paths(subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
    """Every other code path gives the same output."""
    batch, tokens = int(case["batch"]), int(case["tokens"])
    x = subject.draw(batch, tokens, rng)
    mask = torch.ones(batch, tokens, dtype=torch.bool)
    mask[-1] = False
    expected = subject.run(x, mask)
    empty = (~mask)[..., None].expand(-1, -1, subject.heads)
    yield from _observe_empty_rows(subject, expected, subject.parted(x)[2], empty, "everything hidden from one row")
    for name, variant in subject.variants().items():
        try:
            actual = variant(x, mask)
        except Exception:  # a path that does not take this mask is not compared
            continue
        changed = f"everything hidden from one row, {name}"
        yield expect_same_output(subject, expected, actual, tokens, changed=changed)


@torch.no_grad()
def _observe_hidden_blocks(subject: OperatorAdapter, case: Case, rng: Rng) -> Iterator[Observation]:
    """Whole blocks of keys are hidden from queries that see others."""
    batch, queries, keys, form = int(case["batch"]), int(case["queries"]), int(case["keys"]), str(case["form"])
    tensors = subject.tensors(rng, batch, queries, keys)
    query_place, key_place = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    visible = (query_place - key_place).abs() <= 1
    if form == "late":
        visible = visible | (key_place >= keys - 2)
    elif form == "early":
        visible = visible | (key_place < 2)
    mask = visible[None, None]
    output = subject.attend_rows(*tensors, mask)
    if subject.conventions.empty != "nan":
        yield expect_finite(output, changed="all but a few keys hidden from each query")
    # Hidden keys do not matter, so each query alone must agree with all of them together.
    several = mask.clone()
    several[:, :, 1::2] = True
    others = subject.attend_rows(*tensors, several)
    alternate = (torch.arange(queries) % 2 == 0)[None].expand(batch, -1)
    yield expect_same_output(
        subject,
        others,
        output,
        keys,
        output,
        where=alternate,
        changed="all but a few keys hidden from each query, against every other query",
    )


def _observe_layer(subject: Adapter, case: Case, rng: Rng) -> Iterator[Observation]:
    """Of a layer, only that the output is finite: residuals and biases may be added to it."""
    batch, tokens, side = int(case["batch"]), int(case["tokens"]), str(case["side"])
    x = subject.draw(batch, tokens, rng)
    if side == "left":
        mask = torch.arange(tokens).expand(batch, -1) >= int(case["hidden"])
    elif tokens > 1:
        mask = token_mask("row", batch, tokens, tokens // 2, rng)
    else:
        mask = torch.arange(batch)[:, None] < batch - 1
    changed = "everything hidden from the first tokens" if side == "left" else "everything hidden in the last row"
    with torch.no_grad():
        output = subject.run(x, mask)
        if subject.conventions.empty != "nan":
            yield expect_finite(output, changed=changed, touched=~mask)
            for name, variant in subject.variants().items():
                try:
                    other = variant(x, mask)
                except Exception:  # a path that does not take this mask is not compared
                    continue
                yield expect_finite(other, changed=f"{changed}, {name}", touched=~mask)
        if side == "row" and batch > 1:
            without = subject.run(x[:-1], mask[:-1])
            yield expect_same_output(
                subject,
                without,
                output[:-1],
                tokens,
                where=mask[:-1] if "aligned" in subject.abilities else None,
                changed=changed,
            )
    if subject.conventions.empty == "nan":
        return
    leaves: list[Tensor] = [parameter for parameter in _list_parameters(subject) if parameter.requires_grad]
    if x.is_floating_point():
        leaves.insert(0, x.requires_grad_())
    output = subject.run(x, mask)
    if not output.requires_grad or not leaves:
        return
    gradients = torch.autograd.grad(output.square().sum(), leaves, allow_unused=True)
    worst = [gradient.detach().sum()[None] for gradient in gradients if gradient is not None]
    yield expect_finite(torch.cat([each.double() for each in worst]), changed=changed, output="gradient")


def _list_parameters(subject: Adapter) -> list[nn.Parameter]:
    return list(subject.target.parameters()) if isinstance(subject.target, nn.Module) else []
